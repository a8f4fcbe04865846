"""Dumps of DynamicEmb, the dynamic embedding tables of NVIDIA's recsys-examples.

``DynamicEmbDump(path, model)`` makes a folder per embedding collection, named by the collection's place in the model.
Each folder has these files for each table and each rank r of w:

    <table>_emb_keys.rank_<r>.world_size_<w>      int64[n]
    <table>_emb_values.rank_<r>.world_size_<w>    [n, D], float32, float16 or bfloat16: no file says which
    <table>_emb_scores..., <table>_opt_values..., <table>_opt_args.json    not needed for predictions

The files are bare numbers in the machine's byte order, which is little-endian wherever CUDA runs. Every key is on one
rank.

Source: ``encode_key_file_path`` and ``local_export`` in corelib/dynamicemb/dynamicemb/dump_load.py of
https://github.com/NVIDIA/recsys-examples
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.sparse_rows import Keys
from serving.sources.checkpoint import without_hidden
from serving.sources.numpy_files import bare_numbers, bare_rows
from serving.sources.rows import BareRows, bare_rows_of_parts

_KEY_FILE = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<size>\d+)")
_MOST_RANKS_SHOWN = 5


class DynamicEmbDump:
    """The tables of a dump. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """List the tables in a dump's folder or in one collection's folder. There may be none."""
        self.path = path
        self._files: dict[str, list[tuple[int, int, Path]]] = {}  # by table: (rank, world size, key file)
        for file in without_hidden(path, [*path.glob("*_emb_keys.rank_*"), *path.glob("*/*_emb_keys.rank_*")]):
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

    def rows(self, name: str) -> BareRows:
        """See ``Checkpoint.rows``."""
        source = f"{self.path}#{name}"
        parts = [part for file in self._rank_files(source, name) if (part := _open_part(file)) is not None]
        return bare_rows_of_parts(source, parts)

    def _rank_files(self, source: str, name: str) -> list[Path]:
        """Return the key file of every rank, in order."""
        entries = self._files[name]
        sizes = sorted({size for _, size, _ in entries})
        if len(sizes) > 1:
            raise ModelFileError(source, f"expected the files of one dump, found world sizes {sizes}")
        found = sorted(rank for rank, _, _ in entries)
        # the world size is only a number in a file's name, so no list may become as long
        missing = list(islice((rank for rank in range(sizes[0]) if rank not in found), _MOST_RANKS_SHOWN))
        if missing or len(found) != sizes[0]:
            ranks = ", ".join(map(str, missing or found[:_MOST_RANKS_SHOWN]))
            reason = f"the files of rank {ranks} are missing" if missing else f"found those of rank {ranks}"
            raise ModelFileError(source, f"expected the files of {sizes[0]} ranks: {reason}")
        return [file for _, _, file in sorted(entries)]


def _open_part(key_file: Path) -> tuple[Keys, NDArray[np.uint8]] | None:
    """Return the keys and vectors of one rank, or None if it has none."""
    value_file = key_file.with_name(key_file.name.replace("_emb_keys.rank_", "_emb_values.rank_"))
    keys = bare_numbers(key_file, "<i8")
    if keys.size:
        return keys, bare_rows(value_file, key_file, keys.size)
    stored = bare_numbers(value_file, "u1")
    if stored.size:
        raise ModelFileError(
            value_file, f"expected no vector, as {key_file.name} has no key, found {stored.size:,} bytes"
        )
    return None
