"""Storage tiers of embedding rows, a folder or file per kind; ``Store`` is the base class of all of them."""

from serving.storage.marker import Marker
from serving.storage.memory import MemoryStore
from serving.storage.redis.store import RedisStore
from serving.storage.rocksdb import RocksDbStore, recover_database
from serving.storage.shared import SharedMemoryStore
from serving.storage.snapshot import SnapshotReader, SnapshotStore, open_snapshot
from serving.storage.store import Store, TableSpec

__all__ = [
    "Marker",
    "MemoryStore",
    "RedisStore",
    "RocksDbStore",
    "SharedMemoryStore",
    "SnapshotReader",
    "SnapshotStore",
    "Store",
    "TableSpec",
    "open_snapshot",
    "recover_database",
]
