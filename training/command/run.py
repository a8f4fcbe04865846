"""One run of ``hotrow train``: read or generate samples, train, evaluate, export."""

import argparse
import dataclasses
import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kernels.host import set_lookup_threads
from serving.errors import ConfigError, OutputError
from serving.model.atomic import atomic_write, remove_killed_writes, temporary_directory
from serving.model.version_writer import check_output
from serving.stream import read_settings
from training.command import notes
from training.command.checkpoint import Checkpoints
from training.command.describe import describe
from training.command.plot import draw
from training.command.record import digest_of_data, of_this_version, record_of
from training.command.warm_start import WarmStart
from training.data.checks import ColumnMap
from training.data.opening import columns_of, default_columns, open_data
from training.data.source import FileSource, content_of
from training.data.streams import batches_of
from training.errors import ONE_SAMPLE, DataError
from training.features import FeatureFile, automatic_dim
from training.model.ctr_model import CtrModel
from training.model.document import TrainingDocument, open_document
from training.model.export import export_model
from training.model.loss_layers import first_labels, with_label_statistics, with_losses
from training.model.losses import Loss, figure_text
from training.model.sample_check import check_samples_fit
from training.model.trainer import EpochResult, Position, train
from training.processes import Processes, start_processes
from training.proposal import propose, shown, write_proposal
from training.publishing import Publisher, clear_outbox
from training.samples import Samples
from training.synthetic.generator import generate_for

_CALIBRATION_SAMPLES = 512  # of the held-out samples, for the engine int8
_KEY_DTYPES = {"I32": "uint32", "I64": "int64"}
_TEMPORARY = "hotrow-train"  # a hidden folder next to the models
_OUTBOX = "outbox"  # in the folder of checkpoints
_HELD_OUT = 10  # the last tenth of the samples is held out for evaluation


def run(options: argparse.Namespace) -> Iterator[str]:
    """Train as the command line says, and yield lines for the user. Under torchrun, only the first process yields any.

    Raises:
        HotrowError: the graph, the data or the output folder cannot be used. No version was written.
    """
    processes = start_processes()
    for line in _lines(options, processes):
        if processes.is_first:
            yield line


def _lines(options: argparse.Namespace, processes: Processes) -> Iterator[str]:
    """Train, in every process.

    Raises:
        HotrowError: the graph, the data or the output folder cannot be used. No version was written.
    """
    if options.describe is not None:
        document = open_document(options.describe)
        yield from describe(document if options.loss is None else with_losses(document, options.loss))
        return
    document, features, start = yield from _prepared(options, processes)
    name = document.name if options.name is None else options.name
    check_output(options.output, name, document.graph)
    remove_killed_writes(options.output, _TEMPORARY)
    torch.set_num_threads(options.threads)
    set_lookup_threads(options.threads)
    samples, evaluation, about_data = _read(options, document, features, processes)
    labels, weights = first_labels(samples)
    document = with_label_statistics(document, labels, weights)
    learned = notes.LearnedLabels(labels, weights)
    data = _described_data(options, samples, evaluation) if processes.is_first else {}
    yield from about_data
    if "solver" in document.document:
        yield f"note: {document.graph.source}: solver: no effect: the options of `hotrow train` take its place"
    yield from notes.of_labels(document, learned, len(samples))
    yield from notes.of_samples(document, _names(options, document, features), samples, is_raw=features is not None)
    model = _model(document, options, processes)
    if start is not None:
        start.load(model)
    with ExitStack() as stack:
        training = _Run(options, document, features, model, samples, evaluation, learned, stack)
        if options.publish is not None:
            training.publish(name)
        yield from training.lines()
        calibration = next(batches_of(evaluation.parts(), _CALIBRATION_SAMPLES, keeps_rest=True))
        path = export_model(
            model,
            document.document,
            options.output,
            name,
            calibration=calibration,
            publisher=training.publisher,
            features=features,
            names=None if features or options.data is None else columns_of(options.data, document, options.columns),
            record=training.record(data) if processes.is_first else None,
        )
    yield f"model written to {path}"
    yield f"serve it: hotrow serve {options.output}"


def _prepared(
    options: argparse.Namespace, processes: Processes
) -> Generator[str, None, tuple[TrainingDocument, FeatureFile | None, WarmStart | None]]:
    """Return what is trained on which features, and from which version, and yield lines about them."""
    start = None if options.start is None else WarmStart(options.start)
    is_automatic = options.model == "auto"
    options.model = options.model or ("dcn" if start is None else start.network)
    document = open_document("dcn" if is_automatic else options.model) if start is None else start.document
    features = None
    if start is not None and (start.has_features or options.label is not None):
        holds_out = options.eval_data is None
        features = start.features(options.data, options.label, options.weight, holds_out=holds_out)
        document, options.label = features.document, list(features.labels)
        yield from (f"vocabulary of {name}: {count:,} new values" for name, count in start.new_values.items() if count)
    elif options.features is None and options.label is not None:
        yield from _propose(options, processes)
    if options.features is not None:
        dim = options.embedding_dim
        if is_automatic and dim is None:
            dim = automatic_dim(options.features)
            yield f"rows of {dim} floats"
        features = FeatureFile(options.features, document, options.label, dim, options.hidden, options.weight)
        document = features.document
    if options.loss is not None:
        document = with_losses(document, options.loss)
    return document, features, start


