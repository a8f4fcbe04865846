"""The learning rates of a document, one step after another."""

from os import PathLike
from pathlib import Path

from training.model.document import read_document
from training.optimizers.learning_rate import LearningRateSchedule


class LearningRateScheduler:
    """Counts steps and returns their learning rates. Not thread-safe."""

    def __init__(self, schedule: LearningRateSchedule) -> None:
        """Begin before the first step."""
        self._schedule = schedule
        self._step = 0
        self._rate = schedule.base

    def get_next(self) -> float:
        """Go to the next step, and return its learning rate."""
        self._step += 1
        self._rate = self._schedule.at(self._step)
        return self._rate

    def get_lr(self) -> float:
        """Return the learning rate of the current step. Before the first step it is the document's."""
        return self._rate

    def get_step(self) -> int:
        """Return the number of steps so far."""
        return self._step


def get_learning_rate_scheduler(configure_file: str | PathLike[str]) -> LearningRateScheduler:
    """Read the learning rates of a training document, of any optimizer.

    Raises:
        ConfigError: the file is missing, or is not a training document.
    """
    return LearningRateScheduler(read_document(Path(configure_file)).schedule)
