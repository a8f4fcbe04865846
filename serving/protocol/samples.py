"""The request form for people: one JSON object per sample, with one list of keys per slot.

``{"samples": [{"dense": [0.5, 1.25], "keys": [[17], [4, 9], []]}]}`` has one sample for a model with two dense features
and three slots. Slots are in graph order, table by table.
"""

from itertools import accumulate, chain
from typing import Any

import numpy as np
import orjson

from serving.batch import Batch, read_batch
from serving.config import ModelConfig
from serving.errors import RequestError
from serving.protocol.document import checked, optional, parse_document, required
from serving.protocol.tensors import DTYPES, Array, array_from_numbers

#: JSON Schema and example of the body, shown by /docs.
SAMPLES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["samples"],
    "additionalProperties": False,
    "properties": {
        "samples": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["keys"],
                "additionalProperties": False,
                "properties": {
                    "dense": {"type": "array", "items": {"type": "number"}, "description": "F dense features"},
                    "keys": {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "integer"}},
                        "description": "one list of keys per slot, slots in graph order",
                    },
                },
            },
        }
    },
    "example": {"samples": [{"dense": [0.5, 1.25], "keys": [[17], [4, 9], []]}]},
}

#: JSON Schema of the answer.
PREDICTIONS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "predictions": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}},
            "description": "L probabilities per sample",
        },
        "defaulted_keys": {
            "type": "integer",
            "description": "number of keys that no tier holds and that got the default vector",
        },
        "model_version": {"type": "string"},
    },
    "example": {"predictions": [[0.731]], "defaulted_keys": 0, "model_version": "1"},
}


def decode_samples(body: bytes, config: ModelConfig) -> Batch:
    """Decode ``{"samples": [...]}`` into a batch.

    Raises:
        RequestError: anything is wrong with the document; the message starts with the JSON path.
    """
    document = parse_document(body)
    _refuse_unknown(document, {"samples"}, "")
    samples = required(document, "samples", list, "")
    if not samples:
        raise RequestError("samples: the list is empty")
    slots = sum(table.slots for table in config.tables)
    dense: list[Array] = []
    bags: list[list[Any]] = []
    for index, entry in enumerate(samples):
        path = f"samples[{index}]"
        sample = checked(entry, dict, path)
        _refuse_unknown(sample, {"dense", "keys"}, path)
        features: list[Any] = optional(sample, "dense", list, [], path)
        dense.append(array_from_numbers(features, DTYPES["FP32"], (config.dense_dim,), f"{path}.dense"))
        bags.extend(_bags(required(sample, "keys", list, path), slots, f"{path}.keys"))
    row_ptrs = np.array([0, *accumulate(map(len, bags))], dtype=np.int32)
    return read_batch(config, np.concatenate(dense), _keys(bags, slots), row_ptrs)


def _bags(entries: list[Any], slots: int, path: str) -> list[list[Any]]:
    if len(entries) != slots:
        raise RequestError(f"{path}: the model has {slots} slots, but {len(entries):,} lists of keys came")
    return [checked(bag, list, f"{path}[{slot}]") for slot, bag in enumerate(entries)]


def _keys(bags: list[list[Any]], slots: int) -> Array:
    """Return all keys in one array; only if that fails, read the bags one by one to name the key's path."""
    keys = list(chain.from_iterable(bags))
    try:
        return array_from_numbers(keys, DTYPES["INT64"], (len(keys),), "keys")
    except RequestError:
        for index, bag in enumerate(bags):
            path = f"samples[{index // slots}].keys[{index % slots}]"
            array_from_numbers(bag, DTYPES["INT64"], (len(bag),), path)
        raise


def _refuse_unknown(document: dict[str, Any], known: set[str], path: str) -> None:
    for name in document:
        if name not in known:
            raise RequestError(f"{f'{path}.{name[:64]}' if path else name[:64]}: unknown field")


def encode_predictions(probabilities: Array, defaulted_keys: int, version: str) -> bytes:
    """Encode the answer to the request of ``decode_samples``; ``probabilities`` is float32[B, L], C-contiguous."""
    document = {"predictions": probabilities, "defaulted_keys": defaulted_keys, "model_version": version}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
