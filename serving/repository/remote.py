"""Copies a remote model repository into a local folder, with the same rules for complete versions.

A version is copied if it has a manifest. The manifest is read first and last: if it has changed meanwhile, somebody is
replacing the version, and the next copy takes it. A version appears in the folder complete, or it does not appear.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from serving.errors import MissingExtraError, ModelFileError, OutputError, RequestError, ServingError, printable
from serving.model.atomic import atomic_directory, atomic_write
from serving.model.manifest import MANIFEST_NAME, read_manifest, verify_manifest
from serving.model.names import MODEL_NAME

#: Says which versions of a folder are copies, and may be removed with their originals.
COPIES = ".hotrow-pull.json"
_CONFIG = "config.pbtxt"
_MOST_SMALL_BYTES = 16 << 20  # of a manifest or a configuration
_PART_BYTES = 1 << 20
_SPARE_BYTES = 256 << 20  # of the disk, left for everything else
#: The extra by the protocol of a URL.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}

Report = Callable[[str], None]


class RemoteError(ServingError):
    """A remote repository does not answer, or does not have what it should have."""


class RemoteRepository:
    """A model repository at a URL that fsspec reads, such as ``s3://bucket/models``.

    Attributes:
        url: its URL.
    """

    def __init__(self, url: str) -> None:
        """Open it; credentials come from the environment only.

        Raises:
            RequestError: it is not a URL, or it has credentials.
            MissingExtraError: the package for its protocol is not installed.
        """
        protocol, _, rest = url.partition("://")
        if not protocol or not rest.strip("/"):
            raise RequestError(f"expected a URL such as s3://bucket/models, got {url[:128]!r}")
        if "@" in rest.partition("/")[0]:
            raise RequestError("the URL has a user or a password; credentials come from the environment")
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            with self._answering(""):
                self._files, self._root = url_to_fs(self.url)
        except ImportError as err:
            raise MissingExtraError(err.name or "fsspec", _EXTRAS.get(protocol, "s3"), self.url) from err

    def versions(self) -> dict[str, list[int]]:
        """The versions that have a manifest, by model.

        Raises:
            RemoteError: the repository does not answer.
        """
        with self._answering(""):
            self._files.invalidate_cache()
            found = self._files.glob(f"{self._root}/*/*/{MANIFEST_NAME}")
        versions: dict[str, list[int]] = {}
        for path in sorted(found):
            *_, model, number, _ = PurePosixPath(path).parts
            if MODEL_NAME.fullmatch(model) and number.isascii() and number.isdigit() and number == str(int(number)):
                versions.setdefault(model, []).append(int(number))
        return versions

    def read(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist.

        Raises:
            RemoteError: the repository does not answer, or the file is too large.
        """
        with self._answering(name):
            try:
                with self._files.open(f"{self._root}/{name}", "rb") as file:
                    content: bytes = file.read(_MOST_SMALL_BYTES + 1)
            except FileNotFoundError:
                return None
        if len(content) > _MOST_SMALL_BYTES:
            raise RemoteError(f"{self.url}/{name}: more than {_MOST_SMALL_BYTES:,} bytes")
        return content

    def copy(self, name: str, path: Path, size_bytes: int) -> None:
        """Copy a file of this size.

        Raises:
            RemoteError: the repository does not answer, or the file is longer.
            OutputError: the disk is full.
        """
        with self._answering(name):
            source = self._files.open(f"{self._root}/{name}", "rb")
        with source, path.open("wb") as target:
            left_bytes = size_bytes
            while True:
                with self._answering(name):
                    part = source.read(_PART_BYTES)
                if not part:
                    return
                left_bytes -= len(part)
                if left_bytes < 0:
                    raise RemoteError(f"{self.url}/{name}: more than the {size_bytes:,} bytes of the manifest")
                try:
                    target.write(part)
                except OSError as err:
                    raise OutputError(f"{path}: cannot be written: {err.strerror}") from err

    @contextmanager
    def _answering(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ImportError, FileNotFoundError, ServingError):
            raise
        except Exception as err:  # each protocol has errors of its own
            place = f"{self.url}/{name}" if name else self.url
            raise RemoteError(f"{place}: cannot be read: {type(err).__name__}: {printable(str(err)[:300])}") from err


