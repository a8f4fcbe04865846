"""The files of a model's tables, the progress of long walks over rows, and the RAM that a model takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kernels.host import HostTable
from serving.config import ModelConfig, TableConfig
from serving.model.capacity import HEADROOM_RATIO, rows_with_headroom
from serving.model.sparse_file import SparseModel, open_sparse
from serving.storage.store import Batches, TableSpec

Progress = Callable[[str, int, int], None]
"""Called with the task, its finished rows, and all its rows, which may be an estimate."""


def open_table_file(config: ModelConfig, table: TableConfig) -> SparseModel:
    """Open the sparse model of one table.

    Raises:
        ModelFileError: the file is missing or is not such a model.
    """
    return open_sparse(table.file, table.dim, config.key_type, table.row_layout)


@dataclass(frozen=True)
class TableSource:
    """One table, and the file that its rows come from."""

    spec: TableSpec
    model: SparseModel

    @cached_property
    def digest(self) -> str:
        """The digest of the model's files; reads them once."""
        return self.model.digest()


def table_source(config: ModelConfig, table: TableConfig) -> TableSource:
    """What is to be loaded for ``table``.

    Raises:
        ModelFileError: its file is missing or is not such a model.
    """
    return TableSource(table_spec(config, table), open_table_file(config, table))


def table_spec(config: ModelConfig, table: TableConfig) -> TableSpec:
    """What stores must know of ``table``."""
    key_bytes: Literal[4, 8] = 8 if config.key_type == "I64" else 4
    return TableSpec(config.full_name(table), table.dim, key_bytes, table.row_dtype)


def memory_needed(config: ModelConfig, headroom_ratio: float = HEADROOM_RATIO) -> Mapping[str, int]:
    """Bytes of RAM that serving ``config`` from memory takes, with room for new keys; without shared tables.

    Returns:
        bytes by table name, and under ``"dense"`` the bytes of the dense weights, if the model has any.

    Raises:
        ModelFileError: a file is missing or is not what the configuration says.
    """
    needed = {
        table.name: HostTable.memory_bytes(
            table.dim, rows_with_headroom(open_table_file(config, table).rows, headroom_ratio), table.row_dtype
        )
        for table in (config.tables if config.base is None else ())
    }
    return needed if config.dense_file is None else {**needed, "dense": config.dense_file.stat().st_size}


class CountedRows:
    """Counts the rows of batches and reports the progress.

    Attributes:
        done: the rows so far.
    """

    def __init__(self, task: str, rows: int, progress: Progress | None) -> None:
        """Report to ``progress`` that ``task`` takes ``rows`` rows."""
        self.done = 0
        self._task = task
        self._rows = rows
        self._progress = progress

    def __call__(self, batches: Batches) -> Batches:
        """Yield the batches."""
        for keys, rows in batches:
            yield keys, rows
            self.done += keys.size
            if self._progress is not None:
                self._progress(self._task, self.done, self._rows)
