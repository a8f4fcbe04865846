"""Serve recommendation models whose embedding tables outgrow the GPU, and train them.

``load_model`` opens a model that answers in this process; ``hotrow serve`` answers over HTTP and gRPC. ``from_torch``
makes a model from a PyTorch module, and ``from_keras`` from a Keras model. ``EmbeddingBagCollection`` trains embedding
tables in any PyTorch model.

A name is imported when it is first used, so ``import hotrow`` loads neither NumPy nor PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotrow.packages import check_packages

if TYPE_CHECKING:
    from gpu_cache import EmbeddingCache
    from serving import (
        CreateEmbeddingCache,
        CreateParameterServer,
        InferenceSession,
        LookupSession,
        ParameterServer,
        dump_table,
        errors,
        load_model,
        load_table,
        open_snapshot,
    )
    from serving.config import ModelConfig, TableConfig
    from serving.importers import from_keras, from_torch, plan_import, write_model
    from serving.reading import read_batch
    from training import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, optimizers

    __version__: str

__all__ = [
    "CreateEmbeddingCache",
    "CreateParameterServer",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCache",
    "EmbeddingCollection",
    "InferenceSession",
    "LookupSession",
    "ModelConfig",
    "ParameterServer",
    "TableConfig",
    "__version__",
    "dump_table",
    "errors",
    "from_keras",
    "from_torch",
    "load_model",
    "load_table",
    "open_snapshot",
    "optimizers",
    "plan_import",
    "read_batch",
    "write_model",
]

_HOMES = {
    "EmbeddingBagCollection": "training",
    "EmbeddingBagConfig": "training",
    "EmbeddingCache": "gpu_cache",
    "EmbeddingCollection": "training",
    "ModelConfig": "serving.config",
    "TableConfig": "serving.config",
    "from_keras": "serving.importers",
    "from_torch": "serving.importers",
    "plan_import": "serving.importers",
    "read_batch": "serving.reading",
    "write_model": "serving.importers",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'hotrow' has no attribute {name!r}")
    check_packages()
    if name == "__version__":
        return import_module("serving.frontend.version").server_version()
    if name == "optimizers":
        return import_module("training.optimizers")
    try:
        return getattr(import_module(_HOMES.get(name, "serving")), name)
    except ModuleNotFoundError as err:
        if err.name != "torch":
            raise
        from serving.errors import MissingExtraError

        raise MissingExtraError("torch", "train", f"hotrow.{name}") from err


def __dir__() -> list[str]:
    return __all__
