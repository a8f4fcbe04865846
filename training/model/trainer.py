"""The training loop: epochs of shuffled batches and their results."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from serving.model.graph import Graph
from training.data.checks import checked
from training.data.source import SampleSource, shuffled_batches
from training.data.streams import batches_of
from training.errors import DataError, DivergedError
from training.model.ctr_model import CtrModel
from training.model.losses import Figures, losses_of
from training.model.sample_check import check_every_table_learns, check_samples_fit
from training.optimizers.learning_rate import LearningRateSchedule
from training.samples import Samples

_EVALUATION_BATCH = 4096
WINDOW_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class EpochResult:
    """The result of one epoch.

    Attributes:
        epoch: counted from 1.
        loss: the mean training loss. Each sample's loss is measured before the step that learns from it.
        evaluation_loss: for each label, the mean loss of the evaluation samples after the epoch.
        figures: for each label, what is known of the predictions of the evaluation samples; see ``Loss.figures``. The
            AUC is NaN if the label is always 0 or always 1.
        seconds: the time of training, without evaluation.
    """

    epoch: int
    loss: float
    evaluation_loss: tuple[float, ...]
    figures: tuple[Figures, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Position:
    """Where a training is.

    Attributes:
        epoch: the epoch, counted from 1.
        batches: the batches of this epoch that are done.
        step: all steps so far.
        loss_sum: the sum of the losses of this epoch's samples so far.
        seconds: the time of this epoch so far.
        shuffling: the state of the random numbers at the begin of the epoch; None: that of the seed.
    """

    epoch: int = 1
    batches: int = 0
    step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    shuffling: Mapping[str, Any] | None = None


def train(
    model: CtrModel,
    samples: SampleSource,
    evaluation: SampleSource,
    *,
    epochs: int,
    batch_size: int,
    schedule: LearningRateSchedule,
    seed: int,
    window_rows: int = WINDOW_ROWS,
    progress: bool = False,
    begin: Position | None = None,
    save: Callable[[Position], None] | None = None,
    save_steps: int = 10_000,
    publish: Callable[[], Any] | None = None,
    publish_steps: int = 100,
) -> Iterator[EpochResult]:
    """Train, and yield the result of every epoch.

    The samples are shuffled for every epoch, and a smaller last batch is used too. On one thread, the same model,
    samples and seed give the same weights.

    Args:
        model: is changed in place. A second call continues the training, with its schedule from the start.
        samples: at least one. A source that is not ``Samples`` has been checked, as ``open_data`` does.
        evaluation: at least one. Nothing is learned from it.
        epochs: passes over ``samples``.
        batch_size: B, at least 1.
        schedule: the learning rate of every step.
        seed: the seed of the shuffling.
        window_rows: samples are shuffled within windows of this size.
        progress: show a progress bar if standard error is a terminal.
        begin: go on from here. The model is the one that was saved there.
        save: is called after every ``save_steps`` steps and after every epoch, when its result has been taken.
        save_steps: at least 1.
        publish: is called after every ``publish_steps`` steps.
        publish_steps: at least 1.

    Raises:
        DataError: a label, a dense feature or a key is wrong; see ``training.data.checks``.
        ConfigError: the graph has other inputs than the samples, or ``samples`` has no key of an input.
        DivergedError: the loss, or a logit of the evaluation, is not finite.
    """
    _check(model.graph, samples, evaluation)
    at = begin or Position()
    rng = np.random.default_rng(seed)
    if at.shuffling is not None:
        rng.bit_generator.state = at.shuffling
    for epoch in range(at.epoch, epochs + 1):
        at = replace(at, epoch=epoch, shuffling=rng.bit_generator.state)
        started = time.perf_counter() - at.seconds
        loss_sum = at.loss_sum
        with tqdm(
            total=len(samples), unit=" rows", desc=f"epoch {epoch} of {epochs}", disable=None if progress else True
        ) as bar:
            for number, batch in enumerate(shuffled_batches(samples, batch_size, window_rows, rng), 1):
                bar.update(len(batch))
                if number <= at.batches:  # a resumed training has done this batch
                    continue
                step = at.step + number - at.batches
                rate = schedule.at(step)
                loss = model.train_batch(batch, rate)
                if not math.isfinite(loss):
                    raise DivergedError(step, rate)
                loss_sum += loss * len(batch)
                if publish is not None and step % publish_steps == 0:
                    publish()
                if save is not None and step % save_steps == 0:
                    seconds = time.perf_counter() - started
                    save(replace(at, batches=number, step=step, loss_sum=loss_sum, seconds=seconds))
        steps = at.step + math.ceil(len(samples) / batch_size) - at.batches
        seconds = time.perf_counter() - started
        yield _result(model, evaluation, epoch, loss_sum / len(samples), seconds, schedule)
        at = Position(epoch + 1, step=steps, shuffling=rng.bit_generator.state)
        if save is not None:
            save(at)


def _check(graph: Graph, samples: SampleSource, evaluation: SampleSource) -> None:
    for name, source in (("training samples", samples), ("evaluation samples", evaluation)):
        if isinstance(source, Samples):
            check_samples_fit(graph, source)
            checked(source, name, 0, losses=losses_of(graph))
    if isinstance(samples, Samples):
        check_every_table_learns(graph, samples)


def _result(
    model: CtrModel, evaluation: SampleSource, epoch: int, loss: float, seconds: float, schedule: LearningRateSchedule
) -> EpochResult:
    labels, logits, weights = evaluate(model, evaluation)
    if weights is not None and not weights.any():
        raise DataError("evaluation samples", "expected a weight above 0, found none")
    if not np.isfinite(logits).all():  # the last step may have diverged after its loss was measured
        raise DivergedError(model.step, schedule.at(model.step))
    columns = [
        (loss, (*column, weights)) for loss, *column in zip(losses_of(model.graph), labels.T, logits.T, strict=True)
    ]
    return EpochResult(
        epoch=epoch,
        loss=loss,
        evaluation_loss=tuple(loss.mean(*column) for loss, column in columns),
        figures=tuple(loss.figures(*column) for loss, column in columns),
        seconds=seconds,
    )


def evaluate(
    model: CtrModel, source: SampleSource
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None]:
    """Return the labels and the logits of at least one sample, float32[B, L] each, and the weights, float32[B] or None.

    The logits are those that serving predicts.
    """
    labels, logits, weights = [], [], []
    for batch in batches_of(source.parts(), _EVALUATION_BATCH, keeps_rest=True):
        labels.append(batch.labels)
        logits.append(model.logits(batch))
        if batch.weights is not None:
            weights.append(batch.weights)
    return np.concatenate(labels), np.concatenate(logits), np.concatenate(weights) if weights else None


def predict_logits(model: CtrModel, samples: SampleSource) -> NDArray[np.float32]:
    """Predict float32[B, L] logits as serving does, for at least one sample."""
    return evaluate(model, samples)[1]
