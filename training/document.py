"""A training document: HugeCTR's graph JSON with its ``optimizer`` clause."""

from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path
from typing import Any

from serving.errors import ConfigError
from serving.model.graph import Graph, parse_graph
from serving.model.json_fields import Fields
from serving.model.strict_json import read_json
from training.built_in import built_in_graphs
from training.optimizer import Adam, LearningRateSchedule

_SCHEDULE_KEYS = ("learning_rate", "warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")
_ADAM_KEYS = ("beta1", "beta2", "epsilon")
_UPDATE_TYPES = {name: name for name in ("Local", "Global", "LazyGlobal")}
_DEFAULT_LEARNING_RATE = 0.001


@dataclass(frozen=True, slots=True)
class TrainingDocument:
    """What a training graph file says.

    Attributes:
        name: the file's name without its suffix: a model's default name.
        document: the JSON as it was read, for export.
        graph: its layers.
        adam: the optimizer.
        schedule: the learning rates.
        update_type: how rows that a step does not touch move, as the document asks; training always does "Local".
    """

    name: str
    document: dict[str, Any]
    graph: Graph
    adam: Adam
    schedule: LearningRateSchedule
    update_type: str


def open_document(model: str) -> TrainingDocument:
    """Read a built-in graph by its name, or a graph file by its path.

    Raises:
        ConfigError: neither exists, or the document is not one that can be trained; the message names the JSON path.
    """
    graphs = built_in_graphs()
    if model in graphs:
        with as_file(graphs[model]) as path:
            return read_document(path)
    if not Path(model).exists():
        raise ConfigError(model, "", f"no such graph file, and no built-in model ({', '.join(graphs)})")
    return read_document(Path(model))


def read_document(path: Path) -> TrainingDocument:
    """Read a training graph file.

    The clauses ``solver`` and ``inference`` are not looked at, as HugeCTR's Python interface does not either.

    Raises:
        ConfigError: the document is not one that can be trained; the message names the JSON path.
    """
    document = read_json(path)
    graph = parse_graph(document, str(path))
    root = Fields(document, str(path), "")
    _refuse_what_training_lacks(root)
    optimizer = root.object("optimizer", ("type", "update_type", "adam_hparam")) if "optimizer" in root else None
    adam, schedule = _read_adam(optimizer)
    update_type = optimizer.choice("update_type", _UPDATE_TYPES, "Local") if optimizer else "Local"
    return TrainingDocument(path.stem, document, graph, adam, schedule, update_type)


def _read_adam(optimizer: Fields | None) -> tuple[Adam, LearningRateSchedule]:
    if optimizer is None:
        return Adam(), LearningRateSchedule(_DEFAULT_LEARNING_RATE)
    optimizer.choice("type", {"Adam": "Adam"})
    hparam = optimizer.object("adam_hparam", (*_SCHEDULE_KEYS, *_ADAM_KEYS))
    try:
        adam = Adam(**{key: hparam.number(key) for key in _ADAM_KEYS if key in hparam})
        schedule = LearningRateSchedule(
            base=hparam.number("learning_rate", _DEFAULT_LEARNING_RATE),
            warmup_steps=hparam.integer("warmup_steps", 1),
            decay_start=hparam.integer("decay_start", 0, minimum=0),
            decay_steps=hparam.integer("decay_steps", 1),
            decay_power=hparam.number("decay_power", 2.0),
            end=hparam.number("end_lr", 0.0),
        )
    except ValueError as err:
        raise hparam.error(str(err)) from err
    return adam, schedule


def _refuse_what_training_lacks(root: Fields) -> None:
    """Refuse what would change the trained weights and is not done here, rather than leave it out silently."""
    layers = list(root.objects("layers"))
    for layer in layers:
        for key in ("optimizer", "regularizer"):
            if key in layer:
                raise layer.error("training has none of its own for a single layer", key)
    if layers[-1].text("type") != "BinaryCrossEntropyLoss":
        raise layers[-1].error("a training graph ends in BinaryCrossEntropyLoss", "type")
    losses = [layer for layer in layers if layer.text("type").endswith("Loss")]
    labels = layers[0].object("label").texts("top")
    for loss, label in zip(losses, labels, strict=True):  # the graph's reader has seen that each label has its loss
        if loss.text("type") != "BinaryCrossEntropyLoss":
            raise loss.error("training has BinaryCrossEntropyLoss only", "type")
        if loss.texts("bottom")[1] != label:
            raise loss.error(f"expected the losses in the order of the labels, so {label!r} here", "bottom")
