"""``hotrow train --from``: train a version further, on new data."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from serving.errors import ConfigError
from serving.features import FEATURES_FILE
from serving.model.dense_file import read_dense
from serving.model.manifest import verify_manifest
from serving.model.regular_file import is_absent
from serving.model.version_writer import DENSE_FILE, TRAINING_FILE
from training.command.record import TrainingRecord
from training.features import FeatureFile
from training.growth import grown
from training.model.ctr_model import CtrModel
from training.model.document import TrainingDocument, parse_document
from training.model.parameter_files import read_table


class WarmStart:
    """A trained version from which training continues.

    Attributes:
        document: its training graph, with the name of its model.
        network: the ``--model`` of its training.
        new_values: how many values the vocabulary of each feature got.
    """

    def __init__(self, folder: Path) -> None:
        """Read the newest version of a model, or a version.

        Raises:
            ConfigError: it was not made by ``hotrow train``.
            ModelFileError: a file is missing or damaged.
        """
        record = TrainingRecord(folder)
        verify_manifest(record.folder)
        self._folder = record.folder
        self._labels: Sequence[str] | None = record.arguments.get("label")
        self.network = str(record.arguments.get("model", "dcn"))
        source = str(self._folder / TRAINING_FILE)
        self.document: TrainingDocument = replace(
            parse_document(record.graph, source), name=self._folder.resolve().parent.name
        )
        self.new_values = dict[str, int]()

    @property
    def has_features(self) -> bool:
        """Whether the version takes raw features."""
        return not is_absent(self._folder / FEATURES_FILE)

    def features(self, data: Path, labels: Sequence[str] | None, weight: str | None, *, holds_out: bool) -> FeatureFile:
        """Return the features of the version. Vocabularies get the values of the new training rows.

        Args:
            data: the new data.
            labels: the columns of the labels; None: those of the version's training.
            weight: the column of the weights; None: all rows count the same.
            holds_out: the last tenth of the rows is for the evaluation.

        Raises:
            ConfigError: the version takes no raw features, or a vocabulary grows into the keys of another feature.
            DataError: the data cannot be read.
        """
        if not self.has_features:
            raise ConfigError(str(self._folder), "", "the version takes keys, not raw features; leave out --label")
        path = self._folder / FEATURES_FILE
        definition, self.new_values = grown(path, data, holds_out=holds_out)
        return FeatureFile(path, self.document, labels or self._labels, weight=weight, definition=definition)

    def load(self, model: CtrModel) -> None:
        """Read the network and the rows into a model. The optimizer begins with new states.

        Raises:
            ModelFileError: a file is missing or damaged.
        """
        graph = model.graph
        model.load_dense_weights(read_dense(self._folder / DENSE_FILE, graph))
        for number, (embedding, table) in enumerate(zip(graph.embeddings, model.tables, strict=True)):
            for rows in read_table(self._folder / embedding.table, None, embedding, "I64", table):
                model.load(number, rows)
