"""Every store and every combination of tiers that the contract tests run on. A new one is one line here."""

from serving.config import RedisConfig
from serving.storage import MemoryStore, RedisStore, RocksDbStore, SharedMemoryStore, SnapshotStore
from serving.storage.shared.folder import SHARED_MEMORY

# For folders of tests that open thousands of databases: they ask for answers, not for what a crash leaves, and without
# a disk's fsync they take a tenth of the time. None: the system's usual place.
QUICK_FOLDER = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
FEW_PARTITIONS = {"num_partitions": 2, "num_node_connections": 2}
ROCKSDB = {"type": "rocks_db", "path": "rows", "num_threads": 1}


def redis_store(server):
    return RedisStore(RedisConfig(addresses=(server.address,), timeout_ms=10_000))


def redis_clause(server):
    return {"type": "redis_cluster", "address": "{}:{}".format(*server.address), "timeout_ms": 10_000}


def shared_clause(request):
    name = request.getfixturevalue("shared_memory_name")
    size = {"shared_memory_name": name, "shared_memory_size": 2**26, "shared_memory_auto_remove": False}
    return {"type": "multi_process_hash_map"} | size


# By name: how a test opens the store, given pytest's request for fixtures and a folder of its own.
STORES = {
    "memory": lambda request, folder: MemoryStore(),
    "snapshot": lambda request, folder: SnapshotStore(folder / "snapshots"),
    "shared_memory": lambda request, folder: SharedMemoryStore("shared", 2**26, auto_remove=False, folder=folder),
    "rocksdb": lambda request, folder: RocksDbStore(folder / "db", num_threads=1),
    "redis": lambda request, folder: redis_store(request.getfixturevalue("redis_server")),
    "redis_cluster": lambda request, folder: redis_store(request.getfixturevalue("redis_cluster").nodes[0]),
}
# By name: the clauses of a ps.json, given pytest's request for fixtures. The table that is served is "m.t".
TIERS = {
    "memory": lambda request: {"volatile_db": {"type": "hash_map"}},
    "snapshot": lambda request: {"volatile_db": {"type": "snapshot", "path": "snapshots"}},
    "rocksdb": lambda request: {"volatile_db": {"type": "disabled"}, "persistent_db": ROCKSDB},
    "redis": lambda request: {"volatile_db": redis_clause(request.getfixturevalue("redis_server"))},
    "redis_cluster": lambda request: {"volatile_db": redis_clause(request.getfixturevalue("redis_cluster").nodes[0])},
    "shared_memory": lambda request: {"volatile_db": shared_clause(request)},
    "shared_memory, rocksdb": lambda request: {"volatile_db": shared_clause(request), "persistent_db": ROCKSDB},
    "memory, rocksdb": lambda request: {"volatile_db": {"type": "hash_map"}, "persistent_db": ROCKSDB},
    "memory of 4 rows, rocksdb": lambda request: {
        "volatile_db": {"type": "hash_map", "capacity_rows": 4},
        "persistent_db": ROCKSDB,
    },
    "half of it in memory, rocksdb": lambda request: {
        "volatile_db": {"type": "hash_map", "initial_cache_rate": 0.5},
        "persistent_db": ROCKSDB,
    },
    "memory that evicts, rocksdb": lambda request: {
        "volatile_db": {"type": "hash_map", "overflow_margin": 2, "overflow_policy": "evict_least_used"}
        | FEW_PARTITIONS,
        "persistent_db": ROCKSDB,
    },
    "no memory for it, rocksdb": lambda request: {
        "volatile_db": {"type": "hash_map", "capacity_rows_per_table": {"m.t": 0}},
        "persistent_db": ROCKSDB,
    },
    "redis, rocksdb": lambda request: {
        "volatile_db": redis_clause(request.getfixturevalue("redis_server")),
        "persistent_db": ROCKSDB,
    },
    "redis that evicts, rocksdb": lambda request: {
        "volatile_db": redis_clause(request.getfixturevalue("redis_server")) | {"overflow_margin": 1} | FEW_PARTITIONS,
        "persistent_db": ROCKSDB,
    },
    "redis_cluster, rocksdb": lambda request: {
        "volatile_db": redis_clause(request.getfixturevalue("redis_cluster").nodes[0]),
        "persistent_db": ROCKSDB,
    },
}
