"""The plugin has one state in the process. Every test begins without it."""

import pytest
import torch

from training import embedding_plugin as plugin


@pytest.fixture(autouse=True)
def no_plugin():
    plugin.reset()
    yield
    plugin.reset()


@pytest.fixture
def trigger():
    return torch.nn.Parameter(torch.tensor(1.0))
