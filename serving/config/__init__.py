"""Configuration: HugeCTR's own JSON files, read into frozen records.

``read_inference_config`` reads HugeCTR v3.0's inference JSON, ``read_model_directory`` reads a version directory of a
model repository, and ``read_ps_config`` reads HPS's ``ps.json``. All of them make ``ModelConfig``. ``read_repository``
reads any of these paths, with every model that it serves.
"""

from serving.config.gpu import GpuCacheConfig, GpuNetworkConfig
from serving.config.inference import read_inference_config
from serving.config.keys_without_effect import MOST_ROCKSDB_BATCH_ROWS
from serving.config.model_directory import check_sizes, read_model_directory
from serving.config.models import ModelConfig, ParameterServerConfig, TableConfig, bringing_tables
from serving.config.ps import read_ps_config
from serving.config.repository import (
    ModelFolder,
    incomplete_entries,
    model_names,
    models_folder,
    open_model_folder,
    read_model,
    read_repository,
    read_tiers,
)
from serving.config.row_dtypes import with_row_dtype
from serving.config.shared_ram import shared_ram_name, with_shared_ram
from serving.config.tiers import (
    DisabledConfig,
    HashMapConfig,
    PersistentDbConfig,
    RedisConfig,
    RedisOverflow,
    RedisTlsConfig,
    SharedMemoryConfig,
    SnapshotConfig,
    VolatileDbConfig,
)
from serving.config.update_source import UpdateSourceConfig
from serving.config.version_policy import VersionPolicy, policy_from, read_triton_config

__all__ = [
    "MOST_ROCKSDB_BATCH_ROWS",
    "DisabledConfig",
    "GpuCacheConfig",
    "GpuNetworkConfig",
    "HashMapConfig",
    "ModelConfig",
    "ModelFolder",
    "ParameterServerConfig",
    "PersistentDbConfig",
    "RedisConfig",
    "RedisOverflow",
    "RedisTlsConfig",
    "SharedMemoryConfig",
    "SnapshotConfig",
    "TableConfig",
    "UpdateSourceConfig",
    "VersionPolicy",
    "VolatileDbConfig",
    "bringing_tables",
    "check_sizes",
    "incomplete_entries",
    "model_names",
    "models_folder",
    "open_model_folder",
    "policy_from",
    "read_inference_config",
    "read_model",
    "read_model_directory",
    "read_ps_config",
    "read_repository",
    "read_tiers",
    "read_triton_config",
    "shared_ram_name",
    "with_row_dtype",
    "with_shared_ram",
]
