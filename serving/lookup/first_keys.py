"""The keys that fill a cache before requests come: the hottest keys if they are known."""

from collections.abc import Iterator

import numpy as np

from serving.config import ModelConfig, TableConfig
from serving.parameter_server import FirstRows, ParameterServer
from serving.parameter_server.table_files import open_table_file
from serving.storage.store import Keys

_BATCH_ROWS = 65536
# A cache does not rank the keys of one batch, so hot keys come in several batches.
_HOT_BATCHES, _LEAST_HOT_BATCH_ROWS = 16, 1024


def first_keys(server: ParameterServer, config: ModelConfig, table: TableConfig, rows: int) -> Iterator[Keys]:
    """Yield at most ``rows`` keys of a table, in batches of distinct keys: the hottest first, then in the file's order.

    Hot keys that the table does not have are yielded too.
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
    """Return each key once, in the order of first occurrence."""
    _, first = np.unique(keys, return_index=True)
    return keys[np.sort(first)]
