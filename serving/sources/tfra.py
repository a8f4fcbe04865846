"""Tables of TensorFlow Recommenders Addons (TFRA), as its ``FileSystemSaver`` writes them.

A table is in one shard or several, and a shard has two files of bare numbers:

    <table>_mht_<i>of<n>-keys      int64[V]
    <table>_mht_<i>of<n>-values    [V, D], float32, float16 or bfloat16: no file says which

i counts from 1. A ``/`` of the variable's name is ``_`` in the file's name. The optimizer's states are tables of their
own. Numbers are in the machine's byte order, which is little-endian. Tables whose keys are int32 or text are not read.

Source: ``SaveToFileSystemImpl`` in tensorflow_recommenders_addons/dynamic_embedding/core/kernels/cuckoo_hashtable_op.cc
and ``_make_name`` in .../python/ops/dynamic_embedding_variable.py of
https://github.com/tensorflow/recommenders-addons
"""

import re
from collections.abc import Sequence
from pathlib import Path

from serving.sources.checkpoint import check_parts, without_hidden
from serving.sources.numpy_files import bare_numbers, bare_rows
from serving.sources.rows import BareRows, bare_rows_of_parts

_KEYS, _VALUES = "-keys", "-values"
_SHARD = re.compile(r"(?P<table>.+)_mht_(?P<number>\d+)of(?P<count>\d+)-keys")


class TfraTables:
    """The tables of a folder. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """List the tables in a folder. There may be none."""
        self.path = path
        self._shards: dict[str, dict[int, tuple[int, Path]]] = {}  # by table and number: the count, and the key file
        for file in without_hidden(path, path.glob(f"*{_KEYS}")):
            if match := _SHARD.fullmatch(file.name):
                shards = self._shards.setdefault(match["table"], {})
                shards[int(match["number"])] = int(match["count"]), file

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return list(self._shards)

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``. Every name is a table."""
        return self.names()

    def rows(self, name: str) -> BareRows:
        """See ``Checkpoint.rows``."""
        source, shards = f"{self.path}#{name}", self._shards[name]
        check_parts(source, shards, max(count for count, _ in shards.values()), first=1)
        keys = {file: bare_numbers(file, "<i8") for _, (_, file) in sorted(shards.items())}
        parts = [
            (of_shard, bare_rows(file.with_name(file.name.removesuffix(_KEYS) + _VALUES), file, of_shard.size))
            for file, of_shard in keys.items()
            if of_shard.size
        ]
        return bare_rows_of_parts(source, parts)
