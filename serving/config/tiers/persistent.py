"""The tier ``persistent_db``."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from kernels.host import RowDtype
from serving.config.clause import Clause, Count, FilePath, Milliseconds, Switch, with_type

_TYPES = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("rocks_db", "rocksdb", "rocks"), "rocks_db"),
}


class PersistentDbConfig(Clause):
    """The durable tier.

    Attributes:
        path: the database's folder; None only if the tier is disabled.
        catch_up_interval_ms: how often a ``read_only`` tier reads the other process's writes. None means never.
        timeout_ms: the most time that a lookup waits for the database. None means no limit.
        row_dtype: the row type in this tier, which must be that of the tables. None means float32.
    """

    where: ClassVar[str] = "persistent_db"

    type: Literal["disabled", "rocks_db"] = "disabled"
    path: FilePath | None = None
    read_only: Switch = False
    catch_up_interval_ms: Milliseconds | None = None
    num_threads: Annotated[Count, Field(le=1024)] = 16
    max_batch_size: Count = 65536
    timeout_ms: Milliseconds | None = None
    initialize_after_startup: Switch = True
    row_dtype: RowDtype | None = None
    warm_up: Switch = True

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Drop the other keys of a disabled database."""
        return given if given["type"] == "rocks_db" else {"type": "disabled"}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.type != "disabled" and self.path is None:
            raise ValueError("path is required if the type is rocks_db")
        if self.catch_up_interval_ms is not None and not self.read_only:
            raise ValueError("catch_up_interval_ms: needs read_only, because only then another process writes")
        return self


PersistentDb = Annotated[PersistentDbConfig, BeforeValidator(lambda value: with_type(value, _TYPES))]
