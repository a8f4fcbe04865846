"""Warnings of ``hotrow train`` about data and results that are likely mistakes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.data.checks import ColumnMap
from training.data.raw_columns import RawColumns
from training.data.source import SampleSource
from training.model.document import TrainingDocument
from training.model.losses import Floats, figure_text
from training.model.metrics import variance
from training.model.trainer import EpochResult
from training.samples import Samples

_LOOKED_AT = 16_384  # rows
_MOST_UNKNOWN = 0.5  # of the values of a vocabulary
_LARGE_SHIFT = 0.5  # of a mean, in standard deviations: rarely seen from one day to the next
_STANDARD_ERRORS = 4.0  # of the mean of few rows: more is no chance
_LARGE = 100.0  # a dense network learns little from numbers of this size, and may diverge
#: Layers that read the slots of a table as the positions of a sequence, which share their keys on purpose.
_OF_SEQUENCES = ("FusedReshapeConcat", "FusedReshapeConcatGeneral")


def of_samples(document: TrainingDocument, names: ColumnMap, samples: SampleSource, *, is_raw: bool) -> Iterator[str]:
    """Warn of large dense numbers, and of equal keys of slots that share a table."""
    some = next(samples.parts())[:_LOOKED_AT]
    for name, column in zip(names.dense, some.dense.T, strict=True):
        if len(some) > 1 and (column == column[0]).all():
            yield f"note: the dense column {name} has the same number in {len(some):,} rows: nothing is learned from it"
    sizes = np.sqrt(np.square(some.dense.astype(np.float64)).mean(axis=0))
    for name, size in zip(names.dense, sizes.tolist(), strict=True):
        if size > _LARGE:
            how = (
                "give the feature mean and std, or log1p"
                if is_raw
                else "subtract its mean and divide by its standard deviation, also in requests; --label does it for you"
            )
            yield f"note: the dense column {name} has values of about {size:,.0f}, and networks need about 1: {how}"
    if not is_raw:  # a definition says which features share keys, and is refused otherwise
        yield from _equal_keys(document, names.slots, some)


class LearnedLabels:
    """What is known of the labels that are learned.

    Attributes:
        rows: how many rows were looked at.
        means, stds: of each label.
    """

    def __init__(self, labels: Floats, weights: Floats | None) -> None:
        """Take the labels [B, L] and the weights [B] of the first training rows."""
        self.rows = len(labels)
        self.means = [float(np.average(column.astype(np.float64), weights=weights)) for column in labels.T]
        self.stds = [math.sqrt(variance(column, weights)) for column in labels.T]


def of_labels(document: TrainingDocument, learned: LearnedLabels, rows: int) -> Iterator[str]:
    """Warn of a label that is the same in all training rows."""
    of_rows = f"all {rows:,}" if learned.rows == rows else f"the first {learned.rows:,}"
    for name, mean, std in zip(document.label_columns, learned.means, learned.stds, strict=True):
        if not std:
            yield (
                f"note: in {of_rows} training rows {name} is {mean:g}, so the model learns a constant. If the data is "
                f"sorted by {name}, shuffle its rows"
            )


def of_values(path: Path, columns: RawColumns) -> Iterator[str]:
    """Warn of vocabularies that have few of the values of the data that was read last."""
    for name, share in columns.unknown_shares().items():
        if share > _MOST_UNKNOWN:
            yield f"note: {path}: {share:.1%} of the values of {name} are not in its vocabulary"


def of_epoch(document: TrainingDocument, result: EpochResult, rows: int, learned: LearnedLabels) -> Iterator[str]:
    """Warn of labels whose figures are mostly chance, and of evaluation labels that differ from those of the training.

    Data that is sorted by its label has other labels in its last tenth.
    """
    columns = zip(document.label_columns, document.losses, result.figures, learned.means, learned.stds, strict=True)
    for name, loss, figures, mean, std in columns:
        if note := loss.few(name, figures, rows):
            yield note
        evaluated = np.mean([label for _, label in figures["calibration"]])  # groups of about the same size
        if abs(evaluated - mean) > std * max(_LARGE_SHIFT, _STANDARD_ERRORS / math.sqrt(rows)) > 0:
            yield (
                f"note: the mean of {name} is {figure_text(mean)} in the training rows and {figure_text(evaluated)} in "
                f"the evaluation rows. If the data is sorted by {name}, shuffle its rows"
            )


def of_result(document: TrainingDocument, epoch: Mapping[str, Any]) -> Iterator[str]:
    """Warn of a model that is no better than a constant.

    Args:
        document: the graph, with its labels.
        epoch: the figures of the epoch whose model is written, as ``--metrics`` has them.

    Raises:
        TrainingError: the model is so wrong that it is not written.
    """
    for name, loss in zip(document.label_columns, document.losses, strict=True):
        yield from loss.verdict(name, {figure: of[name] for figure, of in epoch.items() if name in _labels(of)})


def _labels(figure: Any) -> Mapping[str, Any]:
    return figure if isinstance(figure, dict) else {}


def _equal_keys(document: TrainingDocument, names: Sequence[str], some: Samples) -> Iterator[str]:
    graph = document.graph
    sequences = {bottom for layer in graph.layers if layer.type in _OF_SEQUENCES for bottom in layer.bottoms}
    parts = some.bags.split([entry.slots for entry in graph.sparse])
    first = 0
    for entry, bags in zip(graph.sparse, parts, strict=True):
        slots = names[first : first + entry.slots]
        first += entry.slots
        if entry.sequences is not None or any(
            embedding.bottom == entry.top and embedding.top in sequences for embedding in graph.embeddings
        ):
            continue
        keys = [np.unique(slot.keys) for slot in bags.split([1] * entry.slots)]
        together, slot_of = np.concatenate(keys), np.repeat(np.arange(entry.slots), [len(key) for key in keys])
        order = np.argsort(together, kind="stable")
        is_equal = together[order[1:]] == together[order[:-1]]
        if is_equal.any():
            at = int(np.argmax(is_equal))
            one, other = (int(slot_of[place]) for place in order[at : at + 2])
            equal = np.intersect1d(keys[one], keys[other], assume_unique=True)
            yield (
                f"note: {slots[one]} and {slots[other]} have {equal.size:,} equal keys in one table, such as {equal[0]}"
                ", so they share rows. Unless they mean the same, give each slot its own keys: docs/training.md#columns"
            )
            return
