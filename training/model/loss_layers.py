"""The loss layers of a training document: which losses there are, and what they know of the labels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from serving.errors import ConfigError
from training.data.source import SampleSource
from training.errors import DataError
from training.model.document import Label, TrainingDocument, parse_document
from training.model.losses import LOSS_OF_LAYER, LOSS_OF_OPTION, LOSSES, Floats

_MOST_LOOKED_AT = 1_000_000
_MEMBERS = {member for loss in LOSSES for member in loss.members}

Layer = dict[str, Any]


def with_losses(document: TrainingDocument, options: Sequence[str]) -> TrainingDocument:
    """Return a document whose labels are learned with other losses.

    Args:
        document: the document.
        options: losses by the names of ``--loss``: one for all labels, or one for each.

    Raises:
        ConfigError: the document has another number of labels.
    """
    labels = [label.name for label in document.labels]
    if len(options) not in (1, len(labels)):
        reason = f"expected one loss for all labels, or one for each of {', '.join(labels)}; got {len(options)}"
        raise ConfigError("--loss", "", reason)
    types = iter([LOSS_OF_OPTION[option].layer_type for option in options] * (len(labels) // len(options)))

    def changed(layer: Layer, label: Label) -> Layer:
        own = next(types)
        kept = layer if own == layer["type"] else {key: layer[key] for key in layer.keys() - _MEMBERS}
        return {**kept, "type": own}

    return _with_changed_losses(document, changed)


def first_labels(samples: SampleSource) -> tuple[Floats, Floats | None]:
    """Return the labels of the first million samples, float32[B, L], and their weights; None: all count the same."""
    labels, weights, rows = [], [], 0
    for part in samples.parts():
        part = part[: _MOST_LOOKED_AT - rows]
        rows += len(part)
        labels.append(part.labels)
        weights += [] if part.weights is None else [part.weights]
        if rows == _MOST_LOOKED_AT:
            break
    together = np.concatenate(weights) if weights else None
    return np.concatenate(labels), together if together is not None and together.any() else None


def with_label_statistics(document: TrainingDocument, labels: Floats, weights: Floats | None) -> TrainingDocument:
    """Return a document whose regressions know the mean and the standard deviation of their labels.

    A loss layer that has them keeps them.

    Args:
        document: the document.
        labels: of the training, see ``first_labels``.
        weights: how much each sample counts; None: all count the same.

    Raises:
        DataError: nothing can be learned from a label.
    """
    layers = [layer for layer in document.document["layers"] if layer["type"] in LOSS_OF_LAYER]
    if all(layer.keys() >= set(LOSS_OF_LAYER[layer["type"]].members) for layer in layers):
        return document
    for name, loss, of_label in zip(document.label_columns, document.losses, labels.T, strict=True):
        if reason := loss.unlearnable(of_label):
            raise DataError("training samples", reason, column=name)
    columns = iter(labels.T)

    def changed(layer: Layer, label: Label) -> Layer:
        of_label = [next(columns) for _ in label.weights]
        return {**LOSS_OF_LAYER[layer["type"]].statistics(of_label, weights), **layer}

    return _with_changed_losses(document, changed)


def _with_changed_losses(document: TrainingDocument, change: Callable[[Layer, Label], Layer]) -> TrainingDocument:
    """Return a document with other loss layers, which are in the order of the labels."""
    labels = iter(document.labels)
    layers = [
        change(layer, next(labels)) if layer["type"] in LOSS_OF_LAYER else layer
        for layer in document.document["layers"]
    ]
    changed = parse_document({**document.document, "layers": layers}, document.graph.source)
    return replace(changed, name=document.name, labels=document.labels)
