"""What HPS's ``ps.json`` (HugeCTR v24.06) may say beyond what Hotrow supports, and HPS's spellings of the tiers."""

# By the object that holds them; such a key is refused by name instead of being called unknown.
UNSUPPORTED = {
    "": frozenset({"update_source"}),
    "volatile_db": frozenset(
        {
            "enable_tls",
            "num_node_connections",
            "shared_memory_auto_remove",
            "shared_memory_name",
            "shared_memory_size",
            "tls_ca_certificate",
            "tls_client_certificate",
            "tls_client_key",
            "tls_server_name_identification",
        }
    ),
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
