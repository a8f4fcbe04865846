"""What every record of a configuration is: frozen, of exactly the types it says, nothing beside them."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A part of a configuration that was read and checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
