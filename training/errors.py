"""Every error training raises on purpose. What is wrong with a model, its files or their place is a serving error."""

from kernels.errors import HotrowError


class TrainingError(HotrowError):
    """Base of all errors raised on purpose by training."""


class DataError(TrainingError):
    """Training data is missing, cut short, or not what its place in the file says it should be.

    The message starts with where: ``train.csv line 17 column C3: ...``, ``train.npz array label: ...``.
    """

    def __init__(
        self,
        source: object,
        reason: str,
        *,
        line: int | None = None,
        column: str | None = None,
        array: str | None = None,
    ) -> None:
        """Name the file (or other source) and the place in it, and what was expected and what came.

        The place is a line counted from 1 and a column, or an array.
        """
        place = str(source)
        if line is not None:
            place += f" line {line}"
        if column is not None:
            place += f" column {column}"
        if array is not None:
            place += f" array {array}"
        super().__init__(f"{place}: {reason}")
        self.source = str(source)
        self.reason = reason
        self.line = line
        self.column = column
        self.array = array


class DivergedError(TrainingError):
    """The loss is no longer a finite number; what was learnt is worthless."""

    def __init__(self, step: int, learning_rate: float) -> None:
        """Name the step, counted from 1, and its learning rate."""
        super().__init__(f"the loss is not finite at step {step}: a learning rate below {learning_rate:g} may help")
        self.step = step
        self.learning_rate = learning_rate
