"""Raw features in training: the definition that serving uses, on files and on any frame.

``FeatureFile`` lays the features out over the slots of a graph, reads columns of raw values, and writes the definition
into an export.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError
from serving.features import (
    FEATURES_FILE,
    FeatureDefinition,
    FeatureReader,
    columns_of_arrays,
    key_count,
    read_features,
    slots_of_graph,
    write_definition,
)
from training.data.checks import ColumnMap
from training.model.document import TrainingDocument
from training.model.fitting import fitted, is_fitting
from training.samples import Bags, Samples

#: Of a list without a limit.
_MOST_VALUES = 100


class FeatureFile:
    """The raw features of one graph.

    Attributes:
        definition: the features, each with its slot and its offset.
        document: the graph; of a built-in network, one whose inputs have the sizes of the features.
        reader: transforms columns.
        labels: the columns of the labels.
    """

    def __init__(
        self, path: str | Path, document: TrainingDocument, labels: Sequence[str] | None = None, dim: int | None = None
    ) -> None:
        """Read a definition, and lay it out over the slots of a graph.

        Args:
            path: a ``features.json``.
            document: the graph. A built-in network follows the features: it has a slot for each feature with keys, all
                in one table, and a dense number for each dense feature.
            labels: the columns of the labels; None: their names in the graph.
            dim: D of a built-in network; None: its own.

        Raises:
            ConfigError: the definition is wrong or does not fit the graph.
        """
        source, definition = str(path), read_features(path)
        if is_fitting(document) and all(feature.slot is None for feature in definition.slots):
            sizes = [1 if feature.list is None else feature.list.most or _MOST_VALUES for feature in definition.slots]
            sizing = {} if dim is None else {"dim": dim}
            document = fitted(document, len(sizes), len(definition.dense), sum(sizes), **sizing)
            definition = laid_out(definition, document.graph.embeddings[0].table, source)
        elif dim is not None:
            raise ConfigError(document.name, "", "the embeddings of this network have their own size; leave it out")
        self.definition = definition
        self.document = document
        self.labels = tuple(labels or document.label_columns)
        if len(self.labels) != document.graph.label_dim:
            expected = f"expected {document.graph.label_dim} columns of labels"
            raise ConfigError(source, "", f"{expected}, got {', '.join(self.labels)}")
        embeddings = document.graph.embeddings
        if [entry.top for entry in document.graph.sparse] != [of.bottom for of in embeddings]:
            reason = "expected an embedding layer for each sparse input, in their order"
            raise ConfigError(document.graph.source, "layers", f"{reason}, because features give keys to the slots")
        self.reader = FeatureReader(definition, slots_of_graph(document.graph), document.graph.dense_dim, source)

    @property
    def columns(self) -> ColumnMap:
        """The columns of the labels, the dense features and the slots."""
        return ColumnMap(self.labels, self.dense, self.slots)

    @property
    def names(self) -> list[str]:
        """The columns of the labels and the features."""
        return [*self.labels, *self.reader.names]

    @property
    def dense(self) -> tuple[str, ...]:
        """The features that are dense numbers."""
        return tuple(feature.name for feature in self.definition.dense)

    @property
    def slots(self) -> tuple[str, ...]:
        """The features of the slots, in the order of the graph."""
        return self.reader.of_slots

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed training must not change."""
        vocabularies = {one.name: one.vocabulary for one in self.definition.slots if one.vocabulary is not None}
        return {
            "labels": list(self.labels),
            **self.definition.model_dump(mode="json", exclude_defaults=True),
            "crc32_of_vocabularies": {name: crc32(path.read_bytes()) for name, path in vocabularies.items()},
        }

    def samples(self, labels: NDArray[np.float32], arrays: Mapping[str, Any]) -> Samples:
        """Return the samples of Arrow arrays by feature, and of labels float32[B, L].

        Raises:
            FeatureValueError: a value cannot be used.
        """
        columns = columns_of_arrays(self.reader, arrays, len(labels))
        found = self.reader.transform(columns, len(labels))
        bags = Bags(found.keys, found.row_ptrs.astype(np.int64), len(self.slots))
        return Samples(labels, found.dense, bags)

    def write(self, folder: Path) -> None:
        """Write the definition and its vocabularies into a version's folder."""
        write_definition(self.definition, folder / FEATURES_FILE)


def laid_out(definition: FeatureDefinition, table: str, source: str) -> FeatureDefinition:
    """Give each feature with keys a slot of one table, and keys of its own there, in the order of the definition.

    Raises:
        ConfigError: a feature's keys have no end.
    """
    names, offsets, end = [feature.name for feature in definition.slots], dict[str, int](), 0
    for number, feature in enumerate(definition.features):
        if feature.kind == "dense" or feature.shares is not None:
            continue
        size = key_count(feature, source, f"features[{number}]")
        if size is None and len(names) > 1:
            key = "size" if feature.kind == "identity" else "buckets"
            reason = "required, because the features share one table"
            raise ConfigError(source, f"features[{number}].{key}", reason)
        offsets[feature.name] = end
        end += size or 0
    slots = [table] if len(names) == 1 else [f"{table}[{place}]" for place in range(len(names))]
    places = {
        feature.name: {"slot": slots[names.index(feature.name)], "offset": offsets[feature.shares or feature.name]}
        for feature in definition.slots
    }
    features = [feature.model_copy(update=places.get(feature.name, {})) for feature in definition.features]
    return definition.model_copy(update={"features": tuple(features)})
