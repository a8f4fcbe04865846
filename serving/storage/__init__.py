"""Storage tiers of embedding rows, one file per kind; ``Store`` says what each must do."""

from serving.storage.memory_store import MemoryStore
from serving.storage.redis_store import RedisStore
from serving.storage.rocksdb_engine import recover_database
from serving.storage.rocksdb_store import RocksDbStore
from serving.storage.shared_memory_store import SharedMemoryStore
from serving.storage.snapshot_reader import SnapshotReader, open_snapshot
from serving.storage.snapshot_store import SnapshotStore
from serving.storage.store import DurableStore, PooledStore, SourceStore, Store, TableSpec

__all__ = [
    "DurableStore",
    "MemoryStore",
    "PooledStore",
    "RedisStore",
    "RocksDbStore",
    "SharedMemoryStore",
    "SnapshotReader",
    "SnapshotStore",
    "SourceStore",
    "Store",
    "TableSpec",
    "open_snapshot",
    "recover_database",
]
