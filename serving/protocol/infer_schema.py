"""JSON Schemas of KServe v2 ``infer``, shown by /docs. ``serving.protocol.infer`` has the exact rules."""

from typing import Any

_PARAMETERS = {"type": "object", "description": "binary_data_size, shared_memory_region, ..."}
_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 8}
_DATA = {"type": "array", "items": {}, "description": "numbers, flat or nested like the shape"}


def _tensor(**properties: Any) -> dict[str, Any]:
    named = {"name": {"type": "string"}, **properties, "parameters": _PARAMETERS}
    return {"type": "object", "required": ["name", *properties], "properties": named}


_INPUT = _tensor(shape=_SHAPE, datatype={"enum": ["FP32", "INT64", "INT32", "UINT32"]})
_INPUT["properties"]["data"] = _DATA
_OUTPUT = _tensor(shape=_SHAPE, datatype={"enum": ["FP32", "INT32"]})
_OUTPUT["properties"]["data"] = _DATA

INFER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {
                "freshness": {"type": "boolean"},
                "timeout": {"type": "integer"},
                "top_k": {"type": "integer", "minimum": 1, "description": "answer TOP_INDEX and TOP_SCORE, [users, k]"},
                "top_output": {"type": "string", "description": "the output that ranks candidates"},
            },
        },
        "inputs": {"type": "array", "items": _INPUT},
        "outputs": {"type": "array", "items": _tensor()},
    },
    "example": {
        "inputs": [
            {"name": "DES", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 1.25]},
            {"name": "CATCOLUMN", "shape": [3], "datatype": "INT64", "data": [17, 4, 9]},
            {"name": "ROWINDEX", "shape": [4], "datatype": "INT32", "data": [0, 1, 3, 3]},
        ]
    },
}
INFER_ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "parameters": {"type": "object", "properties": {"defaulted_keys": {"type": "integer"}}},
        "outputs": {"type": "array", "items": _OUTPUT},
    },
}
