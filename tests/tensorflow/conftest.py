"""The tests of `make test-tensorflow`. Other environments have no TensorFlow, and leave them out."""

import os
from importlib.util import find_spec

import pytest

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
collect_ignore_glob = [] if find_spec("tensorflow") else ["*"]


@pytest.fixture
def fresh(monkeypatch):
    """SOK before ``init``."""
    from training.tf.sok import initialize

    monkeypatch.setattr(initialize, "_start", None)
    monkeypatch.setattr(initialize, "_has_batch_size", False)


@pytest.fixture
def started(fresh):
    """SOK after ``init``."""
    import tensorflow as tf

    from training.tf import sok

    tf.random.set_seed(1)
    sok.init()
