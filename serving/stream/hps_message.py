"""Update messages in HPS's format (HugeCTR v23.09 to v24.06), which its Kafka sink writes.

A payload is little-endian: ``HCTR``, the bytes of a row as uint32, then pairs of a key and a float32 row. Keys are
int64, or uint32 for models with uint32 keys. The topic names the table.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadMessageError
from serving.model.names import MODEL_NAME, TABLE_NAME
from serving.stream.message import MOST_DIM, MOST_MESSAGE_BYTES, Kind, UpdateMessage, check_keys, check_rows

HPS_MAGIC = b"HCTR"
#: How many bytes a payload of HPS has at most.
MOST_PAYLOAD_BYTES = 256 << 10
_START = struct.Struct("<4sI")
_TOPIC_START = "hps_et."


def hps_topic(model: str, table: str) -> str:
    """Return the topic of a table."""
    return f"{_TOPIC_START}{model}.{table}"


def encode_hps(keys: NDArray[np.int64], rows: NDArray[np.float32], key_bytes: int) -> list[bytes]:
    """Return an upsert as payloads of at most 256 KiB, in the order of the keys.

    Args:
        keys: int64[N], all of one group: see ``serving.model.hps_hash.key_groups``.
        rows: float32[N, D].
        key_bytes: 8, or 4 for a model with uint32 keys.

    Raises:
        BadMessageError: a key is reserved or no uint32, a value is NaN or infinite, or one row is too long.
    """
    check_keys(keys)
    check_rows(keys, rows)
    if key_bytes == 4 and keys.size and not (keys.min() >= 0 and keys.max() <= 0xFFFFFFFF):
        at = int(np.argmax((keys < 0) | (keys > 0xFFFFFFFF)))
        raise BadMessageError("key", f"key {keys[at]} at position {at} is not a uint32, the model's key type")
    dim = rows.shape[1]
    pair = _pair(key_bytes, dim)
    most = (MOST_PAYLOAD_BYTES - _START.size) // pair.itemsize
    if not 1 <= dim <= MOST_DIM or not most:
        raise BadMessageError("dim", f"{dim:,} values of a row do not fit a payload of {MOST_PAYLOAD_BYTES:,} bytes")
    pairs = np.empty(keys.size, pair)
    pairs["key"] = keys
    pairs["row"] = rows
    start = _START.pack(HPS_MAGIC, 4 * dim)
    return [start + pairs[begin : begin + most].tobytes() for begin in range(0, keys.size, most)]


def decode_hps(
    payload: bytes | memoryview, topic: str, key_bytes: int, message_key: bytes | None = None
) -> UpdateMessage | None:
    """Read a payload.

    Args:
        payload: a message's value; empty if it has none.
        topic: ``hps_et.<model>.<table>``.
        key_bytes: 8, or 4 for a model with uint32 keys.
        message_key: the message's key, which HPS leaves empty.

    Returns:
        The upsert, or None for a beacon or a message without a value, which change nothing.

    Raises:
        BadMessageError: it is not a message of HPS's, or holds a value that no table may hold.
    """
    model, table = _names(topic)
    data = memoryview(payload).cast("B")
    if not data:
        return None
    if message_key:
        raise BadMessageError("format", f"expected a message without a key, got a key of {len(message_key):,} bytes")
    if len(data) > MOST_MESSAGE_BYTES:
        raise BadMessageError("length", f"expected at most {MOST_MESSAGE_BYTES:,} bytes, got {len(data):,}")
    if bytes(data[:4]) != HPS_MAGIC:
        raise BadMessageError("format", f"expected the message to begin with HCTR, got {bytes(data[:4])!r}")
    if len(data) < _START.size:
        raise BadMessageError("length", f"expected at least {_START.size} bytes, got {len(data)}")
    if len(data) == _START.size:
        return None
    row_bytes = _START.unpack_from(data)[1]
    if row_bytes % 4 or not 1 <= row_bytes // 4 <= MOST_DIM:
        raise BadMessageError("dim", f"expected a row of 4 to {4 * MOST_DIM:,} bytes, in fours, got {row_bytes:,}")
    pair = _pair(key_bytes, row_bytes // 4)
    if (len(data) - _START.size) % pair.itemsize:
        rest = f"expected pairs of {pair.itemsize:,} bytes after 8 bytes"
        raise BadMessageError("length", f"{rest}, got {len(data) - _START.size:,} bytes")
    pairs = np.frombuffer(data, pair, offset=_START.size)
    keys, rows = pairs["key"].astype(np.int64), pairs["row"].astype(np.float32)
    check_keys(keys)
    check_rows(keys, rows)
    return UpdateMessage(Kind.UPSERT, model, table, keys, rows)


def _pair(key_bytes: int, dim: int) -> np.dtype[Any]:
    return np.dtype([("key", "<i8" if key_bytes == 8 else "<u4"), ("row", "<f4", (dim,))])


def _names(topic: str) -> tuple[str, str]:
    model, _, table = topic.removeprefix(_TOPIC_START).partition(".")
    if not (topic.startswith(_TOPIC_START) and MODEL_NAME.fullmatch(model) and TABLE_NAME.fullmatch(table)):
        raise BadMessageError("format", f"expected a topic hps_et.<model>.<table>, got {topic[:200]!r}")
    return model, table
