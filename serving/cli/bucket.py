"""``hotrow serve s3://bucket/models``: the server serves a local copy, which its first process keeps up to date."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.background import PeriodicWorker
from serving.cli.threads import in_thread
from serving.errors import ServingError, told
from serving.frontend.worker_place import WorkerPlace

_log = logging.getLogger("hotrow.repository")


def repository_place(text: str) -> str | Path:
    """Return the URL of a bucket as it is, and everything else as a path; no text at all is an error."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return text if "://" in text else Path(text)


@contextmanager
def local_repository(options: argparse.Namespace, place: WorkerPlace | None) -> Iterator[None]:
    """Have ``options`` name the local copy of a bucket, which is up to date before the block runs.

    If the server follows its repository, the copy follows the bucket while the block runs. A worker does not copy: the
    process that started it does.

    Raises:
        ServingError: the bucket cannot be copied, and there is no earlier copy.
    """
    if isinstance(options.repository, Path):
        yield
        return
    url, options.repository = options.repository, options.copy_to
    if place is not None:
        yield
        return
    from serving.repository.remote import RemoteRepository, has_copies, pull  # slow to import

    remote = RemoteRepository(url)

    def copy() -> None:
        errors = pull(remote, options.copy_to, options.copy_max_bytes, lambda line: _log.info("%s", line))
        if errors:
            raise ServingError("; ".join(map(told, errors)))

    name = f"the copy of {remote.url}"
    try:
        in_thread(name, copy)
    except ServingError as err:
        if not has_copies(options.copy_to):
            raise
        _log.warning("%s failed: %s", name, err)
    if options.model_control_mode == "none":
        yield
        return
    copier = PeriodicWorker(name, copy, options.repository_poll_secs)
    try:
        yield
    finally:
        copier.close(timeout_s=0)  # a copy may take long, and its end leaves no half version
