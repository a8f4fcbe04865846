"""What the parameter server knows of a table that it serves."""

from dataclasses import dataclass
from typing import Self

from kernels.host import RowDtype
from serving.config import ModelConfig, TableConfig
from serving.parameter_server.counters import TableCounting


@dataclass(frozen=True, slots=True, eq=False)
class ServedTable:
    """One table of a loaded model; another load of the same model makes another.

    Attributes:
        name: full name.
        dim: D.
        row_dtype: the form that every answer's rows are rounded to.
        default_value: every float of an unknown key's vector.
        counting: what is counted of it.
    """

    name: str
    dim: int
    row_dtype: RowDtype
    default_value: float
    counting: TableCounting

    @classmethod
    def of(cls, config: ModelConfig, table: TableConfig) -> Self:
        """``table`` of the model ``config``."""
        counting = TableCounting(config.name, config.version, table.name)
        return cls(config.full_name(table), table.dim, table.row_dtype, table.default_value, counting)
