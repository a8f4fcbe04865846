"""The record of one request's keys: what ``hotrow serve --record`` writes and ``hotrow plan`` reads.

``{"model":"ctr","lookups":{"user":[17],"item":[4,9]}}`` is one line. It has the keys of each table in the order of the
lookups, without the borders of slots and samples.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError, did_you_mean
from serving.protocol.document import join, known_only, required
from serving.protocol.tensors import DTYPES, Array, array_from_numbers

LOOKUPS = "lookups"
_BEGIN = b'{"model":'


def encode_lookups(config: ModelConfig, keys: Sequence[Array]) -> bytes:
    """Return the line of one request, with its line end; ``keys`` has int64[N] of each table."""
    by_table = {table.name: of_table for table, of_table in zip(config.tables, keys, strict=True)}
    return orjson.dumps(
        {"model": config.name, LOOKUPS: by_table}, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    )


def is_cut_off(line: bytes) -> bool:
    """Whether ``line`` is the beginning of a record: the server was killed while it wrote the last line."""
    if line.endswith(b"\n") or not line.startswith(_BEGIN):
        return False
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return True
    return False


def model_of_lookups(document: dict[str, Any]) -> str:
    """Return the name of a record's model.

    Raises:
        RequestError: the document is no record.
    """
    known_only(document, frozenset({"model", LOOKUPS}), "")
    return required(document, "model", str, "")


def decode_lookups(document: dict[str, Any], config: ModelConfig) -> list[tuple[TableConfig, Array]]:
    """Return a record's tables and their keys.

    Raises:
        RequestError: the record is wrong, or has a table that the model does not have.
    """
    tables = {table.name: table for table in config.tables}
    decoded = []
    for name, given in required(document, LOOKUPS, dict, "").items():
        path = join(LOOKUPS, name[:64])
        if name not in tables:
            raise RequestError(f"{path}: model {config.name!r} has no such table{did_you_mean(name, tables)}")
        keys: list[Any] = required(document[LOOKUPS], name, list, LOOKUPS)
        decoded.append((tables[name], array_from_numbers(keys, DTYPES["INT64"], (len(given),), path)))
    return decoded
