"""Which table's rows are kept in which form."""

from collections.abc import Mapping
from typing import get_args

from kernels.host import RowDtype
from serving.config.records import ModelConfig, PersistentDbConfig, TableConfig, VolatileDbConfig
from serving.errors import ConfigError

# Their rows have a scale that rounding a rounded row may change by its last bit; rounding twice to another form does
# not differ from rounding once.
ROW_WISE: frozenset[RowDtype] = frozenset({"int8", "uint8"})


def with_row_dtypes(
    config: ModelConfig, volatile: VolatileDbConfig, persistent: PersistentDbConfig, source: str
) -> ModelConfig:
    """``config`` with the row types that the tiers say of its tables.

    ``volatile_db`` decides; where it is disabled, ``persistent_db``.

    Raises:
        ConfigError: ``persistent_db`` would keep a table's rows in another form than its own, or in one whose rows
            cannot be copied into ``volatile_db``, as it is told to.
    """
    _check_copies(volatile, persistent, source)
    tables = []
    for table in config.tables:
        name = config.full_name(table)
        row_dtype, path = _row_dtype(name, volatile, persistent)
        if persistent.row_dtype not in (None, row_dtype):
            reason = (
                f"{persistent.row_dtype!r}, but {path} makes the rows of table {name!r} {row_dtype!r}; "
                "a row must not differ by the tier that it comes from"
            )
            raise ConfigError(source, "persistent_db.row_dtype", reason)
        tables.append(table.model_copy(update={"row_dtype": row_dtype}))
    return config.model_copy(update={"tables": tuple(tables)})


def _check_copies(volatile: VolatileDbConfig, persistent: PersistentDbConfig, source: str) -> None:
    if persistent.row_dtype not in ROW_WISE or volatile.type == "disabled":
        return
    fills = volatile.initialize_after_startup and not persistent.initialize_after_startup
    for key, copies in (
        ("volatile_db.cache_missed_embeddings is true", volatile.cache_missed_embeddings),
        ("persistent_db.initialize_after_startup is false", fills),
    ):
        if copies:
            reason = (
                f"{persistent.row_dtype!r}, and {key}: rows would be copied from there into volatile_db, and rounded "
                "twice; keep fp32 there, or fp16 or bf16 in both"
            )
            raise ConfigError(source, "persistent_db.row_dtype", reason)


def _row_dtype(table: str, volatile: VolatileDbConfig, persistent: PersistentDbConfig) -> tuple[RowDtype, str]:
    """The form of a table's rows, and the JSON path of the key that says so."""
    by_name = volatile.row_dtype_per_table or {}
    if table in by_name:
        return by_name[table], f"volatile_db.row_dtype_per_table[{table!r}]"
    if volatile.type == "disabled":
        return persistent.row_dtype or "fp32", "persistent_db.row_dtype"
    return volatile.row_dtype, "volatile_db.row_dtype"


def with_row_dtype(config: ModelConfig, row_dtype: RowDtype | Mapping[str, RowDtype], caller: str) -> ModelConfig:
    """``config`` with one row type for all its tables, or one for each table that is named; the others keep theirs.

    Args:
        config: the model.
        row_dtype: the row type, or row types by the tables' names inside the model.
        caller: whose argument ``row_dtype`` is, for messages.

    Raises:
        ConfigError: a row type is none, or no table has this name.
    """
    names = [table.name for table in config.tables]
    by_name = row_dtype if isinstance(row_dtype, Mapping) else dict.fromkeys(names, row_dtype)
    for name, one in by_name.items():
        if name not in names:
            raise ConfigError(caller, "row_dtype", f"no table is called {name!r}; there are {', '.join(names)}")
        if one not in get_args(RowDtype):
            raise ConfigError(caller, "row_dtype", f"expected one of {', '.join(get_args(RowDtype))}, got {one!r}")
    return _with(config, by_name)


def _with(config: ModelConfig, by_name: Mapping[str, RowDtype]) -> ModelConfig:
    def table_with(table: TableConfig) -> TableConfig:
        return table.model_copy(update={"row_dtype": by_name.get(table.name, table.row_dtype)})

    return config.model_copy(update={"tables": tuple(table_with(table) for table in config.tables)})
