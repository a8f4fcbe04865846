"""The table of keys of a ``ps.json`` that are accepted and have no effect, each with its reason."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# RocksDB applies a write batch while Python's global lock is held, so a batch is kept short. A short read
# also keeps its values in the CPU's cache until they are converted.
MOST_ROCKSDB_BATCH_ROWS = 2048

_NO_UPDATES = "there is no update_source"
_FUSED = "every table is looked up by its own name, which changes no answer"
_OLDER_NAMES = "they are older names of max_batch_size"
_NEVER_EVICTED = "no row is evicted without an overflow_margin or a capacity with an overflow_policy"
_PARTITIONS = "only Redis and the overflow_margin of RAM use partitions"
_DISABLED = "the type is disabled"
_BATCHES = ("max_get_batch_size", "max_set_batch_size")
_EVICTION = ("overflow_policy", "overflow_resolution_target", "refresh_time_after_fetch")
_REDIS = (
    *("address", "user_name", "password", "num_node_connections", "enable_tls", "tls_ca_certificate"),
    *("tls_client_certificate", "tls_client_key", "tls_server_name_identification"),
)
_NETWORK = (
    *("label_dim", "slot_num", "maxnum_des_feature_per_sample", "non_trainable_params_file", "use_mixed_precision"),
    *("mixed_precision", "enable_tf32_compute", "use_cuda_graph"),
)
TIER_TYPES = _RAM, _SHARED, _SNAPSHOT, _REDIS_TYPE = "hash_map", "multi_process_hash_map", "snapshot", "redis_cluster"


def _has_no_updates(_: Any, ps: Any) -> bool:
    return bool(ps.update_source.type == "disabled")


def _always(record: Any, ps: Any) -> bool:
    return True


class WithoutEffect(NamedTuple):
    """Keys of one clause that have no effect, for one reason.

    Attributes:
        clause: the clause's name; empty for the whole file.
        keys: the keys.
        reason: why they have no effect.
        types: the types of the clause for which the entry holds. Empty means all types except ``disabled``.
        when: a further condition on the record of the clause and on that of the whole file.
    """

    clause: str
    keys: tuple[str, ...]
    reason: str
    types: tuple[str, ...] = ()
    when: Callable[[Any, Any], bool] = _always


TABLE = (
    WithoutEffect("", ("fuse_embedding_table",), _FUSED, when=lambda ps, _: ps.fuse_embedding_table),
    WithoutEffect("models", ("scaler",), "it scales gradients, and serving has no gradients"),
    WithoutEffect("models", ("use_algorithm_search",), "cuBLAS searches its algorithms itself"),
    WithoutEffect("models", ("use_context_stream",), "only TensorFlow and TensorRT use contexts"),
    WithoutEffect("models", ("use_hctr_cache_implementation",), "there is one implementation of the cache"),
    WithoutEffect("models", ("fuse_embedding_table",), _FUSED, when=lambda model, _: model.fuse_embedding_table),
    WithoutEffect("models", _NETWORK, "the model has no dense network", when=lambda model, _: model.dense_file is None),
    WithoutEffect(
        "models",
        ("enable_pagelock",),
        "the embedding_cache_type uvm keeps rows in page-locked memory",
        when=lambda model, _: model.enable_pagelock and model.gpu_cache.wanted and model.gpu_cache.kind == "dynamic",
    ),
    WithoutEffect(
        "models",
        ("thread_pool_size",),
        "only the embedding_cache_mode asynchronous inserts rows later",
        when=lambda model, _: model.gpu_cache.wanted and model.gpu_cache.mode == "exact",
    ),
    WithoutEffect(
        "models",
        ("gpucacheper", "hit_rate_threshold", "init_ec"),
        "a static cache has every row from the start",
        when=lambda model, _: model.gpu_cache.wanted and model.gpu_cache.kind == "static",
    ),
    WithoutEffect("volatile_db", ("update_filters",), _NO_UPDATES, when=_has_no_updates),
    WithoutEffect("volatile_db", ("algorithm", "allocation_rate"), "a table allocates its memory at once"),
    WithoutEffect("volatile_db", ("layout",), "HPS's hashes are the only layout", (_REDIS_TYPE,)),
    WithoutEffect("volatile_db", _BATCHES, _OLDER_NAMES, (_REDIS_TYPE,)),
    WithoutEffect(
        "volatile_db",
        ("max_batch_size", *_BATCHES),
        "a lookup or load of any size is one pass",
        (_RAM, _SHARED, _SNAPSHOT),
    ),
    WithoutEffect("volatile_db", _REDIS, "only a redis_cluster has it", (_RAM, _SHARED, _SNAPSHOT)),
    WithoutEffect(
        "volatile_db",
        ("shared_memory_auto_remove", "shared_memory_name", "shared_memory_size"),
        "only a multi_process_hash_map has it",
        (_RAM, _SNAPSHOT, _REDIS_TYPE),
    ),
    WithoutEffect(
        "volatile_db",
        ("cache_missed_embeddings",),
        "there is no slower tier to copy rows from",
        when=lambda tier, ps: tier.cache_missed_embeddings and tier is ps.slowest_tier,
    ),
    WithoutEffect("volatile_db", ("overflow_margin",), "a snapshot holds every row", (_SNAPSHOT,)),
    WithoutEffect("volatile_db", _EVICTION, _NEVER_EVICTED, (_SHARED, _SNAPSHOT)),
    WithoutEffect(
        "volatile_db", _EVICTION, _NEVER_EVICTED, (_RAM, _REDIS_TYPE), lambda tier, _: tier.overflow_policy is None
    ),
    WithoutEffect(
        "volatile_db",
        ("refresh_time_after_fetch",),
        "the overflow_policy is not evict_oldest",
        (_RAM, _REDIS_TYPE),
        lambda tier, _: "oldest" not in (tier.overflow_policy or "oldest"),
    ),
    WithoutEffect("volatile_db", ("num_partitions",), _PARTITIONS, (_SHARED, _SNAPSHOT)),
    WithoutEffect(
        "volatile_db", ("num_partitions",), _PARTITIONS, (_RAM,), lambda tier, _: tier.overflow_margin is None
    ),
    WithoutEffect("persistent_db", ("update_filters",), _NO_UPDATES, when=_has_no_updates),
    WithoutEffect("persistent_db", _BATCHES, _OLDER_NAMES),
    WithoutEffect(
        "persistent_db",
        ("max_batch_size",),
        f"a value above {MOST_ROCKSDB_BATCH_ROWS} counts as {MOST_ROCKSDB_BATCH_ROWS}, because a large batch is split",
        when=lambda tier, _: tier.max_batch_size > MOST_ROCKSDB_BATCH_ROWS,
    ),
    WithoutEffect("update_source", ("max_batch_size",), "a message is written as a whole, whatever its size"),
    WithoutEffect("update_source", ("max_commit_interval",), "the position is stored with the rows of each message"),
    WithoutEffect("update_source", ("receive_buffer_size",), "a buffer grows with the message"),
)


def all_keys(clause: str) -> set[str]:
    """Return every key of ``clause`` in the table."""
    return {key for row in TABLE if row.clause == clause for key in row.keys}


def always(clause: str, kind: str | None) -> set[str]:
    """Return the keys that never have an effect on ``clause`` of the type ``kind``."""
    rows = (row for row in TABLE if row.clause == clause and row.when is _always)
    return {key for row in rows if not row.types or kind in row.types for key in row.keys}


def found(clause: str, record: Any, ps: Any, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the keys of one JSON object that have no effect, each with its reason.

    Args:
        clause: the clause's name in the table.
        record: the record that was read from ``given``.
        ps: the record of the whole file.
        given: the JSON object.
    """
    kind = getattr(record, "type", None)
    if kind == "disabled":
        yield from ((key, _DISABLED) for key in given if key != "type")
        return
    for row in TABLE:
        holds = row.clause == clause and (not row.types or kind in row.types) and row.when(record, ps)
        yield from ((key, row.reason) for key in row.keys if holds and key in given)
