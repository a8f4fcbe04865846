"""The storage tiers of a ``ps.json``: one record for each type of ``volatile_db``, and one for ``persistent_db``.

``docs/configuration.md`` describes each key. A file has the records of one kind of tier.
"""

from serving.config.tiers.memory import HashMapConfig, SharedMemoryConfig, SnapshotConfig
from serving.config.tiers.persistent import PersistentDb, PersistentDbConfig
from serving.config.tiers.redis import RedisConfig, RedisOverflow, RedisTlsConfig
from serving.config.tiers.together import VolatileDb, VolatileDbConfig, check_together
from serving.config.tiers.volatile import DisabledConfig

__all__ = [
    "DisabledConfig",
    "HashMapConfig",
    "PersistentDb",
    "PersistentDbConfig",
    "RedisConfig",
    "RedisOverflow",
    "RedisTlsConfig",
    "SharedMemoryConfig",
    "SnapshotConfig",
    "VolatileDb",
    "VolatileDbConfig",
    "check_together",
]
