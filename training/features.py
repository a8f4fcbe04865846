"""Raw features in training: the definition that serving uses, on files and on any frame.

``FeatureFile`` lays the features out over the slots of a graph, reads columns of raw values, and writes the definition
into an export.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from serving.errors import ConfigError
from serving.features import (
    FEATURES_FILE,
    FeatureDefinition,
    FeatureReader,
    arrays_of_frame,
    key_count,
    read_features,
    slots_of_graph,
    write_definition,
)
from training.data.raw_columns import RawColumns, reader_without_graph
from training.model.document import TrainingDocument
from training.model.fitting import Sizes, fitted, is_fitting
from training.model.sequences import NETWORKS, sequences_of

#: Of a list without a limit.
_MOST_VALUES = 100
_LARGEST_KEY_COUNT = 1 << 62  # of a hash without buckets
#: Keys of a vocabulary that grows. A table is a hash table, so keys that nobody uses take no memory.
_VOCABULARY_ROOM = 1 << 32
_NAMES_SLOTS = (
    "features that name slots, as those of a version do, belong to their own network: train the version further with "
    "--from, or take the file that it was trained with"
)


class FeatureFile(RawColumns):
    """The raw features of one graph.

    Attributes:
        definition: the features, each with its slot and its offset.
        document: the graph; of a built-in network, one whose inputs have the sizes of the features.
    """

    def __init__(
        self,
        path: str | Path,
        document: TrainingDocument,
        labels: Sequence[str] | None = None,
        dim: int | None = None,
        hidden: Sequence[int] = (),
        weight: str | None = None,
        definition: FeatureDefinition | None = None,
    ) -> None:
        """Read a definition, and lay it out over the slots of a graph.

        Args:
            path: a ``features.json``.
            document: the graph. A built-in network follows the features: it has a slot for each feature with keys and a
                dense number for each dense feature.
            labels: the columns of the labels; None: their names in the graph.
            dim: D of a built-in network; None: its own.
            hidden: the widths of the deep network of a built-in network; empty: its own.
            weight: the column of the weights of the samples; None: all count the same.
            definition: the features; None: those of ``path``.

        Raises:
            ConfigError: the definition is wrong or does not fit the graph.
        """
        source, definition = str(path), definition or read_features(path)
        labels = tuple(labels or document.label_columns)
        if is_fitting(document) and all(feature.slot is None for feature in definition.slots):
            document, definition = _fitted(document, definition, labels, dim, tuple(hidden), source)
        elif dim is not None or hidden:
            if is_fitting(document):
                raise ConfigError(source, "", _NAMES_SLOTS)
            reason = "the network keeps its own sizes; leave out --embedding-dim and --hidden"
            raise ConfigError(document.name, "", reason)
        for number, feature in enumerate(definition.features):
            if feature.name in labels:
                reason = f"{feature.name!r} is the label, which requests do not have"
                raise ConfigError(source, f"features[{number}].name", reason)
        self.definition = definition
        self.document = document
        if len(labels) != document.graph.label_dim:
            expected = f"expected {document.graph.label_dim} columns of labels"
            raise ConfigError(source, "", f"{expected}, got {', '.join(labels)}")
        if all(len(label.weights) == 1 for label in document.labels):  # messages then have the names of the columns
            named = tuple(replace(label, name=name) for label, name in zip(document.labels, labels, strict=True))
            document = self.document = replace(document, labels=named)
        embeddings = document.graph.embeddings
        if [entry.top for entry in document.graph.sparse] != [of.bottom for of in embeddings]:
            reason = "expected an embedding layer for each sparse input, in their order"
            raise ConfigError(document.graph.source, "layers", f"{reason}, because features give keys to the slots")
        super().__init__(_reader_of(definition, document, source), labels, weight)

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed training must not change."""
        vocabularies = {slot.name: slot.vocabulary for slot in self.definition.slots if slot.vocabulary is not None}
        return {
            "labels": list(self.labels),
            **({} if self.weight is None else {"weight": self.weight}),
            **self.definition.model_dump(mode="json", exclude_defaults=True),
            "crc32_of_vocabularies": {name: crc32(path.read_bytes()) for name, path in vocabularies.items()},
        }

    def write(self, folder: Path) -> None:
        """Write the definition and its vocabularies into a version's folder."""
        write_definition(self.definition, folder / FEATURES_FILE)


class FeatureTensors(NamedTuple):
    """B samples as tensors.

    Attributes:
        dense: float32[B, F], the dense features, in the order of the definition.
        keys: for each feature with keys, its keys int64[N], and where those of each sample begin, int64[B + 1].
    """

    dense: torch.Tensor
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]]


