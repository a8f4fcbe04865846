"""The tensors of a model that is only looked up, with the names and forms of the hps backend of Triton.

====================  ==============  ===========================================================================
``KEYS``              INT64, UINT32   N keys, table after table, [N] or [1, N]
``NUMKEYS``           INT32, INT64    how many of these keys each table has, [T] or [1, T]
``OUTPUT0``           FP32            the row of each key, one row after the other, [n_1 * D_1 + ... + n_T * D_T]
====================  ==============  ===========================================================================
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.arrays import flat_integers
from serving.config import ModelConfig
from serving.errors import RequestError
from serving.protocol.tensors import Array, Signature, TensorSpec, config_document, key_datatypes
from serving.reading import check_request_keys

KEYS, KEY_COUNTS, ROWS = "KEYS", "NUMKEYS", "OUTPUT0"


def signature_of(config: ModelConfig) -> Signature:
    """Return a model's inputs and output; of several datatypes of an input, the declared datatype comes first.

    The inputs have two free dimensions, as in ``config.pbtxt``: clients of the hps backend send ``[1, N]``.
    """
    return Signature(
        inputs=(
            TensorSpec(KEYS, key_datatypes(config.key_type), (-1, -1)),
            TensorSpec(KEY_COUNTS, ("INT32", "INT64"), (-1, -1)),
        ),
        outputs=(TensorSpec(ROWS, ("FP32",), (-1,)),),
    )


def keys_of(config: ModelConfig, inputs: Mapping[str, Array]) -> list[NDArray[np.int64]]:
    """Return each table's keys in a request's arrays, which an ``InferDecoder`` for ``signature_of(config)`` made.

    Raises:
        RequestError: a tensor is wrong, or a table has more keys than ``config.max_batchsize`` samples may have; the
            message names the tensor and the position.
    """
    keys = flat_integers(inputs[KEYS], KEYS)
    check_request_keys(keys, config.key_type, KEYS)
    counts = flat_integers(inputs[KEY_COUNTS], KEY_COUNTS).tolist()
    _check_counts(config, counts)
    if sum(counts) != keys.size:
        raise RequestError(f"{KEY_COUNTS}: the tables have {sum(counts)} keys, but {KEYS} has {keys.size}")
    return np.split(keys, list(accumulate(counts[:-1])))


def least_samples(config: ModelConfig, keys: Sequence[NDArray[np.int64]]) -> int:
    """Return the least number of samples that can have each table's keys; a request has at least one sample."""
    limited = zip(keys, (table.max_keys_per_sample for table in config.tables), strict=True)
    return max([1, *(-(-of_table.size // limit) for of_table, limit in limited if limit)])


def answer_of(embeddings: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return ``OUTPUT0`` from the rows of each table, which ``LookupSession.lookup`` returned."""
    return np.concatenate([rows.reshape(-1) for rows in embeddings])


def triton_config(name: str, config: ModelConfig) -> dict[str, Any]:
    """Return the model's configuration as Triton's ``ModelConfig``."""
    parameters = {
        "max_batchsize": str(config.max_batchsize),
        "tables": " ".join(table.name for table in config.tables),
        "dims": " ".join(str(table.dim) for table in config.tables),
    }
    return config_document(name, signature_of(config), parameters)


def _check_counts(config: ModelConfig, counts: Sequence[int]) -> None:
    if len(counts) != len(config.tables):
        raise RequestError(f"{KEY_COUNTS}: expected {len(config.tables)} numbers, one per table; got {len(counts)}")
    for at, (count, table) in enumerate(zip(counts, config.tables, strict=True)):
        if count < 0:
            raise RequestError(f"{KEY_COUNTS}: expected 0 or more at position {at}, got {count}")
        of_sample = table.max_keys_per_sample
        if of_sample is not None and count > of_sample * config.max_batchsize:
            limit = f"{of_sample * config.max_batchsize}: {config.max_batchsize} samples of {of_sample} keys"
            raise RequestError(f"{KEY_COUNTS}: {count} keys, but table {table.name!r} takes at most {limit}")
