"""The row types of tables."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import get_args

from kernels.host import RowDtype
from serving.config.models import ModelConfig
from serving.config.tiers import PersistentDbConfig, RedisConfig, VolatileDbConfig
from serving.errors import ConfigError, did_you_mean

_Tier = VolatileDbConfig | PersistentDbConfig
# Rounding such a row twice may change the last bit of its scale. Other row types stay the same when rounded twice.
ROW_WISE: frozenset[RowDtype] = frozenset({"int8", "uint8"})


def by_path(volatile: Sequence[VolatileDbConfig]) -> dict[str, VolatileDbConfig]:
    """Return the tiers of ``volatile_db`` by their JSON paths."""
    if len(volatile) == 1:
        return {"volatile_db": volatile[0]}
    return {f"volatile_db[{place}]": tier for place, tier in enumerate(volatile)}


def with_row_dtypes(
    config: ModelConfig, volatile: Sequence[VolatileDbConfig], persistent: PersistentDbConfig, source: str
) -> ModelConfig:
    """Return ``config`` with the row types of its tables, which the fastest tier decides.

    Raises:
        ConfigError: a slower tier has another row type, or its rows would be rounded twice when they are copied into a
            faster tier.
    """
    if config.base is not None:
        return config.on_tables_of(with_row_dtypes(config.base, volatile, persistent, source))
    tiers: dict[str, _Tier] = {**by_path(volatile), "persistent_db": persistent}
    _check_copies(tiers, source)
    tables = []
    for table in config.tables:
        name = config.hps_name(table)
        row_dtype, path = _row_dtype(name, volatile, persistent)
        for slower, tier in list(tiers.items())[1:]:
            kept = _kept_as(tier)
            if kept not in (None, row_dtype):
                reason = (
                    f"{kept!r}, but {path} makes the rows of table {name!r} {row_dtype!r}; "
                    "a row must be the same in every tier"
                )
                raise ConfigError(source, f"{slower}.row_dtype", reason)
        tables.append(table.model_copy(update={"row_dtype": row_dtype}))
    return config.model_copy(update={"tables": tuple(tables)})


def _kept_as(tier: _Tier) -> RowDtype | None:
    """Return the row type of a slower tier, or None if the tier keeps float32 for every table."""
    return tier.row_dtype if isinstance(tier, RedisConfig | PersistentDbConfig) else None


def _check_copies(tiers: Mapping[str, _Tier], source: str) -> None:
    """Refuse a row type with a scale in a tier whose rows are copied into a faster tier and rounded again."""
    for (faster, taker), (slower, tier) in combinations(tiers.items(), 2):
        kept = _kept_as(tier)
        if kept not in ROW_WISE or isinstance(taker, PersistentDbConfig):
            continue
        fills = taker.initialize_after_startup and not tier.initialize_after_startup
        for key, copies in (
            (f"{faster}.cache_missed_embeddings is true", taker.cache_missed_embeddings),
            (f"{slower}.initialize_after_startup is false", fills),
        ):
            if copies:
                reason = (
                    f"{kept!r}, and {key}: rows copied from {slower} into {faster} would be "
                    f"rounded twice; keep fp32 in {slower}, or fp16 or bf16 in both"
                )
                raise ConfigError(source, f"{slower}.row_dtype", reason)


def _row_dtype(
    table: str, volatile: Sequence[VolatileDbConfig], persistent: PersistentDbConfig
) -> tuple[RowDtype, str]:
    """Return the row type of a table and the JSON path of its key."""
    if not volatile:
        return persistent.row_dtype or "fp32", "persistent_db.row_dtype"
    path, fastest = next(iter(by_path(volatile).items()))
    by_name = {} if isinstance(fastest, RedisConfig) else fastest.row_dtype_per_table or {}
    if table in by_name:
        return by_name[table], f"{path}.row_dtype_per_table[{table!r}]"
    return fastest.row_dtype or "fp32", f"{path}.row_dtype"


def with_row_dtype(config: ModelConfig, row_dtype: RowDtype | Mapping[str, RowDtype], caller: str) -> ModelConfig:
    """Return ``config`` with one row type for all tables, or with a row type for each named table.

    Args:
        config: the model.
        row_dtype: the row type, or row types by the tables' names inside the model.
        caller: the function that has the argument ``row_dtype``, for messages.

    Raises:
        ConfigError: the row type or the table is unknown.
    """
    if config.base is not None:
        return config.on_tables_of(with_row_dtype(config.base, row_dtype, caller))
    names = [table.name for table in config.tables]
    by_name = row_dtype if isinstance(row_dtype, Mapping) else dict.fromkeys(names, row_dtype)
    for name, value in by_name.items():
        if name not in names:
            reason = f"no table is called {name!r}; there are {', '.join(names)}"
            raise ConfigError(caller, "row_dtype", reason + did_you_mean(name, names))
        if value not in get_args(RowDtype):
            raise ConfigError(caller, "row_dtype", f"expected one of {', '.join(get_args(RowDtype))}, got {value!r}")
    tables = (
        table.model_copy(update={"row_dtype": by_name.get(table.name, table.row_dtype)}) for table in config.tables
    )
    return config.model_copy(update={"tables": tuple(tables)})
