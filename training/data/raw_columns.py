"""Columns of raw features in files, and what a definition makes of them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.features import FeatureDefinition, FeatureReader, SlotOfTable, columns_of_arrays
from training.data.checks import ColumnMap
from training.samples import Bags, Samples


def reader_without_graph(definition: FeatureDefinition, source: str) -> FeatureReader:
    """Return a reader that gives each feature with keys a slot and a table of its own. Offsets stay.

    Raises:
        ConfigError: a vocabulary cannot be read.
    """
    features = tuple(feature.model_copy(update={"slot": None}) for feature in definition.features)
    slots = [SlotOfTable(feature.name, feature.name) for feature in definition.slots]
    return FeatureReader(
        definition.model_copy(update={"features": features}), slots, len(definition.dense_names), source
    )


class RawColumns:
    """The columns of labels and raw features in Parquet and CSV files.

    Attributes:
        reader: transforms the features.
        labels: the columns of the labels; may be empty.
        weight: the column of the weights of the samples; None: all count the same.
        features: the columns of the features.
        has_without: whether the user can name features that have no columns.
    """

    def __init__(
        self,
        reader: FeatureReader,
        labels: Sequence[str] = (),
        weight: str | None = None,
        without: Collection[str] | None = None,
    ) -> None:
        """Take what transforms the features of a graph, and the columns of its labels and weights.

        Features in ``without`` have no columns. They are missing in each sample. None: there can be no such features.
        """
        self.reader = reader
        self.features = [name for name in reader.names if name not in (without or ())]
        self.has_without = without is not None
        self.labels = tuple(labels)
        self.weight = weight

    @property
    def names(self) -> list[str]:
        """The columns of the weights, the labels and the features."""
        return [*([] if self.weight is None else [self.weight]), *self.labels, *self.features]

    @property
    def dense(self) -> tuple[str, ...]:
        """The dense numbers."""
        return self.reader.definition.dense_names

    @property
    def slots(self) -> tuple[str, ...]:
        """The features of the slots, in the order of the graph."""
        return self.reader.of_slots

    @property
    def columns(self) -> ColumnMap:
        """The columns of the labels, the dense features, the slots and the weights."""
        return ColumnMap(self.labels, self.dense, self.slots, self.weight)

    def unknown_shares(self) -> dict[str, float]:
        """Return which share of the values since the last call each vocabulary does not have."""
        counts: dict[str, Counter[str]] = {}
        for sample in self.reader.readings(()):
            of = dict(sample.labels)
            if "state" in of and isinstance(sample.value, int):
                counts.setdefault(of["feature"], Counter())[of["state"]] += sample.value
        self.reader.forget_counts()
        return {name: count["unknown"] / max(count.total(), 1) for name, count in counts.items()}

    def samples(self, labels: NDArray[np.float32], arrays: Mapping[str, Any]) -> Samples:
        """Return the samples of Arrow arrays by feature, and of labels float32[B, L].

        Raises:
            FeatureValueError: a value cannot be used.
        """
        found = self.reader.transform(columns_of_arrays(self.reader, arrays, len(labels)), len(labels))
        self.reader.count(found)
        bags = Bags(found.keys, found.row_ptrs.astype(np.int64), len(self.slots))
        return Samples(labels, found.dense, bags)
