"""Keys of a ``ps.json`` that are accepted and have no effect: each is told of, with the reason."""

from collections.abc import Iterable, Iterator, Sequence

from serving.config.ps_clauses import ModelClause, PersistentDbClause, PsClauses
from serving.config.records import MOST_ROCKSDB_BATCH_ROWS
from serving.config.validation import Clause
from serving.config.volatile_db import VolatileDbClause

# (where the key is, the key, why it has no effect)
_Idle = Iterable[tuple[str, str, str]]

_OF_KAFKA = "updates are not read from Kafka"
_FUSED = "every table is looked up by its own name, which changes no answer"
_OF_ANY_MODEL = {
    "scaler": "it scales gradients, of which there are none",
    "use_algorithm_search": "cuBLAS searches its algorithms itself",
    "use_context_stream": "contexts are those of TensorFlow and TensorRT",
    "use_hctr_cache_implementation": "there is one implementation of the cache",
}
_NEVER_EVICTED = "no row is ever evicted: there is no overflow_margin, nor a capacity with an overflow_policy"
_OF_STATIC_CACHES = ("gpucacheper", "hit_rate_threshold", "init_ec")
_OF_HPS_MAPS = ("algorithm", "allocation_rate")
_OLDER_NAMES = ("max_get_batch_size", "max_set_batch_size")
_LARGE_BATCHES = (
    f"above {MOST_ROCKSDB_BATCH_ROWS} it counts as that: of more keys several batches are made, each of which is "
    "written as a whole"
)
_OF_REDIS = ("address", "user_name", "password", "num_node_connections")
_OF_SHARED_MEMORY = ("shared_memory_auto_remove", "shared_memory_name", "shared_memory_size")


def idle_lines(document: PsClauses) -> tuple[str, ...]:
    """What an operator is told of the keys that have no effect: one line per reason, with their JSON paths."""
    paths: dict[str, list[str]] = {}
    for where, key, reason in _idle_keys(document):
        paths.setdefault(reason, []).append(f"{where}.{key}" if where else key)
    return tuple(f"{', '.join(of_reason)}: no effect: {reason}" for reason, of_reason in paths.items())


def _idle_keys(document: PsClauses) -> _Idle:
    tiers = document.volatile_clauses
    if document.fuse_embedding_table:
        yield "", "fuse_embedding_table", _FUSED
    for index, model in enumerate(document.models):
        yield from _of_model(f"models[{index}]", model)
    for place, (where, tier) in enumerate(tiers.items(), 1):
        has_slower = place < len(tiers) or document.persistent_db.type != "disabled"
        yield from _of_volatile(where, tier, has_slower)
    yield from _of_persistent("persistent_db", document.persistent_db)
    yield from _said("update_source", document.update_source, _but_type(document.update_source), _OF_KAFKA)


def _of_model(where: str, model: ModelClause) -> _Idle:
    for key, reason in _OF_ANY_MODEL.items():
        yield from _said(where, model, [key], reason)
    if model.fuse_embedding_table:
        yield where, "fuse_embedding_table", _FUSED
    if not model.gpucache:
        return  # who wants no cache expects nothing of it
    if model.enable_pagelock and model.kind == "dynamic":
        yield where, "enable_pagelock", "the embedding_cache_type uvm is what keeps rows in page-locked memory"
    if model.embedding_cache_mode == "exact":
        reason = "only the embedding_cache_mode asynchronous inserts rows later"
        yield from _said(where, model, ["thread_pool_size"], reason)
    if model.kind == "static":
        yield from _said(where, model, _OF_STATIC_CACHES, "a static cache has every row, from the start on")


def _of_volatile(where: str, tier: VolatileDbClause, has_slower: bool) -> _Idle:
    if tier.type == "disabled":
        yield from _said(where, tier, _but_type(tier), "the type is disabled")
        return
    yield from _said(where, tier, ["update_filters"], _OF_KAFKA)
    yield from _said(where, tier, _OF_HPS_MAPS, "a table takes its memory at once")
    if tier.type == "redis_cluster":
        yield from _said(where, tier, _OLDER_NAMES, "they are older names of max_batch_size")
    else:
        batches = ["max_batch_size", *_OLDER_NAMES]
        yield from _said(where, tier, batches, "there a lookup or load is one pass, of any size")
        tls = [key for key in type(tier).model_fields if key == "enable_tls" or key.startswith("tls_")]
        yield from _said(where, tier, [*_OF_REDIS, *tls], "only a redis_cluster has it")
    if tier.type != "multi_process_hash_map":
        yield from _said(where, tier, _OF_SHARED_MEMORY, "only a multi_process_hash_map has it")
    if tier.cache_missed_embeddings and not has_slower:
        yield where, "cache_missed_embeddings", "there is no slower tier whose rows could be copied"
    yield from _of_bounds(where, tier)


def _of_bounds(where: str, tier: VolatileDbClause) -> _Idle:
    """What says how a table's rows are bounded."""
    if tier.type == "snapshot" and tier.margin is not None:
        yield where, "overflow_margin", "a snapshot holds every row"
    if not tier.evicts:
        keys = ("overflow_policy", "overflow_resolution_target", "refresh_time_after_fetch")
        yield from _said(where, tier, keys, _NEVER_EVICTED)
    elif tier.overflow_policy != "evict_oldest":
        yield from _said(where, tier, ["refresh_time_after_fetch"], "the overflow_policy is not evict_oldest")
    if tier.type != "redis_cluster" and not (tier.type == "hash_map" and tier.margin is not None):
        reason = "only Redis, and the overflow_margin of RAM, count partitions"
        yield from _said(where, tier, ["num_partitions"], reason)


def _of_persistent(where: str, tier: PersistentDbClause) -> _Idle:
    if tier.type == "disabled":
        yield from _said(where, tier, _but_type(tier), "the type is disabled")
        return
    yield from _said(where, tier, ["update_filters"], _OF_KAFKA)
    yield from _said(where, tier, _OLDER_NAMES, "they are older names of max_batch_size")
    if tier.max_batch_size > MOST_ROCKSDB_BATCH_ROWS:
        yield from _said(where, tier, ["max_batch_size"], _LARGE_BATCHES)


def _said(where: str, clause: Clause, keys: Iterable[str], reason: str) -> Iterator[tuple[str, str, str]]:
    """Those of ``keys`` that the document has there."""
    return ((where, key, reason) for key in keys if key in clause.model_fields_set)


def _but_type(clause: Clause) -> Sequence[str]:
    return [key for key in type(clause).model_fields if key != "type"]