def _propose(options: argparse.Namespace, processes: Processes) -> Iterator[str]:
    """Propose features and losses from the columns of the data, write the features, and have the training use them."""
    losses, path = list[str](), Path()
    if processes.is_first:
        proposals = propose(
            options.data, options.label, options.weight, losses=options.loss, holds_out=options.eval_data is None
        )
        yield from shown(proposals)
        path, written = write_proposal(proposals, options.data.name.split(".")[0])
        yield written
        losses = [proposal.loss for proposal in proposals if proposal.loss]
    options.features, options.loss = processes.from_first("the proposed features", (path, losses))


def _model(document: TrainingDocument, options: argparse.Namespace, processes: Processes) -> CtrModel:
    try:
        return CtrModel(
            document.graph,
            seed=options.seed,
            rule=document.rule,
            tables=document.tables,
            label_weights=document.label_weights,
            regularizers=document.regularizers,
            processes=processes,
            sharding=options.sharding,
        )
    except RuntimeError as err:  # PyTorch raises this instead of MemoryError
        if "allocate memory" not in str(err):
            raise
        size_bytes = 4 * sum(math.prod(spec.shape) for spec in document.graph.weights)
        reason = f"the weights of the dense network take {size_bytes:,} bytes, more than the machine has"
        raise ConfigError(document.graph.source, "layers", reason) from err


def _read(
    options: argparse.Namespace, document: TrainingDocument, features: FeatureFile | None, processes: Processes
) -> tuple[Samples | FileSource, Samples | FileSource, Sequence[str]]:
    """Return the training samples, the evaluation samples, and lines about the best known AUC or unknown values."""
    if options.synthetic is not None:
        data = generate_for(document.graph, options.synthetic, options.seed)
        check_samples_fit(document.graph, data.samples)
        cut = _cut(options.synthetic)
        best = {label: data.best_known_auc(slice(cut, None), label) for label in range(document.graph.label_dim)}
        return data.samples[:cut], data.samples[cut:], [f"best known AUC {_per_label(document, best)}"]
    samples = _open(options, document, features, options.data, processes)
    lines = [] if features is None else [*notes.of_values(options.data, features)]
    if options.eval_data is not None:
        evaluation = _open(options, document, features, options.eval_data, processes)
        lines += [] if features is None else notes.of_values(options.eval_data, features)
        return samples, evaluation, lines
    if len(samples) < 2:
        raise DataError(options.data, ONE_SAMPLE)
    return samples[: _cut(len(samples))], samples[_cut(len(samples)) :], lines


def _described_data(
    options: argparse.Namespace, samples: Samples | FileSource, evaluation: Samples | FileSource
) -> dict[str, Any]:
    """Return the rows and the digests of the data for ``training.json``."""
    files = {"data": options.data, "eval_data": options.eval_data}
    digests = {name: digest_of_data(path) for name, path in files.items() if path is not None}
    return {"rows": len(samples), "evaluation_rows": len(evaluation), "sha256": digests}


def _open(
    options: argparse.Namespace,
    document: TrainingDocument,
    features: FeatureFile | None,
    path: Path,
    processes: Processes,
) -> Samples | FileSource:
    return open_data(
        path,
        document,
        key_dtype=_KEY_DTYPES[options.key_type],
        columns=options.columns,
        features=features,
        weight=options.weight,
        window_rows=options.window,
        progress=processes.is_first,
    )


def _names(options: argparse.Namespace, document: TrainingDocument, features: FeatureFile | None) -> ColumnMap:
    """Return the names of the columns."""
    if features is not None:
        return features.columns
    found = None if options.data is None else columns_of(options.data, document, options.columns)
    return found or default_columns(document)


def _per_label(document: TrainingDocument, values: Mapping[int, float]) -> str:
    """Return one number, or several with the labels' names: ``click 0.7500, buy 0.8000``."""
    names = document.label_columns
    if len(names) == 1:
        return figure_text(values[0])
    return ", ".join(f"{names[label]} {figure_text(value)}" for label, value in values.items())


