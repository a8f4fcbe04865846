"""The logs of a RocksDB database, which have the newest rows: what RocksDB does not say of them itself.

A log that was damaged or lost looks, at the end, like one whose last write was cut short. RocksDB is asked to accept no
more than that (``tolerate_corrupted_tail_records``). It names no file then, and takes a log that is gone for one that
was not needed any more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.errors import StoreError

_CORRUPTION = "Corruption: "


def check_logs(store: str, path: Path) -> None:
    """Check that the database at ``path``, if there is one with files of rows, has a log, as every database does.

    Raises:
        StoreError: it has none.
        OSError: the folder cannot be read.
    """
    if next(path.glob("*.sst"), None) is not None and next(path.glob("*.log"), None) is None:
        reason = (
            f"{path}: no log (*.log) of the newest rows beside files of rows; restore a checkpoint, or, if it is known "
            "to have had none, give it an empty one (touch 000000.log)"
        )
        raise StoreError(store, "", reason)


@contextmanager
def damaged_logs_named(store: str, path: Path) -> Iterator[None]:
    """Name the logs of the database at ``path`` where an opening in this block fails for one of them.

    rocksdict raises plain ``Exception``; of other files RocksDB tells the path.

    Raises:
        StoreError: a log is damaged before its end.
    """
    try:
        yield
    except Exception as err:
        reason = str(err)
        if not reason.startswith(_CORRUPTION) or "/" in reason:
            raise
        logs = " or ".join(str(log) for log in sorted(path.glob("*.log")) if log.stat().st_size) or str(path)
        fault = reason.removeprefix(_CORRUPTION)
        advice = "restore a checkpoint, load the models into a new database, or, after a power cut, recover_database"
        raise StoreError(store, "", f"{logs}: {fault}, in the newest rows; {advice}") from err
