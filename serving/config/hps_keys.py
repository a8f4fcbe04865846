"""What HPS's ``ps.json`` (HugeCTR v24.06) may say beyond what Hotrow supports, and HPS's spellings of the tiers."""

# By the object that holds them; such a key is refused by name instead of being called unknown.
UNSUPPORTED = {
    "": frozenset({"fuse_embedding_table", "update_source"}),
    "models": frozenset(
        {
            "embedding_cache_type",
            "enable_pagelock",
            "fp8_quant",
            "fuse_embedding_table",
            "non_trainable_params_file",
            "refresh_delay",
            "refresh_interval",
            "use_static_table",
        }
    ),
    "volatile_db": frozenset(
        {
            "address",
            "allocation_rate",
            "cache_missed_embeddings",
            "enable_tls",
            "initial_cache_rate",
            "initialize_after_startup",
            "max_batch_size",
            "num_node_connections",
            "num_partitions",
            "overflow_margin",
            "overflow_policy",
            "overflow_resolution_target",
            "password",
            "shared_memory_auto_remove",
            "shared_memory_name",
            "shared_memory_size",
            "tls_ca_certificate",
            "tls_client_certificate",
            "tls_client_key",
            "tls_server_name_identification",
            "update_filters",
            "user_name",
        }
    ),
    "persistent_db": frozenset({"initialize_after_startup", "update_filters"}),
}

# Spelling -> what it means here; None: HPS knows it, Hotrow does not support it yet.
VOLATILE_TYPES: dict[str, str | None] = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("hash_map", "hashmap", "hash", "map"), "hash_map"),
    **dict.fromkeys(("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"), "hash_map"),
    **dict.fromkeys(("multi_process_hash_map", "multi_process_hashmap", "multi_process_hash", "multi_process_map")),
    **dict.fromkeys(("redis_cluster", "redis")),
}
PERSISTENT_TYPES: dict[str, str | None] = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("rocks_db", "rocksdb", "rocks"), "rocks_db"),
}
