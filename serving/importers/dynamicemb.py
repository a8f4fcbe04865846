"""Dumps of DynamicEmb, the dynamic embedding tables of NVIDIA's recsys-examples.

``DynamicEmbDump(path, model)`` makes a folder per embedding collection, named by the collection's place in the model.
Each folder has these files for each table and each rank r of w:

    <table>_emb_keys.rank_<r>.world_size_<w>      int64[n]
    <table>_emb_values.rank_<r>.world_size_<w>    float32[n, D]
    <table>_emb_scores..., <table>_opt_values..., <table>_opt_args.json    not needed for predictions

The files are bare numbers in the machine's byte order, which is little-endian wherever CUDA runs. Every key is on one
rank.

Source: ``encode_key_file_path`` and ``local_export`` in corelib/dynamicemb/dynamicemb/dump_load.py of
https://github.com/NVIDIA/recsys-examples
"""

import re
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from serving.errors import ModelFileError
from serving.importers.numpy_files import bare_numbers
from serving.importers.rows import TableRows
from serving.model.sparse_rows import Keys, Vectors

_KEY_FILE = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<size>\d+)")
_MOST_RANKS_SHOWN = 5


class DynamicEmbDump:
    """The tables of a dump. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """List the tables in a dump's folder or in one collection's folder. There may be none."""
        self.path = path
        self._files: dict[str, list[tuple[int, int, Path]]] = {}  # by table: (rank, world size, key file)
        for file in sorted([*path.glob("*_emb_keys.rank_*"), *path.glob("*/*_emb_keys.rank_*")]):
            match = _KEY_FILE.fullmatch(file.name)
            if match:
                table = (file.parent.relative_to(path) / match["table"]).as_posix()
                self._files.setdefault(table, []).append((int(match["rank"]), int(match["size"]), file))

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return list(self._files)

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``. Every name is a table."""
        return self.names()

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        source = f"{self.path}#{name}"
        parts = [part for file in self._rank_files(source, name) if (part := _open_part(file))[0].size]
        if not parts:
            raise ModelFileError(source, "expected at least one row, found none on any rank")
        dims = {vectors.shape[1] for _, vectors in parts}
        if len(dims) > 1:
            raise ModelFileError(source, f"expected vectors of one dimension on all ranks, found {sorted(dims)}")
        keys = np.concatenate([keys for keys, _ in parts])
        ends = np.cumsum([0, *(part.size for part, _ in parts)]).tolist()

        def read(begin: int, end: int) -> Vectors:
            pieces = [
                vectors[max(begin - first, 0) : max(end - first, 0)]
                for (_, vectors), (first, last) in zip(parts, pairwise(ends), strict=True)
                if first < end and begin < last
            ]
            return np.concatenate(pieces, dtype=np.float32)

        return TableRows(source, keys.size, dims.pop(), keys, read)

    def _rank_files(self, source: str, name: str) -> list[Path]:
        """Return the key file of every rank, in order."""
        entries = self._files[name]
        sizes = sorted({size for _, size, _ in entries})
        if len(sizes) > 1:
            raise ModelFileError(source, f"expected the files of one dump, found world sizes {sizes}")
        there = sorted(rank for rank, _, _ in entries)
        # the world size is only a number in a file's name, so no list may become as long
        missing = list(islice((rank for rank in range(sizes[0]) if rank not in there), _MOST_RANKS_SHOWN))
        if missing or len(there) != sizes[0]:
            ranks = ", ".join(map(str, missing or there[:_MOST_RANKS_SHOWN]))
            reason = f"the files of rank {ranks} are missing" if missing else f"found those of rank {ranks}"
            raise ModelFileError(source, f"expected the files of {sizes[0]} ranks: {reason}")
        return [file for _, _, file in sorted(entries)]


def _open_part(key_file: Path) -> tuple[Keys, Vectors]:
    value_file = key_file.with_name(key_file.name.replace("_emb_keys.rank_", "_emb_values.rank_"))
    keys, numbers = bare_numbers(key_file, "<i8"), bare_numbers(value_file, "<f4")
    divides = bool(numbers.size) and numbers.size % keys.size == 0 if keys.size else not numbers.size
    if not divides:
        expected = f"float32[D] for each of {keys.size:,} keys in {key_file.name}"
        raise ModelFileError(value_file, f"expected {expected}, found {4 * numbers.size:,} bytes")
    return keys, numbers.reshape(keys.size, -1) if keys.size else numbers.reshape(0, 1)
