"""Storage tiers of embedding rows, one file per kind; ``Store`` says what each must do."""

from serving.storage.memory import MemoryStore
from serving.storage.redis.store import RedisStore
from serving.storage.rocksdb.engine import recover_database
from serving.storage.rocksdb.store import RocksDbStore
from serving.storage.shared.store import SharedMemoryStore
from serving.storage.snapshot.reader import SnapshotReader, open_snapshot
from serving.storage.snapshot.store import SnapshotStore
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