class RawFeatures:
    """Raw features for any PyTorch loop. Each feature has keys of its own, so that each may have a table.

    Attributes:
        definition: the features.
    """

    def __init__(self, path: str | Path) -> None:
        """Read a ``features.json``.

        Args:
            path: the file. With the file of a trained version, the keys are those of its tables.

        Raises:
            ConfigError: the definition is wrong.
        """
        self.definition = read_features(path)
        self._columns = RawColumns(reader_without_graph(self.definition, str(path)))

    def __call__(self, frame: Any) -> FeatureTensors:
        """Transform the rows of a frame.

        Args:
            frame: of pandas, Polars or pyarrow. Columns that are not features, such as labels, are ignored.

        Raises:
            FeatureValueError: a feature is missing from the frame, or a value cannot be used.
            MissingExtraError: pyarrow is not installed.
        """
        arrays = arrays_of_frame(frame, self._columns.reader.names)
        rows = len(next(iter(arrays.values())))
        samples = self._columns.samples(np.empty((rows, 0), np.float32), arrays)
        bags = samples.bags.split([1] * len(self._columns.slots)) if self._columns.slots else []
        keys = {
            name: (torch.from_numpy(one.keys), torch.from_numpy(one.row_ptrs))
            for name, one in zip(self._columns.slots, bags, strict=True)
        }
        return FeatureTensors(torch.from_numpy(samples.dense), keys)


def automatic_dim(path: str | Path) -> int:
    """Return D for the features of a ``features.json``: a power of two of at least twice the fourth root of the keys.

    The feature with the most keys decides. D is from 4 to 64.

    Raises:
        ConfigError: the definition is wrong.
    """
    definition = read_features(path)
    counts = [
        key_count(feature, str(path), f"features[{number}]") or _LARGEST_KEY_COUNT
        for number, feature in enumerate(definition.features)
        if feature.kind != "dense"
    ]
    root = 2 * max(counts, default=1) ** 0.25
    return int(min(max(2 ** math.ceil(math.log2(root)), 4), 64))


def _reader_of(definition: FeatureDefinition, document: TrainingDocument, source: str) -> FeatureReader:
    """Return the reader of features that are laid out over the slots of a graph."""
    try:
        return FeatureReader(definition, slots_of_graph(document.graph), document.graph.dense_dim, source)
    except ConfigError as err:
        if not is_fitting(document):
            raise
        raise ConfigError(err.source, err.path, f"{err.reason}; {_NAMES_SLOTS}") from err


def _fitted(
    document: TrainingDocument,
    definition: FeatureDefinition,
    labels: tuple[str, ...],
    dim: int | None,
    hidden: tuple[int, ...],
    source: str,
) -> tuple[TrainingDocument, FeatureDefinition]:
    """Return a built-in network sized to the features, and the features with their slots and offsets."""
    if weights := next((feature for feature in definition.dense if feature.weighs is not None), None):
        reason = f"no built-in network takes weights of keys, such as {weights.name!r}; use a graph of your own"
        raise ConfigError(source, f"features[{definition.features.index(weights)}].weighs", reason)
    sequences = sequences_of(definition, document.name, source) if document.name in NETWORKS else None
    pooled = [slot for slot in definition.slots if sequences is None or slot.name in sequences.others]
    most = sum(1 if feature.list is None else feature.list.most or _MOST_VALUES for feature in pooled)
    sizes = Sizes(len(pooled), len(definition.dense), most, labels, dim, hidden, sequences)
    document = fitted(document, sizes)
    if sequences is not None:
        places = sequences.places(document.name)
    else:
        slots = slots_of_graph(document.graph)
        places = {one.name: (slot.place, slot.table) for one, slot in zip(pooled, slots, strict=True)}
    return document, laid_out(definition, places, source)


def laid_out(definition: FeatureDefinition, places: Mapping[str, tuple[str, str]], source: str) -> FeatureDefinition:
    """Give each feature with keys its slot, and keys of its own in its table.

    A vocabulary has room for more values, so it grows without moving the keys of the features after it.

    Args:
        definition: the features.
        places: for each feature with keys the name of its slot or slots, and the table.
        source: the file, for messages.

    Raises:
        ConfigError: a feature's keys have no end.
    """
    offsets, end_of = dict[str, int](), dict[str, int]()
    tables = Counter(places[slot.name][1] for slot in definition.slots if slot.shares is None)
    for number, feature in enumerate(definition.features):
        if feature.kind == "dense" or feature.shares is not None:
            continue
        table = places[feature.name][1]
        size = key_count(feature, source, f"features[{number}]")
        if size is None and tables[table] > 1:
            key = "size" if feature.kind == "identity" else "buckets"
            reason = "required, because the features share one table"
            raise ConfigError(source, f"features[{number}].{key}", reason)
        offsets[feature.name] = end_of.get(table, 0)
        room = _VOCABULARY_ROOM if feature.kind == "vocabulary" else size or 0
        end_of[table] = offsets[feature.name] + room
    changed = {
        feature.name: {"slot": places[feature.name][0], "offset": offsets[feature.shares or feature.name]}
        for feature in definition.slots
    }
    features = [feature.model_copy(update=changed.get(feature.name, {})) for feature in definition.features]
    return definition.model_copy(update={"features": tuple(features)})