def pull(remote: RemoteRepository, folder: Path, max_bytes: int | None, report: Report) -> list[ServingError]:
    """Copy what is new in ``remote`` into ``folder``, and remove copies whose originals are gone.

    Args:
        remote: the repository.
        folder: the local repository. Versions that are no copies stay.
        max_bytes: of all copies together; None: as much as the disk has.
        report: gets a line for each change.

    Returns:
        why versions could not be copied; their earlier copies stay.

    Raises:
        RemoteError: the repository does not answer, or has no version.
        OutputError: another process copies into the folder, or it cannot be written.
    """
    with _locked(folder):
        wanted = remote.versions()
        if not wanted:
            raise RemoteError(f"{remote.url}: no version with a {MANIFEST_NAME}")
        copies, errors = _read_copies(folder), list[ServingError]()
        for model, numbers in wanted.items():
            for number in numbers:
                try:
                    _pull_version(remote, folder, f"{model}/{number}", copies, max_bytes, report)
                except (RemoteError, ModelFileError, OutputError) as err:
                    errors.append(err)
            if any(name.startswith(f"{model}/") for name in copies):
                _pull_config(remote, folder, model)
        for name in [name for name in copies if int(name.split("/")[1]) not in wanted.get(name.split("/")[0], ())]:
            shutil.rmtree(folder / name, ignore_errors=True)
            del copies[name]
            _write_copies(folder, copies)
            report(f"{name}: removed, because {remote.url} has it no more")
        return errors


def has_copies(folder: Path) -> bool:
    """Return whether ``folder`` has a copy of any version.

    Raises:
        OutputError: its record of copies is broken.
    """
    return bool(_read_copies(folder))


def _pull_version(
    remote: RemoteRepository, folder: Path, name: str, copies: dict[str, int], max_bytes: int | None, report: Report
) -> None:
    content = remote.read(f"{name}/{MANIFEST_NAME}")
    target = folder / name
    local = target / MANIFEST_NAME
    if content is None or (local.is_file() and local.read_bytes() == content):
        return
    if target.exists() and name not in copies:
        raise OutputError(f"{target}: is no copy of {remote.url}/{name}, so it stays")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(target) as unfinished:
        (unfinished / MANIFEST_NAME).write_bytes(content)
        files = read_manifest(unfinished).files
        size_bytes = sum(record.size_bytes for record in files.values())
        _check_room(folder, name, size_bytes, copies, max_bytes)
        for file, record in files.items():
            path = PurePosixPath(file)
            if path.is_absolute() or ".." in path.parts:
                raise ModelFileError(
                    f"{remote.url}/{name}/{MANIFEST_NAME}", f"{file[:128]!r} is outside of the version"
                )
            (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                remote.copy(f"{name}/{file}", unfinished / path, record.size_bytes)
            except FileNotFoundError as err:
                raise RemoteError(f"{remote.url}/{name}/{file}: named by the manifest, but missing") from err
        verify_manifest(unfinished)
        if remote.read(f"{name}/{MANIFEST_NAME}") != content:
            raise RemoteError(f"{remote.url}/{name}: its manifest has changed during the copy")
        copies[name] = size_bytes
        _write_copies(folder, copies)  # before it appears, so that no copy is taken for a version of somebody else
    report(f"{name}: copied, {size_bytes / 2**20:,.1f} MiB")


def _check_room(folder: Path, name: str, size_bytes: int, copies: Mapping[str, int], max_bytes: int | None) -> None:
    free_bytes = shutil.disk_usage(folder).free - _SPARE_BYTES
    if size_bytes > free_bytes:
        raise OutputError(f"{folder}: {name} needs {size_bytes:,} bytes, and {max(free_bytes, 0):,} are free")
    together_bytes = sum(copies.values()) - copies.get(name, 0) + size_bytes
    if max_bytes is not None and together_bytes > max_bytes:
        raise OutputError(f"{folder}: with {name}, the copies would take {together_bytes:,} bytes of {max_bytes:,}")


def _pull_config(remote: RemoteRepository, folder: Path, model: str) -> None:
    content, local = remote.read(f"{model}/{_CONFIG}"), folder / model / _CONFIG
    if content is not None and not (local.is_file() and local.read_bytes() == content):
        with atomic_write(local) as file:
            file.write(content)


def _read_copies(folder: Path) -> dict[str, int]:
    try:
        found: Any = json.loads((folder / COPIES).read_bytes())
        return {str(name): int(size_bytes) for name, size_bytes in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as err:
        raise OutputError(f"{folder / COPIES}: expected the sizes of copies: {err}") from err


def _write_copies(folder: Path, copies: Mapping[str, int]) -> None:
    with atomic_write(folder / COPIES) as file:
        file.write(json.dumps(copies, indent=1, sort_keys=True).encode())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from copying into ``folder``, which is made if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{COPIES}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise OutputError(f"{folder}: cannot be written: {err.strerror}") from err
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as err:
        raise OutputError(f"{folder}: another process copies into it") from err
    finally:
        os.close(descriptor)
