"""Checkpoints of all roles, and the tables that a served model reads from a checkpoint.

A checkpoint is a folder ``batch-<n>``, which is complete or absent. It holds the state after n batches:

- ``checkpoint.json``: n, the features, the optimizer and its steps, the number of servers, and checksums;
- ``dense.pt``: what the NN worker gave ``TrainCtx.dump_checkpoint``;
- ``server-<n>/dim-<D>.rows``: the rows of a server's table; see ``training.row_file``. The least recently
  used row comes first.

A checkpoint of an earlier version has no checksums. Its rows are in ``server-<n>/dim-<D>/``, in the files
``keys.npy``, ``parts.npy`` and ``last_steps.npy``.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import TrainingTable
from serving.errors import ConfigError, ModelFileError, OutputError
from serving.model.atomic import atomic_directory
from serving.model.names import TABLE_NAME
from serving.model.numpy_faults import NPY, UNREADABLE, unreadable
from serving.model.pooling import Pooling
from serving.model.regular_file import check_regular
from serving.model.sparse_writer import write_table_folders
from serving.model.strict_json import Fields
from training.checkpoint_file import read_checkpoint_file, write_checkpoint_file
from training.checkpoint_folder import CheckpointFolder
from training.persia.config import EmbeddingConfig, Feature
from training.persia.signs import servers_of, signs_of_group
from training.row_file import BLOCK_ROWS, Shape, TableRows, read_rows, shape_of, write_rows

#: The states that the NN worker saves.
DENSE_FILE = "dense.pt"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What ``checkpoint.json`` says.

    Attributes:
        batches: how many were trained.
        step: of the optimizer.
        optimizer: its facts.
        config: the features.
        servers: how many servers have written rows; None: a checkpoint of an earlier version does not say it.
        run: the training run that publishes updates of the rows; empty if it publishes none.
        positions: for each partition of the update log, the position that the rows include.
    """

    batches: int
    step: int
    optimizer: dict[str, Any]
    config: EmbeddingConfig
    servers: int | None
    run: str = ""
    positions: dict[str, str] = field(default_factory=dict)

    def shape(self, dim: int) -> Shape:
        """Return the shape of the rows of a table."""
        rule, initial_states = self.optimizer["rule"], self.optimizer["initial_states"]
        return shape_of(TrainingTable(f"dim {dim}", dim, rule=rule, initial_states=initial_states))

    def write(self, folder: Path) -> None:
        """Write ``checkpoint.json``, after all other files."""
        document: dict[str, Any] = {
            "batches": self.batches,
            "step": self.step,
            "optimizer": self.optimizer,
            "features": [asdict(feature) for feature in self.config.features.values()],
            "servers": self.servers,
        }
        if self.run:
            document["updates"] = {"run": self.run, "positions": self.positions}
        write_checkpoint_file(folder, document)

    @classmethod
    def read(cls, folder: Path) -> "CheckpointFacts":
        """Undo ``write``.

        Raises:
            ConfigError: there is no such file, or it is not JSON.
            ModelFileError: the file or ``dense.pt`` is damaged.
        """
        document = read_checkpoint_file(folder, ("batches", "step", "optimizer", "features", "servers", "updates"))
        features = [_read_feature(entry) for entry in document.objects("features")]
        config = EmbeddingConfig({feature.name: feature for feature in features})
        batches, step = (document.integer(name, minimum=0, maximum=2**62) for name in ("batches", "step"))
        optimizer = document.object("optimizer")
        for name in ("rule", "initial_states"):
            optimizer.value(name)
        servers = document.integer("servers", minimum=1) if "servers" in document else None
        run, positions = "", {}
        if "updates" in document:
            updates = document.object("updates", ("run", "positions"))
            of_log = updates.object("positions")
            run, positions = updates.text("run"), {partition: of_log.text(partition) for partition in of_log}
        of_optimizer = {name: optimizer.value(name) for name in optimizer}
        return cls(batches, step, of_optimizer, config, servers, run, positions)


def _read_feature(members: Fields) -> Feature:
    members.allow(member.name for member in fields(Feature))
    read: dict[Any, Any] = {
        str: members.text,
        bool: members.boolean,
        int: lambda key: members.integer(key, minimum=0, maximum=2**64),
    }
    return Feature(**{member.name: read[member.type](member.name) for member in fields(Feature)})


def checkpoints_in(folder: str | Path) -> CheckpointFolder:
    """Return a folder of checkpoints."""
    return CheckpointFolder(Path(folder), "batch")


@contextmanager
def new_checkpoint(folder: str | Path, batches: int) -> Iterator[Path]:
    """Make a checkpoint in the folder that this yields. Afterwards it is complete, and the earlier ones are deleted.

    Raises:
        OutputError: the disk refuses.
    """
    checkpoints = checkpoints_in(folder)
    with _writing(folder), atomic_directory(checkpoints.checkpoint(batches)) as temporary:
        yield temporary
    checkpoints.remove_earlier(batches)


def remove_unfinished(folder: str | Path) -> None:
    """Make the folder of checkpoints, and remove what a killed run left in it.

    Raises:
        OutputError: the disk refuses.
    """
    with _writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    checkpoints_in(folder).remove_killed_writes()


def dump_rows(folder: str | Path, server: int, tables: dict[int, TrainingTable]) -> None:
    """Write the rows of a server.

    Raises:
        OutputError: the disk refuses.
    """
    path = Path(folder, f"server-{server}")
    with _writing(path):
        path.mkdir(parents=True)
        for dim, table in tables.items():
            with (path / f"dim-{dim}.rows").open("wb") as file:
                write_rows(file, *shape_of(table), _parts_of(table))


