"""Folders of safetensors files, whose tensors may be in parts: checkpoints of RecIS and exports of TorchEasyRec.

Part i of n of a tensor has the name ``<tensor>/part_<i>_<n>``, in any file of the folder. A table has keys and vectors:

    <table>.id, <table>.embedding     RecIS: int64[V] and [V, D]; ``<table>.<state>`` is of its optimizer
    <table>.keys, <table>.values      TorchEasyRec's export for RTP: int64[V] and [V, D]

Every other matrix may be a table whose keys are the row numbers. Its parts are rows that follow each other.

Sources: ``SaveBundle::AddBlock`` in csrc/serialize/save_bundle.cc of https://github.com/alibaba/RecIS, and
``_get_rtp_embedding_tensor`` in tzrec/utils/export_util.py of https://github.com/alibaba/TorchEasyRec
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.errors import ModelFileError
from serving.sources.checkpoint import check_parts, matrices_of, without_hidden
from serving.sources.rows import TableRows, rows_of_parts
from serving.sources.safetensors_file import SafetensorsFile

_PART = re.compile(r"(?P<tensor>.+)/part_(?P<number>\d+)_(?P<count>\d+)")
_PAIRS = ((".id", ".embedding"), (".keys", ".values"))


class _Part(NamedTuple):
    """A tensor in a file, which is one of ``parts`` parts."""

    file: SafetensorsFile
    name: str
    parts: int


class SafetensorsFolder:
    """The tensors of a folder. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """Read the headers of all files. There may be none. Raise ModelFileError if a file is damaged."""
        self.path = path
        self._parts: dict[str, dict[int, _Part]] = {}
        for file in map(SafetensorsFile, without_hidden(path, path.glob("*.safetensors"))):
            for name in file.names():
                match = _PART.fullmatch(name)
                tensor, number, count = match.group("tensor", "number", "count") if match else (name, "0", "1")
                parts = self._parts.setdefault(tensor, {})
                if int(number) in parts:
                    reason = f"expected each tensor once, found it in {parts[int(number)].file.path} too"
                    raise ModelFileError(f"{file.path}#{name}", reason)
                parts[int(number)] = _Part(file, name, int(count))
        self._keyed = {
            keys.removesuffix(of_keys): (keys, keys.removesuffix(of_keys) + of_vectors)
            for of_keys, of_vectors in _PAIRS
            for keys in self._parts
            if keys.endswith(of_keys) and keys.removesuffix(of_keys) + of_vectors in self._parts
        }
        self._matrices = [name for name in self._parts if name.rpartition(".")[0] not in self._keyed]

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return [*self._keyed, *self._matrices]

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``."""
        shapes = {
            name: part.file.shape(part.name) for name in self._matrices for part in list(self._parts[name].values())[:1]
        }
        return [*self._keyed, *matrices_of(shapes)]

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        source = f"{self.path}#{name}"
        if name not in self._keyed:
            [parts] = self._in_order(name)
            return rows_of_parts(source, [part.file.matrix(part.name) for part in parts], None)
        of_keys, of_vectors = self._in_order(*self._keyed[name])
        keys = [part.file.keys(part.name) for part in of_keys]
        vectors = [part.file.matrix(part.name) for part, own in zip(of_vectors, keys, strict=True) if own.size]
        return rows_of_parts(source, vectors, np.concatenate(keys))

    def _in_order(self, *tensors: str) -> list[list[_Part]]:
        """Return the parts of tensors that belong together. Raise ModelFileError if one is missing."""
        count = max(part.parts for tensor in tensors for part in self._parts[tensor].values())
        for tensor in tensors:
            check_parts(f"{self.path}#{tensor}", self._parts[tensor], count)
        return [[self._parts[tensor][number] for number in range(count)] for tensor in tensors]
