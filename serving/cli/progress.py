"""A bar on the terminal that says how far something is; none where standard error is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Give what is to be called with the thing that is being done, the rows it is done of, and how many there are.

    A new thing begins a new bar. The number of rows may be an estimate: the bar ends where the rows do.
    """
    from tqdm import tqdm  # takes its time

    bars: list[tuple[str, Any]] = []

    def tell(what: str, done: int, rows: int) -> None:
        if not bars or bars[-1][0] != what:
            end()
            bars.append((what, tqdm(desc=what, total=rows, unit="row", unit_scale=True, disable=None)))
        bars[-1][1].update(done - bars[-1][1].n)

    def end() -> None:
        if bars:
            bars.pop()[1].close()

    try:
        yield tell
    finally:
        end()
