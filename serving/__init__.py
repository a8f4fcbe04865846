"""Layer 2: from a request to probabilities. Importing it needs NumPy, pydantic and array-api-compat only."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving import errors
    from serving.dumps import dump_table, load_table
    from serving.hugectr import CreateEmbeddingCache, CreateParameterServer
    from serving.lookup import LookupSession
    from serving.opening import load_model
    from serving.parameter_server import ParameterServer
    from serving.session import InferenceSession
    from serving.storage import open_snapshot

__all__ = [
    "CreateEmbeddingCache",
    "CreateParameterServer",
    "InferenceSession",
    "LookupSession",
    "ParameterServer",
    "dump_table",
    "errors",
    "load_model",
    "load_table",
    "open_snapshot",
]

_HOMES = {
    "CreateEmbeddingCache": "serving.hugectr",
    "CreateParameterServer": "serving.hugectr",
    "InferenceSession": "serving.session",
    "LookupSession": "serving.lookup",
    "ParameterServer": "serving.parameter_server",
    "dump_table": "serving.dumps",
    "load_model": "serving.opening",
    "load_table": "serving.dumps",
    "open_snapshot": "serving.storage",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that one layer can be used without loading those above it."""
    if name == "errors":
        return import_module("serving.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'serving' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
