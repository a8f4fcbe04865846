"""A progress bar on standard error, if that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of a task, its finished rows and its total rows. A new task gets a new bar."""
    from tqdm import tqdm  # slow to import

    bars: list[tuple[str, Any]] = []

    def report(what: str, done: int, rows: int) -> None:
        if not bars or bars[-1][0] != what:
            end()
            bars.append((what, tqdm(desc=what, total=rows, unit="row", unit_scale=True, disable=None)))
        bars[-1][1].update(done - bars[-1][1].n)

    def end() -> None:
        if bars:
            bars.pop()[1].close()

    try:
        yield report
    finally:
        end()


@contextmanager
def load_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield the function of ``progress_bar`` on a terminal, with log lines above the bar; elsewhere None."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm.contrib.logging import logging_redirect_tqdm

    with logging_redirect_tqdm(), progress_bar() as report:
        yield report
