"""What HPS's ``ps.json`` (HugeCTR v24.06) may say beyond what Hotrow supports, and HPS's spellings."""

from collections.abc import Mapping
from typing import Any

# Spelling -> what it means here; None: HPS knows it, Hotrow does not support it yet.
VOLATILE_TYPES: dict[str, str | None] = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("hash_map", "hashmap", "hash", "map"), "hash_map"),
    **dict.fromkeys(("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"), "hash_map"),
    **dict.fromkeys(
        ("multi_process_hash_map", "multi_process_hashmap", "multi_process_hash", "multi_process_map"),
        "multi_process_hash_map",
    ),
    **dict.fromkeys(("redis_cluster", "redis"), "redis_cluster"),
    "snapshot": "snapshot",  # Hotrow's own
}
PERSISTENT_TYPES: dict[str, str | None] = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("rocks_db", "rocksdb", "rocks"), "rocks_db"),
}
OVERFLOW_POLICIES: dict[str, str | None] = {
    **dict.fromkeys(("evict_random", "random"), "evict_random"),
    **dict.fromkeys(("evict_least_used", "least_used"), "evict_least_used"),
    **dict.fromkeys(("evict_oldest", "oldest"), "evict_oldest"),
}
UPDATE_SOURCES: dict[str, str | None] = {
    **dict.fromkeys(("null", "none"), "null"),
    **dict.fromkeys(("kafka_message_queue", "kafka_mq", "kafka"), None),
}


def spelling(value: Any, spellings: Mapping[str, str | None]) -> str:
    """What ``value`` means here.

    Raises:
        ValueError: it is none of ``spellings``, or Hotrow does not support what it means.
    """
    if not isinstance(value, str) or value not in spellings:
        accepted = ", ".join(text for text, meaning in spellings.items() if meaning)
        raise ValueError(f"expected one of {accepted}, got {value!r}")
    meaning = spellings[value]
    if meaning is None:
        raise ValueError(f"HPS knows the type {value!r}, Hotrow does not support it yet")
    return meaning
