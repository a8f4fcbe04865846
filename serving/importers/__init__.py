"""Import models that were not trained with HugeCTR into a model repository.

``plan_import`` opens a dense network (ONNX) and its embedding tables, and checks that they fit. ``write_model`` writes
them as a version. ``read_expected_answers`` reads what the version is verified with. ``from_torch`` does all of it for
a PyTorch module, and ``from_keras`` for a Keras model.
"""

from serving.importers.keras_model import from_keras
from serving.importers.plan import ImportPlan, plan_import
from serving.importers.pytorch import ImportedModule, from_torch
from serving.importers.verifying import Comparison, ExpectedAnswers, read_expected_answers
from serving.importers.writing import write_model

__all__ = [
    "Comparison",
    "ExpectedAnswers",
    "ImportPlan",
    "ImportedModule",
    "from_keras",
    "from_torch",
    "plan_import",
    "read_expected_answers",
    "write_model",
]
