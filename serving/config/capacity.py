"""How much memory a model takes on the CPU, before it is loaded."""

from collections.abc import Mapping

from kernels.host import HostTable
from serving.config.records import ModelConfig, TableConfig
from serving.model.sparse_file import SparseModel, open_sparse

HEADROOM_RATIO = 1 / 16
MOST_ROWS = 3_500_000_000  # what one host table can hold


def open_table_file(config: ModelConfig, table: TableConfig) -> SparseModel:
    """The sparse model of one table, opened the way the configuration says.

    Raises:
        ModelFileError: the file is missing or is not such a model.
    """
    return open_sparse(table.file, table.dim, config.key_type, table.row_layout)


def rows_with_headroom(rows: int) -> int:
    """Rows a memory table is given room for: those of the model, and some that updates may add; at most MOST_ROWS."""
    return min(rows + max(int(rows * HEADROOM_RATIO), 64), MOST_ROWS)


def memory_needed(config: ModelConfig) -> Mapping[str, int]:
    """Bytes of RAM that serving ``config`` from memory takes.

    Returns:
        bytes by table name (rows, keys and headroom), and under ``"dense"`` those of the dense weights.

    Raises:
        ModelFileError: a file is missing or is not what the configuration says.
    """
    needed = {
        table.name: HostTable.memory_bytes(
            table.dim, rows_with_headroom(open_table_file(config, table).rows), table.row_dtype
        )
        for table in config.tables
    }
    return {**needed, "dense": config.dense_file.stat().st_size}