def _parts_of(table: TrainingTable) -> Iterator[TableRows]:
    rows = table.changed_rows()
    for first in range(0, len(rows), BLOCK_ROWS):
        yield TableRows(*table.read(rows[first : first + BLOCK_ROWS]))


def load_rows(
    folder: str | Path, server: int = 0, servers: int = 1, most: int = BLOCK_ROWS
) -> Iterator[tuple[int, TableRows]]:
    """Yield the rows of one server with their D, part by part. The checkpoint may be of another number of servers.

    Raises:
        ConfigError: there is no ``checkpoint.json``, or it is not JSON.
        ModelFileError: a file is missing or damaged.
    """
    folder = Path(folder)
    facts = CheckpointFacts.read(folder)
    for dim, part in _all_rows(folder, facts, facts.config.dims):
        for first in range(0, len(part), most):
            rows = part[first : first + most]
            yield dim, rows[servers_of(rows.keys, servers) == server]


def _all_rows(folder: Path, facts: CheckpointFacts, dims: Collection[int]) -> Iterator[tuple[int, TableRows]]:
    """Yield the rows of all servers whose D is one of ``dims``."""
    if facts.servers is None:
        yield from ((dim, part) for dim, part in _earlier_rows(folder) if dim in dims)
        return
    for number in range(facts.servers):
        for dim in dims:
            for part in read_rows(folder / f"server-{number}" / f"dim-{dim}.rows", *facts.shape(dim)):
                yield dim, part


def _earlier_rows(folder: Path) -> Iterator[tuple[int, TableRows]]:
    """Yield the rows of a checkpoint of an earlier version."""
    for path in sorted(folder.glob("server-*/dim-*")):
        keys, parts, last_steps = (_array_in(path / f"{name}.npy") for name in ("keys", "parts", "last_steps"))
        dim = path.name.removeprefix("dim-")
        is_right = keys.dtype == last_steps.dtype == np.int64 and parts.dtype == np.float32 and parts.ndim in (2, 3)
        floats = math.prod(parts.shape[1:])  # [V, P, D] and [V, P * D] have the same floats in the same order
        if not is_right or floats < int(dim):
            found = f"{keys.dtype}, {last_steps.dtype} and {parts.dtype}{list(parts.shape)}"
            expected = f"int64 keys and steps and float32 rows of at least {dim} floats"
            raise ModelFileError(path, f"expected {expected}, found {found}")
        if not len(keys) == len(parts) == len(last_steps):
            counts = f"{len(keys)} keys, {len(parts)} rows and {len(last_steps)} steps"
            raise ModelFileError(path, f"expected as many rows and steps as keys, found {counts}")
        vectors, states = np.split(parts.reshape(len(parts), floats), [int(dim)], axis=1)
        rows = TableRows(keys, vectors, states, last_steps, np.zeros(len(keys), np.uint64))
        for first in range(0, len(keys), BLOCK_ROWS):
            yield int(dim), rows[first : first + BLOCK_ROWS]


def write_tables(checkpoint: str | Path, folder: str | Path) -> None:
    """Write the trained rows of each feature group, for ``hotrow import --checkpoint``.

    A key is the sign of a row without its prefix: a client sends what ``signs.request_keys`` returns.

    Args:
        checkpoint: a folder ``batch-<n>``.
        folder: has ``<folder>/<group>`` in HugeCTR's format. It is complete or absent, and replaces an earlier one.

    Raises:
        ConfigError: the checkpoint is missing, a group cannot be the name of a table, or its features are pooled in
            different ways.
        ModelFileError: a file of the checkpoint is damaged.
        OutputError: ``folder`` has other files, or the disk refuses.
    """
    facts = CheckpointFacts.read(Path(checkpoint))
    groups = facts.config.groups
    for group in groups:
        if not TABLE_NAME.fullmatch(group):
            expected = "expected 1 to 120 letters, digits, '_', '-' and '.', because a table has this name"
            raise ConfigError(str(checkpoint), f"feature group {group!r}", expected)
    pooling = {group: _pooling_of(checkpoint, facts.config, group) for group in groups}
    rows = {group: _rows_of(Path(checkpoint), facts, feature) for group, feature in groups.items()}
    write_table_folders(folder, rows, pooling)


def _pooling_of(checkpoint: str | Path, config: EmbeddingConfig, group: str) -> Pooling:
    """Return how the features of a group are pooled. Raise ConfigError if they are pooled in different ways."""
    kinds = {
        feature.pooling: feature.name
        for feature in config.features.values()
        if feature.group == group and feature.pooling != Pooling()
    }
    if len(kinds) > 1:
        both = " and ".join(f"{name!r} {pooling.combiner}" for pooling, name in kinds.items())
        reason = f"expected one combiner, because a served table has only one, got {both}; "
        reason += "train with the same sqrt_scaling for all features of the group, or with a group for each"
        raise ConfigError(str(checkpoint), f"feature group {group!r}", reason)
    return next(iter(kinds), Pooling())


def _rows_of(
    checkpoint: Path, facts: CheckpointFacts, feature: Feature
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    for _, rows in _all_rows(checkpoint, facts, [feature.dim]):
        is_of_group, signs = signs_of_group(feature, rows.keys)
        yield signs.view(np.int64), rows.vectors[is_of_group]


@contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise OutputError(f"{path}: cannot be written: {(err.strerror or str(err)).lower()}") from err


def _array_in(file: Path) -> np.ndarray[Any, Any]:
    try:
        check_regular(file)
        array: np.ndarray[Any, Any] = np.load(file, mmap_mode="r")
    except OSError as err:
        raise ModelFileError(file, f"cannot be read: {err.strerror or err}") from err
    except UNREADABLE as err:
        raise ModelFileError(file, unreadable(file, "a .npy file", err, (NPY,))) from err
    return array
