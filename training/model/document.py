"""A training document: HugeCTR's graph JSON with its ``optimizer`` clause."""

from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path
from typing import Any, Literal, TypeAlias

from serving.errors import ConfigError, nearest
from serving.model.graph import Graph, parse_graph
from serving.model.slot_sizes import read_slot_sizes
from serving.model.strict_json import Fields, read_json
from training.built_in import built_in_graphs
from training.model.losses import LOSS_OF_LAYER, Loss, losses_of
from training.optimizers.learning_rate import LearningRateSchedule
from training.optimizers.regularizer import Regularizer
from training.tables.rules import (
    AdamRule,
    MomentumSgdRule,
    NesterovRule,
    RowWiseAdaGradRule,
    SgdRule,
    UpdateRule,
    UpdateType,
)

_SCHEDULE_KEYS = ("learning_rate", "warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")
#: Each type of optimizer: its rule, and the clause and the keys that have the rule's parameters.
_OPTIMIZERS: dict[str, tuple[type[UpdateRule], str, tuple[str, ...]]] = {
    "Adam": (AdamRule, "adam_hparam", ("beta1", "beta2", "epsilon")),
    "MomentumSGD": (MomentumSgdRule, "momentum_sgd_hparam", ("momentum_factor",)),
    "Nesterov": (NesterovRule, "nesterov_hparam", ("momentum_factor",)),
    "SGD": (SgdRule, "sgd_hparam", ()),
    "RowWiseAdaGrad": (RowWiseAdaGradRule, "row_wise_ada_grad_hparam", ("initial_accumulator", "epsilon")),
}
#: Keys of these clauses that have no effect here, because one step moves a row once.
_WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {"sgd_hparam": ("atomic_update",)}
_UPDATE_TYPES: dict[str, UpdateType] = {"Local": "Local", "Global": "Global", "LazyGlobal": "LazyGlobal"}
_DEFAULT_LEARNING_RATE = 0.001
DataFormat: TypeAlias = Literal["Norm", "Raw", "Parquet"]
_REGULARIZERS: dict[str, Literal["L1", "L2"]] = {"L1": "L1", "L2": "L2"}
_FORMATS: dict[str, DataFormat] = {"Norm": "Norm", "Raw": "Raw", "Parquet": "Parquet"}


@dataclass(frozen=True, slots=True)
class Label:
    """One label of the Data layer.

    Attributes:
        name: its top.
        weights: the weight of each column's loss in the sum (``target_weight``).
    """

    name: str
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TableOptimizer:
    """How the rows of one table move.

    Attributes:
        rule: the formula.
        update_type: how rows move in a step that does not read them.
    """

    rule: UpdateRule
    update_type: UpdateType


@dataclass(frozen=True, slots=True)
class DataFiles:
    """What the Data layer says of its files.

    Attributes:
        format: "Norm" unless the layer says another.
        source: the path of the training data; None: the layer has none.
        eval_source: the path of the evaluation data; None: the layer has none.
        slot_sizes: S numbers if the keys of each slot begin at 0 in the data, as in Raw and Parquet files; else None.
        has_floats: of Raw files; see ``training.data.read_raw``.
    """

    format: DataFormat
    source: str | None
    eval_source: str | None
    slot_sizes: tuple[int, ...] | None
    has_floats: bool


@dataclass(frozen=True, slots=True)
class TrainingDocument:
    """The content of a training graph file.

    Attributes:
        name: the file's name without its suffix, which is a model's default name.
        document: the unchanged JSON, for the export.
        graph: its layers.
        labels: the labels, in graph order.
        optimizer: the type of the optimizer, as the JSON spells it.
        rule: the formula of the optimizer. The dense weights use ``rule.of_dense_weights``.
        schedule: the learning rates.
        tables: the optimizer of each table: the document's, or the one in its embedding layer.
        regularizers: those of the losses.
        data: its files, which only HugeCTR's formats need.
    """

    name: str
    document: dict[str, Any]
    graph: Graph
    labels: tuple[Label, ...]
    optimizer: str
    rule: UpdateRule
    schedule: LearningRateSchedule
    tables: tuple[TableOptimizer, ...]
    regularizers: tuple[Regularizer, ...]
    data: DataFiles

    @property
    def label_weights(self) -> tuple[float, ...]:
        """L numbers, the weight of each label column in the loss."""
        return tuple(weight for label in self.labels for weight in label.weights)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """L losses, of each label column."""
        return losses_of(self.graph)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """L names for people: the label's name, with the column's number if it has several."""
        return tuple(
            label.name if len(label.weights) == 1 else f"{label.name}[{column}]"
            for label in self.labels
            for column in range(len(label.weights))
        )


def open_document(model: str) -> TrainingDocument:
    """Read a built-in graph by its name, or a graph file by its path.

    Raises:
        ConfigError: neither exists, or the document cannot be trained. The message names the JSON path.
    """
    graphs = built_in_graphs()
    if model in graphs:
        with as_file(graphs[model]) as path:
            return read_document(path)
    if not model or not Path(model).exists():  # Path("") is the folder here
        close = nearest(model, graphs)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(model, "", f"no such graph file, and no built-in model ({', '.join(graphs)}){hint}")
    return read_document(Path(model))


def read_document(path: Path) -> TrainingDocument:
    """Read a training graph file. Raise ConfigError if it cannot be trained.

    The clauses ``solver`` and ``inference`` are ignored, as in HugeCTR's Python interface.
    """
    return parse_document(read_json(path), str(path))


