"""A CTR model in training: embedding tables, and a dense network that runs serving's layers."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serving.dense.network import run_graph
from serving.model.dense_file import Weights, weight_key
from serving.model.graph import Graph, SparseInput
from training.embedding.collection import EmbeddingBagCollection, pool
from training.embedding.exchange import Sharding
from training.embedding.parameter import TableParameter, send_gradients
from training.model.document import TableOptimizer
from training.model.initial_weights import initial_statistics, initial_weights
from training.model.losses import losses_of
from training.optimizers.regularizer import Regularizer
from training.optimizers.tables import step_tables
from training.processes import Processes
from training.row_file import TableRows
from training.samples import Bags, Samples
from training.tables.config import EmbeddingBagConfig
from training.tables.rules import AdamRule, Move, UpdateRule, UpdateType
from training.tables.table import EmbeddingTable


class CtrModel:
    """The tables and dense weights of one graph, with their optimizer state. Not thread-safe.

    In several processes, each has the dense weights and its share of the rows. All processes call the same methods with
    the same samples; each works on its share of them. The result is that of one process, up to the rounding of sums.

    Attributes:
        graph: the structure.
        tables: one per embedding layer, with the rows of this process.
        step: the number of steps so far.
        processes: those that train together.
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
        processes: Processes | None = None,
        sharding: Sharding = "key",
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
            processes: those that train together. The default is this process alone.
            sharding: how the rows are spread over the processes; see ``EmbeddingBagCollection``.
        """
        self.graph = graph
        self.processes = processes or Processes()
        rule = rule or AdamRule()
        self._rule = rule.of_dense_weights
        optimizers = tables or [TableOptimizer(rule, update_type)] * len(graph.embeddings)
        configs = {
            embedding.top: EmbeddingBagConfig(
                embedding.dim,
                embedding.combiner,
                default_value=embedding.default_value,
                keeps_slots=embedding.row_layout == "localized",
            )
            for embedding in graph.embeddings
        }
        self._collection = EmbeddingBagCollection(
            configs, seed=seed, process_group=self.processes.group, sharding=sharding
        )
        self.tables = list(self._collection.tables.values())
        self._parameters_of: dict[TableOptimizer, list[TableParameter]] = defaultdict(list)
        for table, optimizer, parameter in zip(self.tables, optimizers, self._collection.parameters(), strict=True):
            table.use_states(optimizer.rule.name, optimizer.rule.initial_states)
            self._parameters_of[optimizer].append(parameter)
        self._regularizers = regularizers
        self._losses = losses_of(graph)
        self._label_weights = torch.tensor(label_weights or [1.0] * graph.label_dim)
        self._weights = {**initial_weights(graph, seed), **initial_statistics(graph)}
        self._states = {key: self._rule.new_states(weight) for key, weight in self._weights.items()}
        self._dropout_generator = torch.Generator()
        self._seed = seed
        self.step = 0

    def train_batch(self, samples: Samples, learning_rate: float) -> float:
        """Take one step.

        Args:
            samples: at least one, with the graph's F, L and slots.
            learning_rate: the learning rate of this step.

        Returns:
            the loss before the step: the mean over samples of the sum over labels of their losses, weighted by the
            weights of samples and labels, and the terms of the regularizers.

        Raises:
            ReservedKeyError: a key is one of the four reserved values. Nothing is learned from the batch.
        """
        self._dropout_generator.manual_seed(self._dropout_seed())
        total, share = len(samples), self.processes.share_of(len(samples))
        mine = samples if self.processes.size == 1 else samples[share]
        bags = self.bags(mine)
        pooled = self._collection(dict(zip(self._collection.tables, bags, strict=True)))
        batch = {"Dropout": partial(self._dropout, total, share), "BatchNorm": partial(self._batch_norm, total)}
        logits = self._run(mine.dense, pooled, self._masks(bags), batch)
        columns = zip(self._losses, logits.T, torch.from_numpy(mine.labels).T, strict=True)
        losses = torch.stack([loss.of_samples(of_label, labels) for loss, of_label, labels in columns], dim=1)
        if mine.weights is not None:
            losses = losses * torch.from_numpy(mine.weights)[:, None]
        loss = losses.sum(dim=0) @ self._label_weights / total
        terms = sum((regularizer.term(self._learned(), total) for regularizer in self._regularizers), torch.zeros(()))
        # Gradients and losses become means over the processes. The loss of the batch is the sum of their losses.
        scaled = loss * self.processes.size
        (scaled + terms).backward()
        self._update(learning_rate, scaled.detach())
        return float(scaled.detach() + terms.detach())

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
        logits = torch.zeros(len(samples), self.graph.label_dim)
        share = self.processes.share_of(len(samples))
        mine = samples if self.processes.size == 1 else samples[share]
        bags = self.bags(mine)
        of_tables = dict(zip(self._collection.tables, bags, strict=True))
        with torch.no_grad():
            pooled = self._collection(of_tables) if tables is None else pool(tables, of_tables)
            logits[share] = self._run(mine.dense, pooled, self._masks(bags), {}, weights)
            result: NDArray[np.float32] = self.processes.total("logits", logits).numpy()
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

    def dump(self, table: int, since: int = -1) -> Iterator[TableRows]:
        """Yield the rows of a table, part by part, in the first process. Other processes send theirs and yield none.

        Args:
            table: the number of the embedding layer.
            since: see ``EmbeddingTable.dump``.
        """
        rows = self.tables[table]
        return self.processes.to_first(f"the rows of {rows.name}", rows.dump(since))

    def send_rows(self, since: int = -1) -> None:
        """Send all rows to the first process, which is in ``dump`` of one table after the other."""
        for table in range(len(self.tables)):
            for _ in self.dump(table, since):
                pass

    def load(self, table: int, rows: TableRows) -> None:
        """Add rows to a table. Each process takes those that it owns. Rows that the table has are replaced."""
        owners = self._collection.owner_of(self.tables[table].name, rows.keys)
        mine = owners == self.processes.rank
        self.tables[table].load(rows if mine.all() else rows[mine])

    def bags(self, samples: Samples) -> list[Bags]:
        """Return the keys that each embedding layer looks up. Each position of a sequence is a slot.

        The sparse inputs have the slots of the samples one after another, in the order of the graph.
        """
        parts = samples.bags.split([entry.slots for entry in self.graph.sparse])
        of_input = {entry.top: _spread(entry, bags) for entry, bags in zip(self.graph.sparse, parts, strict=True)}
        return [of_input[embedding.bottom] for embedding in self.graph.embeddings]

    def _run(
        self,
        dense: NDArray[np.float32],
        pooled: Mapping[str, torch.Tensor],
        masks: Mapping[str, torch.Tensor],
        overrides: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        tensors = {self.graph.dense_top: torch.from_numpy(dense), **pooled, **masks}
        logits: torch.Tensor = run_graph(self.graph, weights or self._weights, tensors, overrides)[self.graph.logits]
        return logits

    def _masks(self, bags: Sequence[Bags]) -> dict[str, torch.Tensor]:
        """Return the masks of sequences; ``bags`` are those of each embedding layer."""
        inputs = {entry.top: entry.sequences for entry in self.graph.sparse}
        found = ((inputs[layer.bottom], of_layer) for layer, of_layer in zip(self.graph.embeddings, bags, strict=True))
        return {
            sequences.mask: torch.from_numpy((of_layer.sizes > 0).astype(np.float32))
            for sequences, of_layer in found
            if sequences is not None and sequences.mask
        }

    def _learned(self) -> list[torch.Tensor]:
        """Return the dense weights without the statistics."""
        return [self._weights[weight_key(spec)] for spec in self.graph.weights]

    def _dropout_seed(self) -> int:
        """Depend on the seed and the step alone, so a resumed training drops the same elements."""
        return int(np.random.SeedSequence([self._seed, self.step]).generate_state(1, np.uint64)[0])

    def _dropout(
        self,
        total: int,
        share: slice,
        params: Mapping[str, Any],
        bottoms: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Drop elements and scale up the rest. Serving runs this layer as the identity."""
        keep_ratio = 1 - params["rate"]
        drawn = torch.rand((total, *bottoms[0].shape[1:]), generator=self._dropout_generator)
        return [bottoms[0] * (drawn[share] < keep_ratio) / keep_ratio]

    def _batch_norm(
        self,
        total: int,
        params: Mapping[str, Any],
        bottoms: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Normalize by the batch's mean and variance, and update the running statistics for serving."""
        x = bottoms[0]
        if total == 1:  # one sample has no variance to learn from
            mean, variance = weights["mean"], weights["var"]
        else:
            mean = self.processes.total("BatchNorm means", x.sum(dim=0)) / total
            variance = self.processes.total("BatchNorm variances", (x - mean).square().sum(dim=0)) / total
            with torch.no_grad():
                unbiased = variance * (total / (total - 1))
                weights["mean"].lerp_(mean, params["factor"])
                weights["var"].lerp_(unbiased, params["factor"])
        return [(x - mean) / torch.sqrt(variance + params["eps"]) * weights["gamma"] + weights["beta"]]

    def _update(self, learning_rate: float, loss: torch.Tensor) -> None:
        """Move all weights, and replace the loss of this process by the mean over the processes."""
        self.step += 1
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        finish_average = self.processes.start_average("dense gradients", [*gradients, loss])
        send_gradients(self._collection.parameters())
        for optimizer, parameters in self._parameters_of.items():
            step_tables(parameters, optimizer.rule, optimizer.update_type, learning_rate, self.step)
            for parameter in parameters:
                parameter.grad = None
        finish_average()
        with torch.no_grad():
            for key, weight in self._weights.items():
                if weight.grad is not None:
                    self._rule.update(Move(weight, self._states[key], weight.grad, learning_rate, self.step))
                    weight.grad = None


def _spread(entry: SparseInput, bags: Bags) -> Bags:
    """Return the bags of an input with a slot for each position of its sequences."""
    if entry.sequences is None:
        return bags
    return Bags(bags.keys, entry.sequences.spread(bags.row_ptrs).row_ptrs, entry.positions)
