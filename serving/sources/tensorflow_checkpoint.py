"""Checkpoints of TensorFlow and the variables of SavedModels: matrices, and hash tables with keys.

A table is one of these, by the name of the variable:

    <table>                            [V, D]; the keys are the row numbers
    <table>/embeddings                 the same: the variable of the layer ``<table>`` of Keras
    <table>-keys, <table>-values       int64[V] and [V, D]: a hash table of TensorFlow or TFRA, or an embedding variable
                                       of DeepRec
    <table>/part_<i>-keys, ...         part i of an embedding variable

Matrices that are kernels of layers or states of optimizers are no tables. Checkpoints of objects have the names of
their attributes, such as ``model/_operations/2/_embeddings``, and the names of variables in a TrackableObjectGraph.

Sources: tensorflow/core/protobuf/trackable_object_graph.proto of https://github.com/tensorflow/tensorflow, and
docs/Embedding-Variable-Export-Format.md of https://github.com/DeepRec-AI/DeepRec
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.regular_file import open_regular
from serving.sources.checkpoint import check_parts
from serving.sources.rows import TableRows, as_int64, check_matrix, rows_of_parts
from serving.sources.tensorflow_bundle import INDEX, TensorFlowBundle, name_of_slice, read_message

_GRAPH: Final = b"_CHECKPOINTABLE_OBJECT_GRAPH"
_SLICE: Final = b"\x00"  # the first byte of a slice's name
_FLOATS = ("float32", "float16", "bfloat16")
_KEYS, _VALUES = b"-keys", b"-values"
_ATTRIBUTE = re.compile(r"/\.ATTRIBUTES/[^/]*$")
_EMBEDDINGS = re.compile(r"/_?embeddings$")
_NO_TABLE = re.compile(r"(^|/)(_?kernel$|_?optimizer/|\.OPTIMIZER_SLOT/)")
_PART = re.compile(r"(?P<table>.+)/part_(?P<number>\d+)")
_LATEST = re.compile(rb'^model_checkpoint_path: "(.+)"$', re.MULTILINE)


def checkpoint_at(path: Path) -> Path | None:
    """Return the prefix of a checkpoint's files, or None if there is none.

    Args:
        path: the prefix, an index, a folder of checkpoints, the latest of which counts, or a SavedModel.
    """
    if path.suffix == INDEX:
        return path.with_suffix("")
    saved = path / "variables" / "variables"
    if saved.with_suffix(INDEX).exists():
        return saved
    if (path / "checkpoint").is_file():
        with open_regular(path / "checkpoint") as file:
            latest = _LATEST.search(file.read())
        return path / latest[1].decode(errors="replace") if latest else None
    return path if not path.exists() and path.with_name(path.name + INDEX).exists() else None


class TensorFlowCheckpoint:
    """The variables of a checkpoint. See ``Checkpoint``."""

    def __init__(self, path: Path, prefix: Path) -> None:
        """Read the index. Raise ModelFileError if it cannot be read or is damaged.

        Args:
            path: what the user gave, for messages.
            prefix: where the files are; see ``checkpoint_at``.
        """
        self.path = path
        self._bundle = TensorFlowBundle(prefix)
        entries = self._bundle.entries
        hashed = [key.removesuffix(_KEYS) for key in entries if key.endswith(_KEYS)]
        hashed = [key for key in hashed if key + _VALUES in entries]
        self._hashed: dict[str, dict[int, bytes]] = {}
        for key in hashed:
            if key.rpartition(b"/")[0] in hashed:  # a state of an optimizer
                continue
            name = _place(key)
            match = _PART.fullmatch(name)
            table, number = (match["table"], int(match["number"])) if match else (name, 0)
            self._hashed.setdefault(table, {})[number] = key
        of_hashed = {key + suffix for key in hashed for suffix in (_KEYS, _VALUES)}
        others = [key for key in entries if not key.startswith(_SLICE) and key not in {_GRAPH, *of_hashed}]
        self._places = {_place(key): key for key in others}
        self._variables = self._by_name()

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return list(dict.fromkeys([*self._hashed, *self._variables, *self._places]))

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``."""
        matrices = [name for name, key in self._variables.items() if self._may_be_table(name, key)]
        return [*self._hashed, *(name for name in matrices if name.rpartition("/")[0] not in matrices)]

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        source = f"{self.path}#{name}"
        if name not in self._hashed:
            key = self._variables[name] if name in self._variables else self._places[name]
            return rows_of_parts(source, list(self._matrices(source, key)), None)
        parts = self._hashed[name]
        check_parts(source, parts, len(parts))
        in_order = [parts[number] for number in range(len(parts))]
        keys = [as_int64(source, self._bundle.tensor(key + _KEYS)) for key in in_order]
        vectors = [
            matrix
            for key, own in zip(in_order, keys, strict=True)
            if own.size
            for matrix in self._matrices(source, key + _VALUES)
        ]
        return rows_of_parts(source, vectors, np.concatenate(keys))

    def _by_name(self) -> dict[str, bytes]:
        """Return the variables by their names, or by their places if several with one name differ."""
        named, by_name = self._names_in_graph(), dict[str, dict[Any, bytes]]()
        for place, key in self._places.items():
            entry = self._bundle.entries[key]
            content = entry.dtype, entry.shape, entry.crc32c  # a SavedModel may have a variable twice
            by_name.setdefault(_short(named.get(key) or place), {}).setdefault(content, key)
        return {
            name if len(own) == 1 else _short(_place(key)): key for name, own in by_name.items() for key in own.values()
        }

    def _names_in_graph(self) -> dict[bytes, str]:
        """Return the names of variables by the names of their entries."""
        if _GRAPH not in self._bundle.entries:
            return {}
        try:
            nodes = [read_message(node) for node in read_message(self._bundle.text(_GRAPH)).get(1, [])]
            attributes = [read_message(attribute) for node in nodes for attribute in node.get(2, [])]
            return {
                attribute[3][-1]: attribute[2][-1].decode()
                for attribute in attributes
                if 2 in attribute and 3 in attribute
            }
        except (LookupError, TypeError, ValueError) as err:
            raise ModelFileError(self._bundle.source(_GRAPH), "is damaged: expected a TrackableObjectGraph") from err

    def _may_be_table(self, name: str, key: bytes) -> bool:
        entry = self._bundle.entries[key]
        is_other = _NO_TABLE.search(name) or _NO_TABLE.search(_place(key))
        return len(entry.shape) == 2 and entry.type_name in _FLOATS and not is_other

    def _matrices(self, source: str, key: bytes) -> Iterator[NDArray[Any]]:
        """Yield a variable, or the slices of a partitioned variable in the order of their rows."""
        entry = self._bundle.entries[key]
        check_matrix(source, entry.type_name, entry.type_name in _FLOATS, entry.shape)
        if not entry.slices:
            yield self._bundle.tensor(key)
            return
        (rows, dim), end = entry.shape, 0
        for extents in sorted(entry.slices):
            part = name_of_slice(key, extents)
            matrix = self._bundle.tensor(part) if part in self._bundle.entries else None
            begin = extents[0][0] if extents else -1
            if matrix is None or begin != end or matrix.shape != (len(matrix), dim):
                reason = (
                    f"expected partitions whose rows follow each other from 0 to {rows:,}, found a gap at row {end:,}"
                )
                raise ModelFileError(source, reason)
            yield matrix
            end += len(matrix)
        if end != rows:
            raise ModelFileError(source, f"expected partitions with {rows:,} rows, found {end:,}")


def _place(key: bytes) -> str:
    """Return the name of an entry without what checkpoints of objects add to it."""
    return _ATTRIBUTE.sub("", key.decode(errors="replace"))


def _short(name: str) -> str:
    """Return the name of a table: that of its layer, if it is a layer's variable."""
    return _EMBEDDINGS.sub("", name)
