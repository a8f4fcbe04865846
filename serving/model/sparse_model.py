"""The rows of one embedding table in its model's files, in any format."""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.manifest import MANIFEST_NAME, read_manifest, sha256_of, status_of
from serving.model.sparse_rows import (
    Keys,
    KeyType,
    StoredKeys,
    Vectors,
    fault_of_values,
    refuse_repeated_keys,
    repeated_keys,
)

_log = logging.getLogger(__name__)


class SparseModel:
    """The rows of one table, read on demand. May be used from any thread.

    The files must not change while the model is open.

    Attributes:
        path: the directory or single file.
        dim: D.
        rows: V, including the rows of a single file that repeat a key.
        slot_ids: uint64[V], a view of the stored column; None if the files have none.
    """

    def __init__(
        self,
        path: Path,
        form: str,
        key_type: KeyType,
        keys: StoredKeys,
        vectors: Vectors,
        content: tuple[Path, ...],
        slot_ids: NDArray[np.uint64] | None = None,
    ) -> None:
        """Take views of the stored columns, and the files with keys and vectors. ``form`` names the format."""
        self.path = path
        self.dim = vectors.shape[1]
        self.rows = keys.size
        self.slot_ids = slot_ids
        self._form = form
        self._key_type: KeyType = key_type
        self._keys = keys
        self._vectors = vectors
        self._content = content
        self._statuses = self._statuses_now()

    def batches(self, batch_rows: int, *, warns: bool = True) -> Iterator[tuple[Keys, Vectors]]:
        """Yield int64[n] and float32[n, D] in file order, with n at most ``batch_rows``, as new arrays.

        All keys are checked before the first batch, which takes 8 bytes of memory per row. Vectors are read with their
        batch. With ``warns``, a batch with a NaN or infinite value is logged.

        Raises:
            ModelFileError: a key is reserved, not a uint32 of a uint32 model, or repeated in a directory; or a file has
                changed since the model was opened, which is checked after the last batch.
            ValueError: ``batch_rows`` is less than 1.
        """
        if batch_rows < 1:
            raise ValueError(f"expected at least 1 row per batch, got {batch_rows}")
        if self.path.is_dir():
            refuse_repeated_keys(self.path / "key", self._keys, self._key_type)
            return self._unchanged(self._read(batch_rows, warns))
        repeated = repeated_keys(self.path, self._keys, self._key_type)
        rows = self._unchanged(self._read(batch_rows, warns))
        return _first_of_each(rows, repeated) if repeated.size else rows

    def key_batches(self, batch_rows: int) -> Iterator[Keys]:
        """Yield the unchecked keys in file order: int64[n], with n at most ``batch_rows``."""
        for begin in range(0, self.rows, batch_rows):
            yield self._part_of_keys(begin, min(begin + batch_rows, self.rows))

    def _part_of_keys(self, begin: int, end: int) -> Keys:
        return np.array(self._keys[begin:end], dtype=np.int64)

    def _part(self, begin: int, end: int) -> tuple[Keys, Vectors]:
        return self._part_of_keys(begin, end), np.array(self._vectors[begin:end], dtype=np.float32)

    def _read(self, batch_rows: int, warns: bool) -> Iterator[tuple[Keys, Vectors]]:
        for begin in range(0, self.rows, batch_rows):
            keys, vectors = self._part(begin, min(begin + batch_rows, self.rows))
            if warns and (fault := fault_of_values(keys, vectors)):
                _log.warning("%s: %s", self.path, fault)
            yield keys, vectors

    def _unchanged(self, batches: Iterator[tuple[Keys, Vectors]]) -> Iterator[tuple[Keys, Vectors]]:
        yield from batches
        if self._statuses_now() != self._statuses:
            raise ModelFileError(self.path, "a file was changed while the model was read")

    def _statuses_now(self) -> list[tuple[object, ...]]:
        return [status_of(path) for path in (*self._content, self.path.parent / MANIFEST_NAME)]

    def digest(self) -> str:
        """Return a SHA-256 of the content: equal for equal rows in equal order of the same format.

        The manifest next to the model has it. Without a manifest every byte is hashed.
        """
        identity = [self._form, self._key_type, self.dim, *(self._hash(path) for path in self._content)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def stamp(self) -> str:
        """Return a SHA-256 like ``digest`` without reading content. Equal stamps mean equal content.

        Equal content may have different stamps. Without a manifest, a file's path, size, inode and time stand for its
        content.
        """
        identity = [self._form, self._key_type, self.dim, *(self._stamp(path) for path in self._content)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _stamp(self, path: Path) -> str | list[str | int]:
        try:
            found = path.stat()
        except OSError as err:
            raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
        recorded = self._recorded(path, found.st_size)
        return recorded or [str(path.resolve()), found.st_size, found.st_ino, found.st_mtime_ns]

    def _hash(self, path: Path) -> str:
        return self._recorded(path, path.stat().st_size) or sha256_of(path)

    def _recorded(self, path: Path, size_bytes: int) -> str | None:
        """Return the SHA-256 of a file of this size in the manifest next to the model, or None."""
        folder = self.path.parent
        try:
            record = read_manifest(folder).files[path.relative_to(folder).as_posix()]
        except (ModelFileError, KeyError):
            return None
        return record.sha256 if record.size_bytes == size_bytes else None


def _first_of_each(batches: Iterator[tuple[Keys, Vectors]], repeated: Keys) -> Iterator[tuple[Keys, Vectors]]:
    """Drop every row whose key came before. Only keys in ``repeated`` come twice."""
    seen: set[int] = set()
    for keys, vectors in batches:
        keep = np.ones(keys.size, dtype=bool)
        for row in np.flatnonzero(np.isin(keys, repeated)):
            keep[row] = int(keys[row]) not in seen
            seen.add(int(keys[row]))
        if keep.any():
            yield keys[keep], vectors[keep]
