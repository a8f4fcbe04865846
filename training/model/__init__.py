"""CTR models: read from a HugeCTR graph, trained, evaluated and written for serving."""

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
