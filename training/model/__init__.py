"""CTR models: read from a HugeCTR graph, trained, evaluated and written for serving."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.model.ctr_model import CtrModel
    from training.model.document import TrainingDocument, open_document
    from training.model.export import export_delta, export_dense, export_model
    from training.model.trainer import predict_logits, train

__all__ = [
    "CtrModel",
    "TrainingDocument",
    "export_delta",
    "export_dense",
    "export_model",
    "open_document",
    "predict_logits",
    "train",
]

_HOMES = {
    "CtrModel": "ctr_model",
    "TrainingDocument": "document",
    "export_delta": "export",
    "export_dense": "export",
    "export_model": "export",
    "open_document": "document",
    "predict_logits": "trainer",
    "train": "trainer",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because ``metrics`` needs no PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"training.model.{_HOMES[name]}"), name)
