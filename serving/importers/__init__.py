"""Bring models that were not trained with HugeCTR into a model repository.

``plan_import`` opens a dense network (ONNX) and the tables it needs, and checks that they fit; ``write_model`` writes
them as a version.
"""

from serving.importers.plan import ImportPlan, plan_import
from serving.importers.writing import write_model

__all__ = ["ImportPlan", "plan_import", "write_model"]