def parse_document(document: Any, source: str) -> TrainingDocument:
    """Return the content of a training graph; see ``read_document``. ``source`` is the file, for messages."""
    graph = parse_graph(document, source)
    root = Fields(document, source, "")
    labels, regularizers = _read_losses(root)
    data = _read_data(next(root.objects("layers")), sum(entry.slots for entry in graph.sparse))
    optimizer, schedule = _read_optimizer(root)
    name = root.object("optimizer").text("type") if "optimizer" in root else "Adam"
    tables = _read_table_optimizers(root, graph, optimizer, schedule)
    return TrainingDocument(
        Path(source).stem, document, graph, labels, name, optimizer.rule, schedule, tables, regularizers, data
    )


def _read_data(data: Fields, slots: int) -> DataFiles:
    form = data.choice("format", _FORMATS, "Norm")
    source, eval_source = (data.text(key) if key in data else None for key in ("source", "eval_source"))
    if form == "Norm":
        return DataFiles(form, source, eval_source, None, False)
    return DataFiles(form, source, eval_source, read_slot_sizes(data, slots), data.boolean("float_label_dense", False))


def _read_optimizer(fields: Fields) -> tuple[TableOptimizer, LearningRateSchedule]:
    """Read the clause ``optimizer`` of the document or of a layer."""
    if "optimizer" not in fields:
        return TableOptimizer(AdamRule(), "Local"), LearningRateSchedule(_DEFAULT_LEARNING_RATE)
    rule_type, clause, keys = fields.object("optimizer").choice("type", _OPTIMIZERS)
    optimizer = fields.object("optimizer", ("type", "update_type", "global_update", clause))
    update_type = _read_update_type(optimizer)
    without_effect = _WITHOUT_EFFECT.get(clause, ())
    hparam = optimizer.object(clause, (*_SCHEDULE_KEYS, *keys, *without_effect))
    for key in without_effect:
        hparam.boolean(key, False)
    try:
        rule = rule_type(**{key: hparam.number(key) for key in keys if key in hparam})
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
    return TableOptimizer(rule, update_type), schedule


def _read_update_type(optimizer: Fields) -> UpdateType:
    """Read ``update_type``, or ``global_update`` of HugeCTR's older files: true is "Global", false is "Local"."""
    older: UpdateType = "Global" if optimizer.boolean("global_update", False) else "Local"
    update_type = optimizer.choice("update_type", _UPDATE_TYPES, older)
    if "global_update" in optimizer and update_type != older:
        raise optimizer.error(f"means {older}, but update_type is {update_type}; remove one of them", "global_update")
    return update_type


def _read_table_optimizers(
    root: Fields, graph: Graph, optimizer: TableOptimizer, schedule: LearningRateSchedule
) -> tuple[TableOptimizer, ...]:
    tables = {embedding.top: optimizer for embedding in graph.embeddings}
    for layer in root.objects("layers"):
        if "optimizer" not in layer:
            continue
        if "top" not in layer or layer.value("top") not in tables:
            raise layer.error("only embedding layers have an optimizer of their own", "optimizer")
        own, own_schedule = _read_optimizer(layer)
        if own_schedule != schedule:
            reason = "its learning rates must be those of the document's optimizer, because a step has one rate"
            raise layer.error(reason, "optimizer")
        tables[layer.text("top")] = own
    return tuple(tables.values())


def _read_losses(root: Fields) -> tuple[tuple[Label, ...], tuple[Regularizer, ...]]:
    """Read the labels with their weights, and the regularizers."""
    layers, known = list(root.objects("layers")), " or ".join(LOSS_OF_LAYER)
    if layers[-1].text("type") not in LOSS_OF_LAYER:
        raise layers[-1].error(f"a training graph ends in {known}; to train a version further, use --from", "type")
    losses = [layer for layer in layers if layer.text("type").endswith("Loss")]
    data = layers[0].object("label")
    several = isinstance(data.value("label_dim"), list)
    columns = data.integers("label_dim") if several else (data.integer("label_dim"),)
    labels = []
    # the graph's reader has checked that each label has a loss and a dimension
    for loss, label, count in zip(losses, data.texts("top"), columns, strict=True):
        if loss.text("type") not in LOSS_OF_LAYER:
            raise loss.error(f"training supports only {known}", "type")
        if loss.texts("bottom")[1] != label:
            raise loss.error(f"expected the losses in the order of the labels, so {label!r} here", "bottom")
        labels.append(Label(label, _read_target_weight(loss, count)))
    return tuple(labels), tuple(_read_regularizer(loss) for loss in losses if "regularizer" in loss)


def _read_regularizer(loss: Fields) -> Regularizer:
    kind = loss.choice("regularizer", _REGULARIZERS)
    factor = loss.number("lambda")
    if factor < 0:
        raise loss.error(f"expected a number of at least 0, got {factor:g}", "lambda")
    return Regularizer(kind, factor)


def _read_target_weight(loss: Fields, columns: int) -> tuple[float, ...]:
    """Read ``target_weight``, HugeCTR's list of a weight for each label column, by default 1."""
    if "target_weight" not in loss:
        return (1.0,) * columns
    weights = loss.numbers("target_weight", columns)
    if min(weights) < 0:
        raise loss.error(f"expected numbers of at least 0, got {min(weights):g}", "target_weight")
    return weights
