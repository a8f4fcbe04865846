"""Answers logged requests with a version before it serves, so that its first clients find their rows in the caches."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from kernels.errors import HotrowError
from serving.errors import ConfigError, MissingExtraError
from serving.model.data_files import list_data_files
from serving.model.regular_file import check_regular
from serving.parameter_server.table_files import Progress
from serving.request_log import Rows, folders_of, parts_of, requests_of, rows_of, stream_batches
from serving.session import InferenceSession

_OPTION = "--warm-up-from"
#: A load waits no longer than this, and answers no more requests.
_MOST_S, _MOST_REQUESTS = 10.0, 10_000
_MOST_PROMOTION_S = 1.0
_PART_ROWS = 4096
_STREAM, _PARQUET = ".arrow", ".parquet"

logger = logging.getLogger("hotrow.repository")


def check_warm_up(log: Path) -> None:
    """Check that a request log can be read, before anything is loaded.

    Raises:
        ConfigError: there is no such folder.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import_module("pyarrow.parquet")
    except ImportError as err:
        raise MissingExtraError("pyarrow", "features", _OPTION) from err
    if not log.is_dir():
        raise ConfigError(_OPTION, "", f"{log}: no such folder")


def warm_up(session: InferenceSession, log: Path, progress: Progress | None = None) -> None:
    """Answer the newest requests of a log. What cannot be read or answered is left out, and logged once with its count.

    Args:
        session: of the version.
        log: the folder of the log, which has a folder for each model.
        progress: called before each request; it may raise an error to end the load.
    """
    config, began = session.config, time.monotonic()
    faults: list[str] = []
    answered = 0
    for source, answer in _requests(session, log, faults):
        done = answered + len(faults)
        if done >= _MOST_REQUESTS or time.monotonic() - began > _MOST_S:
            break
        if progress is not None:
            progress(f"requests to {config.name}", done, _MOST_REQUESTS)
        try:
            answer()
            answered += 1
        except HotrowError as err:
            faults.append(f"{source}: {err}")
    if session.features is not None:
        session.features.forget_counts()
    named = f"model {config.name}: version {config.version}"
    took_s = time.monotonic() - began
    logger.info("%s is warm after %s requests of %s in %.1f s", named, f"{answered:,}", log, took_s)
    if faults:
        logger.warning(
            "%s could not use %s requests or files of %s; the first: %s", named, f"{len(faults):,}", log, faults[0]
        )


def _requests(session: InferenceSession, log: Path, faults: list[str]) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield the file of each request and a function that answers it, the newest file first."""
    for file in _files(session, log):
        try:
            for table in _tables(file):
                rows = rows_of(session, table, str(file))
                for begin, end in pairwise(requests_of(table).tolist()):
                    yield file, partial(_answer, session, rows, begin, end)
        except FileNotFoundError:  # the server has converted or deleted it
            pass
        except (import_module("pyarrow").ArrowException, OSError, HotrowError) as err:
            faults.append(f"{file}: {err}")


def _answer(session: InferenceSession, rows: Rows, begin: int, end: int) -> None:
    """Answer a request, and wait until its rows are promoted: promotions that come faster than that are dropped."""
    for first, samples in parts_of(session, begin, end):
        session.predict_batch(rows.reader(first, samples, wanted=())())  # nobody reads its outputs
        session.embedding_cache.server.wait_for_promotions(_MOST_PROMOTION_S)


def _files(session: InferenceSession, log: Path) -> Sequence[Path]:
    files: list[Path] = []
    for folder in folders_of(session, log):
        with suppress(OSError):
            files += list_data_files(folder, (_PARQUET, _STREAM)).files
    return sorted(files, key=lambda file: file.name, reverse=True)


def _tables(file: Path) -> Iterator[Any]:
    """Yield the rows of a file. A request may be in two tables, because its rows are in the caches either way."""
    pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    if file.suffix == _STREAM:
        batches = stream_batches(file)
    else:
        check_regular(file)
        batches = parquet.ParquetFile(file, pre_buffer=False).iter_batches(batch_size=_PART_ROWS)
    for batch in batches:
        if batch.num_rows:
            yield pa.Table.from_batches([batch])
