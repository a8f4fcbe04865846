"""A CTR model in training: embedding tables, and a dense network that runs serving's layers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

from serving.dense.network import run_graph
from serving.model.dense_file import Weights, weight_key
from serving.model.graph import Graph
from training.embedding.collection import EmbeddingBagCollection, pool
from training.embedding.config import EmbeddingBagConfig
from training.embedding.gradients import TableParameter
from training.embedding.table import EmbeddingTable
from training.model.document import TableOptimizer
from training.model.initial_weights import initial_statistics, initial_weights
from training.optimizers.regularizer import Regularizer
from training.optimizers.rules import AdamRule, Move, UpdateRule, UpdateType
from training.optimizers.tables import step_tables
from training.samples import Bags, Samples


class CtrModel:
    """The tables and dense weights of one graph, with their optimizer state. Not thread-safe.

    Attributes:
        graph: the structure.
        tables: one per embedding layer.
        step: the number of steps so far.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        seed: int,
        rule: UpdateRule | None = None,
        update_type: UpdateType = "Local",
        tables: Sequence[TableOptimizer] | None = None,
        label_weights: Sequence[float] | None = None,
        regularizers: Sequence[Regularizer] = (),
    ) -> None:
        """Draw the first weights.

        Args:
            graph: the structure.
            seed: determines the first weights and the dropout.
            rule: the optimizer. The default is Adam with HugeCTR's parameters.
            update_type: what happens to the rows of a table without a gradient; see ``update_rows``.
            tables: the optimizer of each table. The default is ``rule`` and ``update_type`` for each.
            label_weights: L numbers, the weight of each label's loss in the sum. The default is 1 for each.
            regularizers: are added to the loss. They read the dense weights.
        """
        self.graph = graph
        self._rule = rule or AdamRule()
        optimizers = tables or [TableOptimizer(self._rule, update_type)] * len(graph.embeddings)
        configs = {
            embedding.top: EmbeddingBagConfig(embedding.dim, embedding.combiner, default_value=embedding.default_value)
            for embedding in graph.embeddings
        }
        self._collection = EmbeddingBagCollection(configs, seed=seed)
        self.tables = list(self._collection.tables.values())
        self._parameters_of: dict[TableOptimizer, list[TableParameter]] = defaultdict(list)
        for table, optimizer, parameter in zip(self.tables, optimizers, self._collection.parameters(), strict=True):
            table.use_states(optimizer.rule.initial_states)
            self._parameters_of[optimizer].append(parameter)
        self._regularizers = regularizers
        self._label_weights = torch.tensor(label_weights or [1.0] * graph.label_dim)
        self._weights = {**initial_weights(graph, seed), **initial_statistics(graph)}
        self._states = {
            key: [torch.full_like(weight, value) for value in self._rule.initial_states]
            for key, weight in self._weights.items()
        }
        self._dropout_generator = torch.Generator()
        self._seed = seed
        self.step = 0

    def train_batch(self, samples: Samples, learning_rate: float) -> float:
        """Take one step.

        Args:
            samples: at least one, with the graph's F, L and slots.
            learning_rate: the learning rate of this step.

        Returns:
            the loss before the step: the mean over samples of the sum over labels of weighted binary cross-entropies,
            and the terms of the regularizers.

        Raises:
            ReservedKeyError: a key is one of the four reserved values. Nothing is learned from the batch.
        """
        self._dropout_generator.manual_seed(self._dropout_seed())
        pooled = self._collection(dict(zip(self._collection.tables, self.bags(samples), strict=True)))
        logits = self._run(samples.dense, pooled, {"Dropout": self._dropout, "BatchNorm": _batch_norm})
        losses = binary_cross_entropy_with_logits(logits, torch.from_numpy(samples.labels), reduction="none")
        loss = losses.mean(dim=0) @ self._label_weights
        for regularizer in self._regularizers:
            loss = loss + regularizer.term(self._learned(), len(samples))
        loss.backward()
        self._update(learning_rate)
        return float(loss.detach())

    def logits(
        self,
        samples: Samples,
        dense_weights: Weights | None = None,
        tables: Sequence[EmbeddingTable] | None = None,
    ) -> NDArray[np.float32]:
        """Predict as serving does: float32[B, L] logits. Unseen keys have the default value.

        Args:
            samples: at least one.
            dense_weights: the weights of the dense network; None: those of the training.
            tables: the tables; None: those of the training.
        """
        weights = self._weights
        if dense_weights is not None:
            weights = {key: torch.from_numpy(weight) for key, weight in dense_weights.items()}
        bags = dict(zip(self._collection.tables, self.bags(samples), strict=True))
        with torch.no_grad():
            pooled = self._collection(bags) if tables is None else pool(tables, bags)
            result: NDArray[np.float32] = self._run(samples.dense, pooled, {}, weights).numpy()
        return result

    def dense_weights(self) -> Weights:
        """Return a copy of the dense weights in the form of a dense model file."""
        return {key: weight.detach().numpy().copy() for key, weight in self._weights.items()}

    def load_dense_weights(self, weights: Weights) -> None:
        """Replace the dense weights by those of a dense model file."""
        with torch.no_grad():
            for key, weight in self._weights.items():
                weight.copy_(torch.from_numpy(weights[key]))

    def dense_states(self) -> list[Weights]:
        """Return the optimizer's states of the dense weights, one ``Weights`` per state of the rule. They are views."""
        return [
            {key: states[state].numpy() for key, states in self._states.items()}
            for state in range(len(self._rule.initial_states))
        ]

    def bags(self, samples: Samples) -> list[Bags]:
        """Return the keys that each embedding layer looks up.

        The sparse inputs have the slots of the samples one after another, in the order of the graph.
        """
        parts = samples.bags.split([entry.slots for entry in self.graph.sparse])
        of_input = {entry.top: bags for entry, bags in zip(self.graph.sparse, parts, strict=True)}
        return [of_input[embedding.bottom] for embedding in self.graph.embeddings]

    def _run(
        self,
        dense: NDArray[np.float32],
        pooled: Mapping[str, torch.Tensor],
        overrides: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        tensors = {self.graph.dense_top: torch.from_numpy(dense), **pooled}
        logits: torch.Tensor = run_graph(self.graph, weights or self._weights, tensors, overrides)[self.graph.logits]
        return logits

    def _learned(self) -> list[torch.Tensor]:
        """Return the dense weights without the statistics."""
        return [self._weights[weight_key(spec)] for spec in self.graph.weights]

    def _dropout_seed(self) -> int:
        """Depend on the seed and the step alone, so a resumed training drops the same elements."""
        return int(np.random.SeedSequence([self._seed, self.step]).generate_state(1, np.uint64)[0])

    def _dropout(
        self, params: Mapping[str, Any], bottoms: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Drop elements and scale up the rest. Serving runs this layer as the identity."""
        keep_ratio = 1 - params["rate"]
        kept = torch.rand(bottoms[0].shape, generator=self._dropout_generator) < keep_ratio
        return [bottoms[0] * kept / keep_ratio]

    def _update(self, learning_rate: float) -> None:
        self.step += 1
        for optimizer, parameters in self._parameters_of.items():
            step_tables(parameters, optimizer.rule, optimizer.update_type, learning_rate, self.step)
        with torch.no_grad():
            for key, weight in self._weights.items():
                if weight.grad is not None:
                    self._rule.update(Move(weight, self._states[key], weight.grad, learning_rate, self.step))
                    weight.grad = None


def _batch_norm(
    params: Mapping[str, Any], bottoms: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Normalize by this batch's mean and variance, and update the running statistics for serving."""
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
