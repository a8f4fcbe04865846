"""Vocabularies of a trained version that grow with new data. Known values keep their keys, new values follow."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.features import (
    Column,
    FeatureConfig,
    FeatureDefinition,
    FeatureReader,
    columns_of_arrays,
    read_definition,
    vocabulary_values,
)
from training.data.columns import read_columns
from training.data.raw_columns import RawColumns, reader_without_graph
from training.samples import Bags, Samples

_BATCH_ROWS = 65_536
_HELD_OUT = 10


class Growth(NamedTuple):
    """A definition whose vocabularies have new values, and how many each feature got."""

    definition: FeatureDefinition
    new_values: dict[str, int]


def grown(path: Path, data: Path, *, holds_out: bool) -> Growth:
    """Add the values of the training rows that the vocabularies of a definition do not have, the frequent ones first.

    Args:
        path: the ``features.json`` of a version.
        data: Parquet or CSV files, or a folder of them.
        holds_out: the last tenth of the rows is kept for evaluation and is not read.

    Raises:
        ConfigError: the definition is wrong.
        DataError: the data cannot be read, or a value cannot be used.
    """
    definition = read_definition(path)
    growing = {slot.name: slot.shares or slot.name for slot in definition.slots if slot.kind == "vocabulary"}
    if not growing:
        return Growth(definition, {})
    reader = reader_without_graph(definition, str(path))
    rows = sum(map(len, read_columns(data, _Counting(reader, {}, 0), batch_size=_BATCH_ROWS))) if holds_out else 2**62
    counting = _Counting(reader, growing, max(0, rows - max(1, rows // _HELD_OUT)) if holds_out else rows)
    for _ in read_columns(data, counting, batch_size=_BATCH_ROWS):
        pass
    values, new_values = dict[str, tuple[str | int, ...]](), dict[str, int]()
    by_name = {slot.name: slot for slot in definition.slots}
    for owner in dict.fromkeys(growing.values()):
        known = vocabulary_values(by_name[owner])
        new = counting.counts[owner].keys() - set(known)
        ordered = sorted(new, key=lambda value: (-counting.counts[owner][value], value))
        values[owner], new_values[owner] = (*known, *ordered), len(ordered)
    features = [
        feature.model_copy(update={"vocabulary": None, "values": values[growing[feature.name]]})
        if feature.name in growing
        else feature
        for feature in definition.features
    ]
    return Growth(definition.model_copy(update={"features": tuple(features)}), new_values)


class _Counting(RawColumns):
    """Counts the values of features in the first rows.

    Attributes:
        counts: how often each value occurs, by the feature that owns the vocabulary.
    """

    def __init__(self, reader: FeatureReader, growing: Mapping[str, str], rows: int) -> None:
        super().__init__(reader)
        self.counts: dict[str, Counter[str]] = {owner: Counter() for owner in growing.values()}
        self._growing = growing
        self._rows = rows

    def samples(self, labels: NDArray[np.float32], arrays: Mapping[str, Any]) -> Samples:
        """See ``RawColumns``. The samples have no keys."""
        rows = len(labels)
        counted = min(self._rows, rows)
        self._rows -= counted
        if counted and self._growing:
            some = {name: array.slice(0, counted) for name, array in arrays.items()}
            columns = columns_of_arrays(self.reader, some, counted)
            for feature, column in zip(self.reader.definition.columns, columns, strict=True):
                if feature.name in self._growing:
                    self.counts[self._growing[feature.name]].update(_values_of(feature, column))
        bags = Bags(np.empty(0, np.int64), np.zeros(rows * len(self.slots) + 1, np.int64), len(self.slots))
        return Samples(labels, np.zeros((rows, len(self.dense)), np.float32), bags)


def _values_of(feature: FeatureConfig, column: Column) -> Iterator[str]:
    """Yield the values of a column that are not missing, as the lines of a vocabulary have them."""
    if column[0] == "integer":
        _, numbers, valid, _ = column
        yield from map(str, (numbers if valid is None else numbers[valid]).tolist())
        return
    _, content, begins, ends, valid, _ = column
    there = ends > begins if valid is None else valid & (ends > begins)
    raw = content.tobytes()
    for begin, end in zip(begins[there].tolist(), ends[there].tolist(), strict=True):
        yield raw[begin:end].decode("utf-8", "replace")
