"""The training loop: epochs of shuffled batches and their results."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from training.ctr_model import CtrModel
from training.data.source import SampleSource, shuffled_batches
from training.data.streams import batches_of
from training.errors import DivergedError
from training.learning_rate import LearningRateSchedule
from training.metrics import area_under_curve, log_loss
from training.sample_check import check_every_table_learns, check_samples_fit
from training.samples import Samples

_EVALUATION_BATCH = 4096
WINDOW_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class EpochResult:
    """The result of one epoch.

    Attributes:
        epoch: counted from 1.
        loss: the mean training loss. Each sample's loss is measured before the step that learns from it.
        auc: for each label, on the evaluation samples after the epoch. NaN if the label is always 0 or always 1.
        evaluation_loss: for each label, the mean binary cross-entropy of the evaluation samples.
        evaluation_ones: for each label, how many evaluation samples have it.
        seconds: the time of training, without evaluation.
    """

    epoch: int
    loss: float
    auc: tuple[float, ...]
    evaluation_loss: tuple[float, ...]
    evaluation_ones: tuple[int, ...]
    seconds: float


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

    Raises:
        ConfigError: the graph has other inputs than the samples, or ``samples`` has no key of an input.
        DivergedError: the loss, or a logit of the evaluation, is not finite.
    """
    for source in (samples, evaluation):
        if isinstance(source, Samples):
            check_samples_fit(model.graph, source)
    if isinstance(samples, Samples):
        check_every_table_learns(model.graph, samples)
    rng = np.random.default_rng(seed)
    step = 0
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        loss_sum = 0.0
        with tqdm(
            total=len(samples), unit=" rows", desc=f"epoch {epoch} of {epochs}", disable=None if progress else True
        ) as bar:
            for batch in shuffled_batches(samples, batch_size, window_rows, rng):
                step += 1
                rate = schedule.at(step)
                loss = model.train_batch(batch, rate)
                if not math.isfinite(loss):
                    raise DivergedError(step, rate)
                loss_sum += loss * len(batch)
                bar.update(len(batch))
        seconds = time.perf_counter() - started
        labels, logits = evaluate(model, evaluation)
        if not np.isfinite(logits).all():  # the last step may have diverged after its loss was measured
            raise DivergedError(step, rate)
        columns = list(zip(labels.T, logits.T, strict=True))
        yield EpochResult(
            epoch=epoch,
            loss=loss_sum / len(samples),
            auc=tuple(area_under_curve(*column) for column in columns),
            evaluation_loss=tuple(log_loss(*column) for column in columns),
            evaluation_ones=tuple(int(column.sum()) for column in labels.T),
            seconds=seconds,
        )


def evaluate(model: CtrModel, source: SampleSource) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the labels and the logits of at least one sample, float32[B, L] each, as serving predicts them."""
    labels, logits = [], []
    for batch in batches_of(source.parts(), _EVALUATION_BATCH, keeps_rest=True):
        labels.append(batch.labels)
        logits.append(model.logits(batch))
    return np.concatenate(labels), np.concatenate(logits)


def predict_logits(model: CtrModel, samples: SampleSource) -> NDArray[np.float32]:
    """Predict float32[B, L] logits as serving does, for at least one sample."""
    return evaluate(model, samples)[1]
