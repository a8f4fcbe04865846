"""Configuration: HugeCTR's own JSON files, read into frozen records."""

from serving.config.records import (
    ModelConfig,
    ParameterServerConfig,
    PersistentDbConfig,
    TableConfig,
    VolatileDbConfig,
)

__all__ = ["ModelConfig", "ParameterServerConfig", "PersistentDbConfig", "TableConfig", "VolatileDbConfig"]
