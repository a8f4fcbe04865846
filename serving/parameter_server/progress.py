"""The progress of long walks over rows."""

from collections.abc import Callable, Iterator

from serving.storage.store import Keys, Vectors

Batches = Iterator[tuple[Keys, Vectors]]
Progress = Callable[[str, int, int], None]
"""Called with the task, its finished rows, and all its rows, which may be an estimate."""


class CountedRows:
    """Counts the rows of batches and reports the progress.

    Attributes:
        done: the rows so far.
    """

    def __init__(self, task: str, rows: int, progress: Progress | None) -> None:
        """Report to ``progress`` that ``task`` takes ``rows`` rows."""
        self.done = 0
        self._task = task
        self._rows = rows
        self._progress = progress

    def __call__(self, batches: Batches) -> Batches:
        """Yield the batches."""
        for keys, rows in batches:
            yield keys, rows
            self.done += keys.size
            if self._progress is not None:
                self._progress(self._task, self.done, self._rows)
