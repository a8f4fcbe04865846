"""Configuration: HugeCTR's own JSON files, read into frozen records.

Three doors, one record: ``read_inference_config`` (HugeCTR v3.0's inference JSON), ``read_model_directory`` (a version
directory of a model repository) and ``read_ps_config`` (HPS's ``ps.json``) all make ``ModelConfig``.
``read_repository`` tells them apart and reads what is served together.
"""

from serving.config.capacity import MOST_ROWS, memory_needed, rows_with_headroom
from serving.config.gpu_records import GpuCacheConfig, GpuNetworkConfig
from serving.config.inference import read_inference_config
from serving.config.model_directory import read_model_directory
from serving.config.ps import read_ps_config
from serving.config.records import (
    MOST_ROCKSDB_BATCH_ROWS,
    ModelConfig,
    ParameterServerConfig,
    PersistentDbConfig,
    RedisConfig,
    RedisOverflow,
    RedisTlsConfig,
    SharedMemoryConfig,
    TableConfig,
    VolatileDbConfig,
)
from serving.config.repository import read_model, read_repository
from serving.config.row_dtypes import with_row_dtype

__all__ = [
    "MOST_ROCKSDB_BATCH_ROWS",
    "MOST_ROWS",
    "GpuCacheConfig",
    "GpuNetworkConfig",
    "ModelConfig",
    "ParameterServerConfig",
    "PersistentDbConfig",
    "RedisConfig",
    "RedisOverflow",
    "RedisTlsConfig",
    "SharedMemoryConfig",
    "TableConfig",
    "VolatileDbConfig",
    "memory_needed",
    "read_inference_config",
    "read_model",
    "read_model_directory",
    "read_ps_config",
    "read_repository",
    "rows_with_headroom",
    "with_row_dtype",
]
