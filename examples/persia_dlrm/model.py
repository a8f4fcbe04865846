"""The dense network of the document's DLRM, which the document leaves out."""

import torch
from torch import nn

NUM_DENSE, NUM_SPARSE, DIM = 13, 26, 16


class DLRM(nn.Module):
    def __init__(self, ln=(64, 32), sigmoid_layer=True):
        super().__init__()
        pairs = (NUM_SPARSE + 1) * NUM_SPARSE // 2
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, DIM), nn.ReLU())
        layers, width = [], DIM + pairs
        for units in ln:
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.top = nn.Sequential(*layers, nn.Linear(width, 1))
        self.sigmoid_layer = nn.Sigmoid() if sigmoid_layer else nn.Identity()
        rows, columns = torch.tril_indices(NUM_SPARSE + 1, NUM_SPARSE + 1, offset=-1)
        self.register_buffer("places", rows * (NUM_SPARSE + 1) + columns, persistent=False)

    def forward(self, dense: list[torch.Tensor], sparse: list[torch.Tensor]):
        bottom = self.bottom(torch.log(dense[0].clamp(min=0) + 1))
        vectors = torch.stack([bottom, *sparse], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.places]
        output = self.sigmoid_layer(self.top(torch.cat([bottom, products], dim=1)))
        return output, output.new_zeros(())
