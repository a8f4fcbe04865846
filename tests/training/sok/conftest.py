"""SparseOperationKit's calls in one process."""

import pytest
import torch

from training import sok


@pytest.fixture(autouse=True)
def start():
    """Begin as a new program does."""
    torch.manual_seed(0)
    sok.init()
