"""Rows of ids, for tests."""

import numpy as np
import torch

from tests.training.embedding.oracle import flat
from training import sok


def sparse(bags):
    """The ids of each row, as SparseOperationKit takes them."""
    ids, offsets = flat(bags)
    rows = np.repeat(np.arange(len(bags)), np.diff(offsets))
    columns = np.arange(len(rows)) - np.repeat(offsets[:-1], np.diff(offsets))
    indices = torch.from_numpy(np.stack([rows, columns], axis=1).astype(np.int64))
    return sok.SparseTensor(indices, torch.tensor(ids, dtype=torch.int64), [len(bags), 9])
