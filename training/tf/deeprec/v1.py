"""TensorFlow 1 with DeepRec's names: import it as ``tf``."""

from types import SimpleNamespace
from typing import Any

from tensorflow.compat import v1

from training.tf.deeprec import feature_column
from training.tf.deeprec.ftrl import FtrlOptimizer

__all__ = ["feature_column", "train"]

train = SimpleNamespace(**{**vars(v1.train), "FtrlOptimizer": FtrlOptimizer})


def __getattr__(name: str) -> Any:
    return getattr(v1, name)
