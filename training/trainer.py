"""The training loop: epochs of shuffled batches and their results."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from serving.errors import ConfigError
from serving.model.graph import Graph, SparseInput
from training.ctr_model import CtrModel
from training.errors import DivergedError
from training.learning_rate import LearningRateSchedule
from training.metrics import area_under_curve, log_loss
from training.samples import Samples

_EVALUATION_BATCH = 4096


@dataclass(frozen=True, slots=True)
class EpochResult:
    """The result of one epoch.

    Attributes:
        epoch: counted from 1.
        loss: the mean training loss. Each sample's loss is measured before the step that learns from it.
        auc: for each label, on the evaluation samples after the epoch. NaN if the label is always 0 or always 1.
        evaluation_loss: for each label, the mean binary cross-entropy of the evaluation samples.
        seconds: the time of training, without evaluation.
    """

    epoch: int
    loss: float
    auc: tuple[float, ...]
    evaluation_loss: tuple[float, ...]
    seconds: float


def train(
    model: CtrModel,
    samples: Samples,
    evaluation: Samples,
    *,
    epochs: int,
    batch_size: int,
    schedule: LearningRateSchedule,
    seed: int,
    progress: bool = False,
) -> Iterator[EpochResult]:
    """Train, and yield the result of every epoch.

    The samples are shuffled for every epoch, and a smaller last batch is used too. On one thread, the same model,
    samples and seed give the same weights.

    Args:
        model: is changed in place. A second call continues the training, with its schedule from the start.
        samples: at least one.
        evaluation: at least one. Nothing is learned from it.
        epochs: passes over ``samples``.
        batch_size: B, at least 1.
        schedule: the learning rate of every step.
        seed: the seed of the shuffling.
        progress: show a progress bar if standard error is a terminal.

    Raises:
        ConfigError: the graph has other inputs than the samples, or ``samples`` has no key of an input.
        DivergedError: the loss, or a logit of the evaluation, is not finite.
    """
    check_samples_fit(model.graph, samples)
    check_samples_fit(model.graph, evaluation)
    _check_every_table_learns(model.graph, samples)
    rng = np.random.default_rng(seed)
    step = 0
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        order = rng.permutation(len(samples))
        loss_sum = 0.0
        with tqdm(
            total=len(samples), unit=" rows", desc=f"epoch {epoch} of {epochs}", disable=None if progress else True
        ) as bar:
            for first in range(0, len(samples), batch_size):
                batch = samples[order[first : first + batch_size]]
                step += 1
                rate = schedule.at(step)
                loss = model.train_batch(batch, rate)
                if not math.isfinite(loss):
                    raise DivergedError(step, rate)
                loss_sum += loss * len(batch)
                bar.update(len(batch))
        seconds = time.perf_counter() - started
        logits = predict_logits(model, evaluation)
        if not np.isfinite(logits).all():  # the last step may have diverged after its loss was measured
            raise DivergedError(step, rate)
        columns = list(zip(evaluation.labels.T, logits.T, strict=True))
        yield EpochResult(
            epoch=epoch,
            loss=loss_sum / len(samples),
            auc=tuple(area_under_curve(*column) for column in columns),
            evaluation_loss=tuple(log_loss(*column) for column in columns),
            seconds=seconds,
        )


def predict_logits(model: CtrModel, samples: Samples) -> NDArray[np.float32]:
    """Predict float32[B, L] logits as serving does, for at least one sample."""
    starts = range(0, len(samples), _EVALUATION_BATCH)
    return np.concatenate([model.logits(samples[first : first + _EVALUATION_BATCH]) for first in starts])


def check_samples_fit(graph: Graph, samples: Samples) -> None:
    """Raise ConfigError unless the graph can read these samples."""
    slots = sum(entry.slots for entry in graph.sparse)
    for what, path, asked, there in (
        ("labels", "layers[0].label.label_dim", graph.label_dim, samples.labels.shape[1]),
        ("dense features", "layers[0].dense.dense_dim", graph.dense_dim, samples.dense.shape[1]),
        ("slots", "layers[0].sparse", slots, samples.bags.slots),
    ):
        if asked != there:
            raise ConfigError(graph.source, path, f"the graph reads {asked} {what}, but the data has {there}")
    for index, (entry, counts) in enumerate(_keys_per_sample(graph, samples)):
        if counts.max() > entry.max_keys_per_sample:
            sample = int(np.argmax(counts > entry.max_keys_per_sample))
            reason = f"at most {entry.max_keys_per_sample} keys are allowed, but sample {sample} has {counts[sample]}"
            raise ConfigError(graph.source, f"layers[0].sparse[{index}]", reason)


def _check_every_table_learns(graph: Graph, samples: Samples) -> None:
    """Check that each table will have a row, because a table without rows cannot be written."""
    for index, (entry, counts) in enumerate(_keys_per_sample(graph, samples)):
        if not counts.any():
            reason = f"no training sample has a key of {entry.top!r}, so its table would stay empty"
            raise ConfigError(graph.source, f"layers[0].sparse[{index}]", reason)


def _keys_per_sample(graph: Graph, samples: Samples) -> Iterator[tuple[SparseInput, NDArray[np.int64]]]:
    """Yield each sparse input and int64[B], the number of its keys in each sample."""
    sizes, first = samples.bags.sizes, 0
    for entry in graph.sparse:
        yield entry, sizes[:, first : first + entry.slots].sum(axis=1)
        first += entry.slots
