"""Help for the tests of `from_torch`: a small dense part, and requests to a served version."""

import numpy as np
import torch
from torch import nn


class Head(nn.Module):
    """Layers that differ between eval and train mode, over all inputs side by side."""

    def __init__(self, width, labels=1):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, labels)
        )
        nn.init.normal_(self.layers[1].running_mean)

    def forward(self, *parts):
        return self.layers(torch.cat([part.flatten(1) for part in parts], dim=1))


def draw_bags(rng, rows, samples, largest=3):
    """Draw a list of keys for each sample. Some lists are empty."""
    return [rng.integers(0, rows, rng.integers(0, largest, endpoint=True)).tolist() for _ in range(samples)]


def with_offsets(bags, with_last=False):
    """Return bags as `nn.EmbeddingBag` takes them: all keys, and the offset of each bag."""
    ends = np.cumsum([0, *(len(bag) for bag in bags)])
    return torch.tensor([key for bag in bags for key in bag]), torch.from_numpy(ends if with_last else ends[:-1])


def request(*slots):
    """Return CATCOLUMN and ROWINDEX of slots, each a list of keys per sample."""
    bags = [bag for sample in zip(*slots, strict=True) for bag in sample]
    return [key for bag in bags for key in bag], np.cumsum([0, *(len(bag) for bag in bags)])
