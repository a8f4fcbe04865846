"""The part of TorchRec's public interface that models use for sparse features, with the same names and behavior.

Source: the documentation of ``torchrec.sparse.jagged_tensor`` and ``torchrec.modules.embedding_modules`` 1.8.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


class JaggedTensor(NamedTuple):
    all_values: torch.Tensor
    all_lengths: torch.Tensor
    all_weights: torch.Tensor | None = None

    def weights(self):
        return self.all_weights

    def values(self):
        return self.all_values

    def lengths(self):
        return self.all_lengths

    def offsets(self):
        return torch.cat([self.all_lengths.new_zeros(1), self.all_lengths.cumsum(0)])


class KeyedJaggedTensor:
    """Values of key 0 for each sample, then of key 1, and so on."""

    def __init__(self, keys, values, weights=None, lengths=None, stride=None, length_per_key=None):
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths
        self._stride, self._length_per_key = stride, length_per_key

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def weights_or_none(self):
        return self._weights

    def lengths(self):
        return self._lengths

    def stride(self):
        return self._lengths.numel() // len(self._keys) if self._stride is None else self._stride

    def length_per_key(self):
        if self._length_per_key is None:
            self._length_per_key = self._lengths.view(len(self._keys), -1).sum(1).tolist()
        return self._length_per_key

    def to_dict(self):
        values = torch.split(self._values, self.length_per_key())
        no_weights = [None] * len(self._keys)
        weights = no_weights if self._weights is None else torch.split(self._weights, self.length_per_key())
        lengths = self._lengths.view(len(self._keys), self.stride()).unbind()
        return {key: JaggedTensor(*of) for key, *of in zip(self._keys, values, lengths, weights, strict=True)}

    def __getitem__(self, key):
        return self.to_dict()[key]


class KeyedTensor:
    """[B, sum of D], and where each key's columns are."""

    def __init__(self, keys, length_per_key, values):
        self._keys, self._length_per_key, self._values = keys, length_per_key, values

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def to_dict(self):
        return dict(zip(self._keys, torch.split(self._values, self._length_per_key, dim=1), strict=True))


@dataclass
class EmbeddingBagConfig:
    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: list
    pooling: str = "sum"


class EmbeddingBagCollection(nn.Module):
    def __init__(self, tables, is_weighted=False):
        super().__init__()
        self._configs, self._is_weighted = tables, is_weighted
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings, table.embedding_dim, mode=table.pooling, include_last_offset=True
                )
                for table in tables
            }
        )

    def embedding_bag_configs(self):
        return self._configs

    def forward(self, features):
        of_key = features.to_dict()
        pooled = [
            self.embedding_bags[config.name](
                input=of_key[feature].values(),
                offsets=of_key[feature].offsets(),
                per_sample_weights=of_key[feature].weights() if self._is_weighted else None,
            )
            for config in self._configs
            for feature in config.feature_names
        ]
        names = [feature for config in self._configs for feature in config.feature_names]
        return KeyedTensor(names, [vectors.shape[1] for vectors in pooled], torch.cat(pooled, dim=1))


@dataclass
class EmbeddingConfig:
    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: list


class JaggedRows:
    """A ``JaggedTensor`` whose values are rows."""

    def __init__(self, values, lengths):
        self._values, self._lengths = values, lengths

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def to_padded_dense(self, desired_length=None, padding_value=0.0):
        most = int(self._lengths.max()) if desired_length is None else desired_length
        dense = self._values.new_full((len(self._lengths), most, self._values.shape[1]), padding_value)
        for sample, rows in enumerate(self._values.split(self._lengths.tolist())):
            dense[sample, : len(rows)] = rows[:most]
        return dense


class EmbeddingCollection(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self._configs = tables
        self.embeddings = nn.ModuleDict(
            {table.name: nn.Embedding(table.num_embeddings, table.embedding_dim) for table in tables}
        )

    def embedding_configs(self):
        return self._configs

    def embedding_names_by_table(self):
        return [config.feature_names for config in self._configs]

    def forward(self, features):
        of_key = features.to_dict()
        return {
            feature: JaggedRows(self.embeddings[config.name](input=of_key[feature].values()), of_key[feature].lengths())
            for config in self._configs
            for feature in config.feature_names
        }
