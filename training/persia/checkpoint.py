"""Checkpoints of all roles, and the tables that a served model reads from a checkpoint.

A checkpoint is a folder ``batch-<n>``, which is complete or absent. It holds the state after n batches:

- ``checkpoint.json``: n, the features, the optimizer and its steps;
- ``dense.pt``: what the NN worker gave ``TrainCtx.dump_checkpoint``;
- ``server-<n>/dim-<D>/``: the rows of a server's table, in ``keys.npy``, ``parts.npy`` and ``last_steps.npy``. The
  least recently used row comes first. A row of ``parts.npy`` is the vector and then the states.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import TrainingTable
from serving.errors import ConfigError, ModelFileError, OutputError
from serving.model.atomic import atomic_directory
from serving.model.names import TABLE_NAME
from serving.model.numpy_faults import NPY, UNREADABLE, unreadable
from serving.model.sparse_writer import write_table_folders
from serving.model.strict_json import Fields, read_json
from training.persia.config import EmbeddingConfig, Feature
from training.persia.signs import prefixed_signs, servers_of

_FILE = "checkpoint.json"
_PART_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Rows:
    """V rows of one table.

    Attributes:
        keys: int64[V].
        vectors: float32[V, D].
        states: float32[V, S], the states of the optimizer.
        last_steps: int64[V], the step of each row's last update.
    """

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]
    states: NDArray[np.float32]
    last_steps: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What ``checkpoint.json`` says.

    Attributes:
        batches: how many were trained.
        step: of the optimizer.
        optimizer: its facts.
        config: the features.
    """

    batches: int
    step: int
    optimizer: dict[str, Any]
    config: EmbeddingConfig

    def write(self, folder: Path) -> None:
        """Write ``checkpoint.json``."""
        document = {
            "batches": self.batches,
            "step": self.step,
            "optimizer": self.optimizer,
            "features": [asdict(feature) for feature in self.config.features.values()],
        }
        (folder / _FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "CheckpointFacts":
        """Undo ``write``.

        Raises:
            ConfigError: there is no such file, or it is damaged.
        """
        source = str(folder / _FILE)
        document = Fields(read_json(source), source, "", ("batches", "step", "optimizer", "features"))
        features = [_read_feature(one) for one in document.objects("features")]
        config = EmbeddingConfig({feature.name: feature for feature in features})
        batches, step = (document.integer(name, minimum=0, maximum=2**62) for name in ("batches", "step"))
        optimizer = document.object("optimizer")
        for name in ("rule", "initial_states"):
            optimizer.value(name)
        return cls(batches, step, {name: optimizer.value(name) for name in optimizer}, config)


def _read_feature(members: Fields) -> Feature:
    members.allow(field.name for field in fields(Feature))
    read: dict[Any, Any] = {
        str: members.text,
        bool: members.boolean,
        int: lambda key: members.integer(key, minimum=0, maximum=2**64),
    }
    return Feature(**{field.name: read[field.type](field.name) for field in fields(Feature)})


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint with the most batches, or None."""
    return max(_all(Path(folder)), default=(0, None))[1]


@contextmanager
def new_checkpoint(folder: str | Path, batches: int) -> Iterator[Path]:
    """Make a checkpoint in the folder that this yields. Afterwards it is complete, and the earlier ones are deleted.

    Raises:
        OutputError: the disk refuses.
    """
    folder = Path(folder)
    with _writing(folder), atomic_directory(folder / f"batch-{batches}") as temporary:
        yield temporary
    for earlier, path in _all(folder):
        if earlier < batches:
            shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(folder: str | Path) -> None:
    """Make the folder of checkpoints, and remove what a killed run left in it.

    A run that was killed while it replaced a checkpoint may have left only the old checkpoint, under the temporary name
    of ``atomic_directory``. That checkpoint gets its name back.

    Raises:
        OutputError: the disk refuses.
    """
    folder = Path(folder)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(".batch-*.old")):
            replaced = folder / path.name.split(".")[1]
            if not replaced.exists():
                path.rename(replaced)
    for path in folder.glob(".batch-*"):
        shutil.rmtree(path, ignore_errors=True)


def _all(folder: Path) -> list[tuple[int, Path]]:
    paths = [path.parent for path in folder.glob(f"batch-*/{_FILE}")]
    batches = [(path.name.removeprefix("batch-"), path) for path in paths]
    return [(int(count), path) for count, path in batches if count.isdecimal()]


def write_rows(folder: str | Path, server: int, tables: dict[int, TrainingTable]) -> None:
    """Write the rows of a server.

    Raises:
        OutputError: the disk refuses.
    """
    for dim, table in tables.items():
        path, rows = Path(folder, f"server-{server}", f"dim-{dim}"), table.changed_rows()
        shapes = {
            "keys": ("<i8", ()),
            "parts": ("<f4", (dim + len(table.first_states),)),
            "last_steps": ("<i8", ()),
        }
        with _writing(path):
            path.mkdir(parents=True)
            files = [(path / f"{name}.npy").open("wb") for name in shapes]
            try:
                for file, (dtype, shape) in zip(files, shapes.values(), strict=True):
                    header = {"descr": dtype, "fortran_order": False, "shape": (len(rows), *shape)}
                    np.lib.format.write_array_header_1_0(file, header)
                for first in range(0, len(rows), _PART_ROWS):
                    keys, vectors, states, last_steps, _ = table.read(rows[first : first + _PART_ROWS])
                    parts = np.concatenate([vectors, states], axis=1)
                    for file, data in zip(files, (keys.data, parts.data, last_steps.data), strict=True):
                        file.write(data)
            finally:
                for file in files:
                    file.close()


def read_rows(
    folder: str | Path, server: int = 0, servers: int = 1, most: int = _PART_ROWS
) -> Iterator[tuple[int, Rows]]:
    """Yield rows with their D, a part at a time, of one of so many servers. A checkpoint may be of another number.

    Raises:
        ModelFileError: a file is missing or damaged.
    """
    size = min(most, _PART_ROWS)
    for path in sorted(Path(folder).glob("server-*/dim-*")):
        keys, parts, last_steps = (_array_in(path / f"{name}.npy") for name in ("keys", "parts", "last_steps"))
        dim = path.name.removeprefix("dim-")
        is_right = keys.dtype == last_steps.dtype == np.int64 and parts.dtype == np.float32 and parts.ndim in (2, 3)
        floats = math.prod(parts.shape[1:])  # [V, P, D] of earlier versions are as many floats in the same order
        if not is_right or floats < int(dim):
            found = f"{keys.dtype}, {last_steps.dtype} and {parts.dtype}{list(parts.shape)}"
            expected = f"int64 keys and steps and float32 rows of at least {dim} floats"
            raise ModelFileError(path, f"expected {expected}, found {found}")
        if not len(keys) == len(parts) == len(last_steps):
            counts = f"{len(keys)} keys, {len(parts)} rows and {len(last_steps)} steps"
            raise ModelFileError(path, f"expected as many rows and steps as keys, found {counts}")
        vectors, states = np.split(parts.reshape(len(parts), floats), [int(dim)], axis=1)
        for first in range(0, len(keys), size):
            some = slice(first, first + size)
            is_own = servers_of(np.array(keys[some]), servers) == server
            yield (
                int(dim),
                Rows(keys[some][is_own], vectors[some][is_own], states[some][is_own], last_steps[some][is_own]),
            )


def write_tables(checkpoint: str | Path, folder: str | Path) -> None:
    """Write the trained rows of each feature group, for ``hotrow import --checkpoint``.

    A key is the sign of a row without its prefix: a client sends what ``signs.request_keys`` returns.

    Args:
        checkpoint: a folder ``batch-<n>``.
        folder: has ``<folder>/<group>`` in HugeCTR's format. It is complete or absent, and replaces an earlier one.

    Raises:
        ConfigError: the checkpoint is missing, or a group cannot be the name of a table.
        ModelFileError: a file of the checkpoint is damaged.
        OutputError: ``folder`` has other files, or the disk refuses.
    """
    groups = CheckpointFacts.read(Path(checkpoint)).config.groups
    for group in groups:
        if not TABLE_NAME.fullmatch(group):
            expected = "expected 1 to 120 letters, digits, '_', '-' and '.', because a table has this name"
            raise ConfigError(str(checkpoint), f"feature group {group!r}", expected)
    write_table_folders(folder, {group: _rows_of(Path(checkpoint), feature) for group, feature in groups.items()})


def _rows_of(checkpoint: Path, feature: Feature) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    for dim, rows in read_rows(checkpoint):
        if dim == feature.dim:
            signs = prefixed_signs(rows.keys) - np.uint64(feature.prefix)
            is_of_group = signs < np.uint64(feature.spacing)  # a smaller sign has wrapped around
            yield signs[is_of_group].view(np.int64), rows.vectors[is_of_group]


@contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise OutputError(f"{path}: cannot be written: {(err.strerror or str(err)).lower()}") from err


def _array_in(file: Path) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = np.load(file, mmap_mode="r")
    except OSError as err:
        raise ModelFileError(file, f"cannot be read: {err.strerror or err}") from err
    except UNREADABLE as err:
        raise ModelFileError(file, unreadable(file, "a .npy file", err, (NPY,))) from err
    return array
