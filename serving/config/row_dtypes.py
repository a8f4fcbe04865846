"""Which table's rows RAM keeps in which form."""

from serving.config.records import ModelConfig, VolatileDbConfig


def with_row_dtypes(config: ModelConfig, volatile: VolatileDbConfig) -> ModelConfig:
    """``config`` with the row types that ``volatile`` says of its tables; the others keep ``volatile.row_dtype``."""
    by_name = volatile.row_dtype_per_table or {}
    tables = (
        table.model_copy(update={"row_dtype": by_name.get(config.full_name(table), volatile.row_dtype)})
        for table in config.tables
    )
    return config.model_copy(update={"tables": tuple(tables)})
