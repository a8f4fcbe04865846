"""A CTR model under training: embedding tables and a dense network that runs the layers of serving."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serving.dense.network import run_graph
from serving.model.dense_file import Weights
from serving.model.graph import Graph
from training.embedding_table import EmbeddingTable, TouchedRows
from training.initial_weights import initial_statistics, initial_weights
from training.optimizer import Adam
from training.samples import Bags


class CtrModel:
    """Tables and dense weights of one graph, with their optimizer state. Not thread-safe."""

    def __init__(self, graph: Graph, *, seed: int, adam: Adam | None = None) -> None:
        """Draw first weights.

        Args:
            graph: the structure.
            seed: first weights and dropout are functions of it.
            adam: the optimizer; by default with HugeCTR's parameters.
        """
        self.graph = graph
        self.tables = [EmbeddingTable(embedding, seed=seed + t) for t, embedding in enumerate(graph.embeddings)]
        self._adam = adam or Adam()
        self._weights = {**initial_weights(graph, seed), **initial_statistics(graph)}
        self._moments = {key: (torch.zeros_like(w), torch.zeros_like(w)) for key, w in self._weights.items()}
        self._dropout_generator = torch.Generator().manual_seed(seed)
        self._step = 0

    def train_batch(
        self, dense: NDArray[np.float32], bags: Sequence[Bags], labels: NDArray[np.float32], learning_rate: float
    ) -> float:
        """Take one step.

        Args:
            dense: float32[B, F], B at least 1.
            bags: the keys of every embedding layer, in graph order.
            labels: float32[B, L], each 0 or 1.
            learning_rate: of this step.

        Returns:
            the mean binary cross-entropy before the step.

        Raises:
            ReservedKeyError: a key is one of the four reserved values; nothing is learnt of the batch.
        """
        touched = [table.touch(table_bags) for table, table_bags in zip(self.tables, bags, strict=True)]
        logits = self._run(
            dense, [rows.pooled for rows in touched], {"Dropout": self._dropout, "BatchNorm": _batch_norm}
        )
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels))
        loss.backward()
        self._update(touched, learning_rate)
        return float(loss.detach())

    def logits(self, dense: NDArray[np.float32], bags: Sequence[Bags]) -> NDArray[np.float32]:
        """Predict as serving does: float32[B, L] logits; keys never seen in training have the default value."""
        with torch.no_grad():
            pooled = [table.pool(table_bags) for table, table_bags in zip(self.tables, bags, strict=True)]
            result: NDArray[np.float32] = self._run(dense, pooled, {}).numpy()
        return result

    def dense_weights(self) -> Weights:
        """Copy the dense weights, as a dense model file holds them."""
        return {key: weight.detach().numpy().copy() for key, weight in self._weights.items()}

    def bags(self, keys: NDArray[np.int64]) -> list[Bags]:
        """Share out the columns of int64[B, S] keys, one per slot, among the embedding layers.

        The sparse inputs take their slots one after another, in the order of the graph.
        """
        columns, first = {}, 0
        for entry in self.graph.sparse:
            columns[entry.top] = keys[:, first : first + entry.slots]
            first += entry.slots
        return [Bags.one_key_each(np.ascontiguousarray(columns[e.bottom])) for e in self.graph.embeddings]

    def _run(
        self, dense: NDArray[np.float32], pooled: Sequence[torch.Tensor], overrides: Mapping[str, Any]
    ) -> torch.Tensor:
        tensors = {self.graph.dense_top: torch.from_numpy(dense)}
        tensors.update(zip((embedding.top for embedding in self.graph.embeddings), pooled, strict=True))
        logits: torch.Tensor = run_graph(self.graph, self._weights, tensors, overrides)[self.graph.logits]
        return logits

    def _dropout(
        self, params: Mapping[str, Any], bottoms: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Drop elements and scale up the rest: what the identity of serving is in training."""
        keep_ratio = 1 - params["rate"]
        kept = torch.rand(bottoms[0].shape, generator=self._dropout_generator) < keep_ratio
        return [bottoms[0] * kept / keep_ratio]

    def _update(self, touched: Sequence[TouchedRows], learning_rate: float) -> None:
        self._step += 1
        step_size = self._adam.step_size(learning_rate, self._step)
        for table, rows in zip(self.tables, touched, strict=True):
            table.update(rows, self._adam, step_size)
        with torch.no_grad():
            for key, weight in self._weights.items():
                if weight.grad is not None:
                    self._adam.update(weight, *self._moments[key], weight.grad, step_size)
                    weight.grad = None


def _batch_norm(
    params: Mapping[str, Any], bottoms: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Normalize by this batch's mean and variance, and remember them for serving: what BatchNorm is in training."""
    x = bottoms[0]
    if x.shape[0] == 1:  # one sample has no variance to learn from
        mean, variance = weights["mean"], weights["var"]
    else:
        mean, variance = x.mean(dim=0), x.var(dim=0, correction=0)
        with torch.no_grad():
            unbiased = variance * (x.shape[0] / (x.shape[0] - 1))
            weights["mean"].lerp_(mean, params["factor"])
            weights["var"].lerp_(unbiased, params["factor"])
    return [(x - mean) / torch.sqrt(variance + params["eps"]) * weights["gamma"] + weights["beta"]]
