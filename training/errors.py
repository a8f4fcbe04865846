"""The errors that training raises on purpose. Errors about models and their files are serving's errors."""

from kernels.errors import HotrowError

#: Why data of one row is not enough.
ONE_SAMPLE = "1 sample, expected at least 2: one to train on, one to evaluate on"


class TrainingError(HotrowError):
    """Base of all errors that training raises on purpose."""


class DataError(TrainingError):
    """Training data is missing, cut short, or wrong.

    The message starts with the place: ``train.csv line 17 column C3: ...``, ``train.npz array label: ...``,
    ``train.norm record 5: ...``.
    """

    def __init__(
        self,
        source: object,
        reason: str,
        *,
        line: int | None = None,
        column: str | None = None,
        array: str | None = None,
        record: int | None = None,
    ) -> None:
        """Name the file, the place in it (a line from 1 and a column, an array, or a record from 0), and the reason."""
        place = str(source)
        if line is not None:
            place += f" line {line}"
        if column is not None:
            place += f" column {column}"
        if array is not None:
            place += f" array {array}"
        if record is not None:
            place += f" record {record}"
        super().__init__(f"{place}: {reason}")
        self.source = str(source)
        self.reason = reason
        self.line = line
        self.column = column
        self.array = array
        self.record = record


class SessionError(TrainingError):
    """A method of a training session was called in the wrong mode, or too early."""


class DivergedError(TrainingError):
    """The loss is no longer finite, so the weights are worthless."""

    def __init__(self, step: int, learning_rate: float) -> None:
        """Name the step, counted from 1, and its learning rate."""
        super().__init__(f"the loss is not finite at step {step}: a learning rate below {learning_rate:g} may help")
        self.step = step
        self.learning_rate = learning_rate
