"""The keys that a cache is filled with before requests come: the hottest, where they are known."""

from collections.abc import Iterator

import numpy as np

from serving.config import ModelConfig, TableConfig
from serving.parameter_server import FirstRows, ParameterServer
from serving.parameter_server.table_files import open_table_file
from serving.storage.store import Keys

_BATCH_ROWS = 65536
# Of the keys of one batch none goes before another, so hot ones come in several.
_HOT_BATCHES, _LEAST_HOT_BATCH_ROWS = 16, 1024


def first_keys(server: ParameterServer, config: ModelConfig, table: TableConfig, rows: int) -> Iterator[Keys]:
    """Keys of a table, in parts, at most ``rows`` that it has: the hottest first, then others in the file's order.

    The keys of a part are distinct.

    Args:
        server: knows the folder of hot keys, if any; keys in it that the table has not are among those given.
        config: the model.
        table: one of its tables.
        rows: how many.

    Raises:
        ConfigError: the hot keys cannot be read.
        ModelFileError: the model's file cannot.
    """
    model, name = open_table_file(config, table), config.full_name(table)
    first = FirstRows(hot_keys=server.hot_keys)
    choice = first.choose(name, model, rows)
    hottest = _distinct(first.hottest(name))[:rows]
    step = max(-(-hottest.size // _HOT_BATCHES), _LEAST_HOT_BATCH_ROWS)
    for begin in range(0, hottest.size, step):
        yield hottest[begin : begin + step]
    for keys in model.key_batches(_BATCH_ROWS):
        if choice.is_full:
            return
        keys = _distinct(keys)  # a single file may have a key twice
        others = keys[choice.take(keys)]
        yield others[~np.isin(others, hottest)]


def _distinct(keys: Keys) -> Keys:
    """Each key once, where it comes first."""
    _, first = np.unique(keys, return_index=True)
    return keys[np.sort(first)]
