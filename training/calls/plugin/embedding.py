"""One embedding layer of the plugin: its rows, and the optimizer that updates them in each backward pass."""

import warnings
from dataclasses import dataclass, field
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kernels.host import BagLookup, first_outside, update_tables
from serving.errors import ModelFileError
from serving.model.records import Embedding as Layer
from serving.model.sparse_file import open_sparse, write_sparse_directory
from serving.model.sparse_rows import KeyType, RowLayout, key_range
from training.errors import SessionError
from training.model.parameter_files import read_table
from training.samples import Bags
from training.tables.rules import UpdateRule, UpdateType
from training.tables.table import EmbeddingTable

#: Of the vectors.
ValueType = Literal["float", "half"]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How gradients move rows.

    Attributes:
        rule: the formula.
        learning_rate: of every step.
        update_type: what happens to rows without a gradient.
        scaler: gradients are divided by it.
    """

    rule: UpdateRule
    learning_rate: float
    update_type: UpdateType
    scaler: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What the keys of an embedding may be.

    Attributes:
        key_type: their type.
        vocabulary: the most distinct keys.
        max_nnz: the most keys of a slot of a sample.
        max_feature_num: the most keys of a sample.
    """

    key_type: KeyType
    vocabulary: int
    max_nnz: int
    max_feature_num: int


@dataclass
class Embedding:
    """An embedding layer.

    Attributes:
        table: the rows.
        slots: S.
        row_layout: a localized embedding keeps the slots of its keys.
        optimizer: moves the rows.
        limits: of the keys.
        replicas: the number of GPUs that share a batch.
        value_type: of the vectors.
        number: tells it from all embeddings of this process.
    """

    table: EmbeddingTable
    slots: int
    row_layout: RowLayout
    optimizer: Optimizer
    limits: Limits
    replicas: int
    value_type: ValueType
    number: int = field(default_factory=count().__next__, init=False)
    _gradients: dict[int, tuple[BagLookup, Floats]] = field(default_factory=dict, init=False)

    def check(self, bags: Bags) -> None:
        """Refuse keys that are not of the key type, and bags with too many keys.

        Raises:
            IndexError: a key is not a uint32.
            ValueError: a slot or a sample has too many keys.
        """
        limits = self.limits
        if limits.key_type == "I32":
            at = first_outside(bags.keys, *key_range("I32"))
            if at < len(bags.keys):
                raise IndexError(f"{self._place}: expected uint32 keys, got {bags.keys[at]}")
        sizes = bags.sizes
        if sizes.max(initial=0) > limits.max_nnz:
            sample, slot = np.argwhere(sizes > limits.max_nnz)[0]
            came = f"{sizes[sample, slot]} in slot {slot} of sample {sample}"
            raise ValueError(f"{self._place}: expected at most max_nnz = {limits.max_nnz} keys in a slot, got {came}")
        of_samples = sizes.sum(axis=1)
        if of_samples.max(initial=0) > limits.max_feature_num:
            sample = int(np.argmax(of_samples > limits.max_feature_num))
            expected = f"at most max_feature_num = {limits.max_feature_num} keys in a sample"
            raise ValueError(f"{self._place}: expected {expected}, got {of_samples[sample]} in sample {sample}")

    def require_room(self, keys: NDArray[np.int64]) -> None:
        """Raise ValueError if a lookup in training would have more distinct keys than the vocabulary."""
        rows, most = len(self.table), self.limits.vocabulary
        if rows + len(keys) <= most:
            return
        rows += len(np.unique(keys[self.table.native.find(keys) < 0]))
        if rows > most:
            expected = f"at most {most:,} distinct keys, the vocabulary of all GPUs"
            raise ValueError(f"{self._place}: expected {expected}, got {rows:,}")

    def add_gradient(self, replica: int, lookup: BagLookup, gradient: Floats) -> None:
        """Take the gradient of a replica's bags. Take one step when every replica's gradient is there.

        Skip the step, and warn, if a gradient is not finite, because such a step would destroy its rows for good.

        Raises:
            SessionError: the replica's gradient is there already, and that of another replica is missing.
        """
        if replica in self._gradients:
            missing = sorted(set(range(self.replicas)) - set(self._gradients))
            self._gradients.clear()
            raise SessionError(
                f"{self._place}: expected the gradients of replicas {', '.join(map(str, missing))} before another "
                f"gradient of replica {replica}; a step needs those of all {self.replicas} replicas"
            )
        self._gradients[replica] = lookup, gradient
        if len(self._gradients) < self.replicas:
            return
        lookups, gradients = zip(*(self._gradients[number] for number in range(self.replicas)), strict=True)
        self._gradients.clear()
        if not all(np.isfinite(sums).all() for sums in gradients):
            warnings.warn(f"{self._place}: a gradient is not finite, so this step is skipped", stacklevel=2)
            return
        how = self.optimizer
        update_tables(
            lookups,
            gradients,
            how.rule.name,
            how.update_type,
            how.learning_rate,
            self.table.step + 1,
            how.rule.parameters,
            how.scaler,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write keys and vectors in HugeCTR's directory format, and the slots of the keys of a localized embedding.

        Raises:
            ModelFileError: there are no rows yet, or the disk refuses.
        """
        if not len(self.table):
            raise ModelFileError(path, f"{self._place} has no rows yet, and an empty table cannot be read")
        parts = ((rows.keys, rows.vectors, rows.slot_ids) for rows in self.table.dump())
        keys, vectors, slot_ids = (np.concatenate(column) for column in zip(*parts, strict=True))
        slots = slot_ids if self.row_layout == "localized" else None
        write_sparse_directory(Path(path), keys, vectors, slots, self.table.config.pooling)

    def restore(self, path: str | PathLike[str]) -> None:
        """Replace all rows by those of a sparse model. Steps and states of the optimizer begin again.

        Raises:
            ModelFileError: a file is missing or damaged, or has rows that the embedding cannot have.
        """
        table, limits, config = self.table, self.limits, self.table.config
        model = open_sparse(Path(path), config.dim, limits.key_type, self.row_layout)
        if model.rows > limits.vocabulary:
            expected = f"at most {limits.vocabulary:,} rows, the vocabulary of all GPUs"
            raise ModelFileError(path, f"expected {expected}, found {model.rows:,}")
        if self.row_layout == "localized" and model.slot_ids is None:
            raise ModelFileError(path, "expected slot_id, because the embedding is localized, found none")
        layer = Layer(table.name, "", "", self.slots, config.dim, config.combiner, self.row_layout)
        parts = read_table(Path(path), None, layer, limits.key_type, table)
        for number, rows in enumerate(parts):
            if number == 0:  # every key is checked
                self._gradients.clear()
                table.clear()
            table.load(rows)

    @property
    def _place(self) -> str:
        return f"embedding {self.table.name!r}"