def _write_metrics(path: Path | None, document: TrainingDocument, epochs: Sequence[dict[str, Any]]) -> None:
    if path is None:
        return
    try:
        with atomic_write(path) as file:
            file.write(json.dumps({"model": document.name, "epochs": epochs}, indent=2).encode() + b"\n")
    except OSError as err:
        raise ConfigError(str(path), "", f"cannot be written: {(err.strerror or str(err)).lower()}") from err


def _described(document: TrainingDocument, result: EpochResult) -> dict[str, Any]:
    """Return the figures of an epoch for JSON, which has no NaN: each figure has the labels that have it."""
    by_figure = dict[str, dict[str, Any]]()
    for name, loss, figures in zip(document.label_columns, result.evaluation_loss, result.figures, strict=True):
        for figure, value in {"evaluation_loss": loss, **figures}.items():
            is_defined = not isinstance(value, float) or math.isfinite(value)
            by_figure.setdefault(figure, {})[name] = value if is_defined else None
    return {"epoch": result.epoch, "loss": result.loss, **by_figure, "seconds": result.seconds}


def _cut(rows: int) -> int:
    """Return where the held-out samples begin. There is at least one."""
    return rows - max(1, rows // _HELD_OUT)


class _Run:
    """The epochs of one run, with its checkpoints, its best epoch and its reports.

    Attributes:
        publisher: publishes the model's changes; None: nothing does.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        document: TrainingDocument,
        features: FeatureFile | None,
        model: CtrModel,
        samples: Samples | FileSource,
        evaluation: Samples | FileSource,
        learned: notes.LearnedLabels,
        stack: ExitStack,
    ) -> None:
        """Take what is trained. Check everything that can fail, and continue from a checkpoint if asked to."""
        self._options = options
        self._document = document
        self._features = features
        self._model = model
        self._samples = samples
        self._evaluation = evaluation
        self._learned = learned
        self._position = Position()
        self._epochs: list[dict[str, Any]] = []
        self._checkpoints: Checkpoints | None = None
        self._stack = stack
        self.publisher: Publisher | None = None
        if options.checkpoint is not None:
            self._checkpoints = Checkpoints(options.checkpoint, model, document.optimizer, self._settings())
            if not options.resume:
                self._checkpoints.make_folder()
            if model.processes.is_first:  # before anything is read: another training may delete what it has replaced
                stack.enter_context(self._checkpoints.locked())
            model.processes.wait("the folder of checkpoints")  # a checkpoint may have got its name back
            if options.resume:
                self._resume(self._checkpoints)
            else:
                self._checkpoints.check_empty()
        elif options.epochs > 1:
            folder = _temporary(options.output, stack, model.processes)
            self._checkpoints = Checkpoints(folder, model, document.optimizer, {})
        self._report()

    def _resume(self, checkpoints: Checkpoints) -> None:
        self._position, epochs = checkpoints.load()
        self._epochs = list(map(of_this_version, epochs))
        begun = self._position.epoch if self._position.batches else len(self._epochs)
        if begun > self._options.epochs:
            reason = f"expected --epochs of at least {begun}, because it has {begun} epochs, got {self._options.epochs}"
            raise ConfigError(str(self._options.checkpoint), "", reason)
        if 0 < (best := self._best_epoch()) < len(self._epochs):
            checkpoints.model_folder(self._last_step(best), best)  # needed at the end

    def publish(self, name: str) -> None:
        """Publish the changes of the model from now on, under this name."""
        options, outbox = self._options, self._options.checkpoint / _OUTBOX
        if not options.resume and self._model.processes.is_first:  # of a run that ended before its first checkpoint
            clear_outbox(outbox)
        self.publisher = self._stack.enter_context(
            Publisher(
                options.publish,
                name,
                self._model,
                outbox,
                message_format=options.publish_format,
                rows=options.publish_rows,
                settings=None if options.publish_settings is None else read_settings(options.publish_settings),
            )
        )
        if not self.publisher.is_new:
            self.publisher.resume(self._position.step)

    def lines(self) -> Iterator[str]:
        options, document, position = self._options, self._document, self._position
        if options.resume:
            where = f"in epoch {position.epoch}" if position.epoch <= options.epochs else "after the last epoch"
            yield f"resumed at step {position.step:,}, {where}"
        schedule = document.schedule
        if options.learning_rate is not None:
            schedule = dataclasses.replace(schedule, base=options.learning_rate)
        results = train(
            self._model,
            self._samples,
            self._evaluation,
            epochs=options.epochs,
            batch_size=options.batch_size,
            schedule=schedule,
            seed=options.seed,
            window_rows=options.window,
            progress=self._model.processes.is_first,
            begin=position,
            save=None if self._checkpoints is None else self._save,
            save_steps=options.checkpoint_steps,
            publish=None if self.publisher is None else self.publisher.publish,
            publish_steps=options.publish_steps,
        )
        while not self._is_enough() and (result := next(results, None)) is not None:
            self._epochs.append(_described(document, result))
            self._report()
            yield from self._epoch_lines(result)
        if self._is_enough():
            yield f"stopped: {options.patience} epochs without a better {self._errors()}"
        best = self._best_epoch()
        yield from notes.of_result(document, self._epochs[best - 1])
        if self._checkpoints is not None and best < len(self._epochs):
            self._checkpoints.load_model(self._last_step(best), best)
            self._model.processes.wait("the best epoch")  # the folder may be temporary
            yield f"the model of epoch {best} is written, because its {self._errors()} is the best"

    def _epoch_lines(self, result: EpochResult) -> Iterator[str]:
        document, rows, evaluation_rows = self._document, len(self._samples), len(self._evaluation)
        pace = f"epoch {result.epoch} of {self._options.epochs}: {rows:,} rows in {result.seconds:.1f} s"
        yield f"loss {figure_text(result.loss)}  ({pace})"
        if result.epoch == 1:
            yield from notes.of_epoch(document, result, evaluation_rows, self._learned)
        by_loss: dict[type[Loss], dict[int, Loss]] = {}
        for label, loss in enumerate(document.losses):
            by_loss.setdefault(type(loss), {})[label] = loss
        for loss_type, labels in by_loss.items():
            first, *others = (
                f"{shown} {_per_label(document, {label: result.figures[label][figure] for label in labels})}"
                for shown, figure in loss_type.shown
            )
            yield f"{first}  (evaluation: {evaluation_rows:,} rows, {', '.join(others)})"

    def record(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the content of ``training.json``."""
        return record_of(self._options, self._document, data, self._epochs, self._best_epoch())

    def _best_epoch(self) -> int:
        """Return the first epoch with the smallest loss, added over the labels; 0 before the first epoch."""
        of_labels = [epoch["evaluation_loss"].values() for epoch in self._epochs]
        losses: list[float] = [sum(math.inf if loss is None else loss for loss in of_label) for of_label in of_labels]
        return 1 + losses.index(min(losses)) if losses else 0

    def _errors(self) -> str:
        """Return what the best epoch is chosen by, for people."""
        names = (shown for loss in self._document.losses for shown, figure in loss.shown if figure == loss.error)
        return " and ".join(dict.fromkeys(names))

    def _last_step(self, epoch: int) -> int:
        return epoch * math.ceil(len(self._samples) / int(self._options.batch_size))

    def _is_enough(self) -> bool:
        done, patience = len(self._epochs), self._options.patience
        return patience is not None and done < self._options.epochs and done - self._best_epoch() >= patience

    def _save(self, position: Position) -> None:
        assert self._checkpoints is not None
        best_step = self._last_step(self._best_epoch())
        # Without --checkpoint, only the model of the best epoch is needed, unless the best epoch is the last one.
        is_needed = position.step == best_step and position.epoch <= self._options.epochs
        if self._options.checkpoint is not None or is_needed:
            with ExitStack() as stack:
                if self.publisher is not None:
                    stack.enter_context(self.publisher.checkpoint(position.step))
                self._checkpoints.save(position, self._epochs, best_step)

    def _report(self) -> None:
        if not self._model.processes.is_first:
            return
        _write_metrics(self._options.metrics, self._document, self._epochs)
        if self._options.plot is not None:
            draw(self._options.plot, {"": self._epochs})

    def _settings(self) -> dict[str, Any]:
        """Return what a resumed training must not change."""
        options = self._options
        paths = {"data": options.data, "eval_data": options.eval_data, "columns": options.columns}
        return {
            "graph": self._document.document,
            "rows": [len(self._samples), len(self._evaluation)],
            "content": {"data": content_of(self._samples), "eval_data": content_of(self._evaluation)},
            "synthetic": options.synthetic,
            **{name: None if path is None else str(path.resolve()) for name, path in paths.items()},
            "features": None if self._features is None else self._features.settings,
            "weight": options.weight,
            "key_type": options.key_type,
            "window": options.window,
            "batch_size": options.batch_size,
            "learning_rate": options.learning_rate,
            "seed": options.seed,
        }


def _temporary(output: Path, stack: ExitStack, processes: Processes) -> Path:
    """Return a hidden folder next to the models, the same for all processes, which is removed at the end."""
    folder = ""
    try:
        if processes.is_first:
            output.mkdir(parents=True, exist_ok=True)
            folder = str(stack.enter_context(temporary_directory(output / _TEMPORARY)))
        return Path(processes.from_first("a temporary folder", folder))
    except OSError as err:
        raise OutputError(f"{output}: cannot be written: {(err.strerror or str(err)).lower()}") from err
