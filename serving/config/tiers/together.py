"""A tier of ``volatile_db`` of any type, and which tiers fit together."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from serving.config.clause import at_key, unquoted, with_type
from serving.config.tiers.memory import HashMapConfig, SharedMemoryConfig, SnapshotConfig
from serving.config.tiers.persistent import PersistentDbConfig
from serving.config.tiers.redis import RedisConfig
from serving.config.tiers.volatile import DisabledConfig, VolatileClause

NO_MARGIN = 2**64 - 1  # HPS's default
_LISTED = ("hash_map", "redis_cluster")  # from fastest to slowest
_TYPES = {spelling: one.spellings[0] for one in VolatileClause.types for spelling in one.spellings}


def _with_meaning(value: Any) -> Any:
    """Return the JSON object with Hotrow's name of the type, and without a margin that HPS treats as no limit."""
    margin = unquoted(value.get("overflow_margin")) if isinstance(value, dict) else None
    if isinstance(margin, int) and margin >= NO_MARGIN:
        value = {key: one for key, one in value.items() if key != "overflow_margin"}
    return with_type(value, _TYPES)


VolatileDbConfig = HashMapConfig | SharedMemoryConfig | SnapshotConfig | RedisConfig
VolatileDb = Annotated[
    Annotated[VolatileDbConfig | DisabledConfig, Field(discriminator="type")], BeforeValidator(_with_meaning)
]
"""One tier of ``volatile_db``. The type selects the record."""


def check_together(volatile: Sequence[VolatileDbConfig | DisabledConfig], persistent: PersistentDbConfig) -> None:
    """Refuse tiers that do not fit together: no tier has every row, or a tier would never be read.

    Args:
        volatile: the tiers of ``volatile_db``, fastest first.
        persistent: the tier after them.
    """
    if len(volatile) > 1:
        _check_order([tier.type for tier in volatile])
    fastest, has_persistent = volatile[0].type, persistent.type != "disabled"
    if fastest == "disabled" and not has_persistent:
        raise ValueError("volatile_db and persistent_db are both disabled: no tier would hold a row")
    if fastest == "snapshot" and has_persistent:
        reason = "a volatile_db of the type snapshot holds every row, so this tier would never be read"
        raise at_key("persistent_db.type", reason)
    if not has_persistent:
        _check_holds_all(volatile[-1], f"volatile_db[{len(volatile) - 1}]")


def _check_order(types: Sequence[str]) -> None:
    for place, kind in enumerate(types):
        if kind not in _LISTED:
            reason = f"expected {' and '.join(_LISTED)} in a list of tiers, got {kind}"
            if kind != "disabled":
                reason += ", which has every row of the models' files, so no slower tier would be read"
        elif kind == "hash_map" and "redis_cluster" in types[:place]:
            reason = f"redis_cluster is slower than {kind}: put the faster tier first"
        elif kind in types[:place]:
            reason = f"two tiers of the type {kind}"
        else:
            continue
        raise at_key(f"volatile_db[{place}].type", reason)


def _check_holds_all(slowest: VolatileDbConfig | DisabledConfig, path: str) -> None:
    """Refuse a slowest tier that does not have every row."""
    if isinstance(slowest, HashMapConfig) and not slowest.initialize_after_startup:
        reason = "false without a persistent_db: no tier would hold a row"
        raise at_key(f"{path}.initialize_after_startup", reason)
    if isinstance(slowest, HashMapConfig) and slowest.initial_cache_rate < 1.0:
        reason = "below 1 without a persistent_db: no tier would hold the other rows"
        raise at_key(f"{path}.initial_cache_rate", reason)
    if isinstance(slowest, RedisConfig) and slowest.overflow is not None:
        reason = "another tier must hold the rows that Redis evicts: add a persistent_db, or leave the margin out"
        raise at_key(f"{path}.overflow_margin", reason)
