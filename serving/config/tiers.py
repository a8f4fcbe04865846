"""Which tiers a ``ps.json`` may have beside and behind each other."""

from collections.abc import Mapping

from serving.config.ps_clauses import PersistentDbClause
from serving.config.volatile_db import VolatileDbClause
from serving.errors import ConfigError

# What a list may have, in this order: each is slower than what stands before it, and shared by more.
_LISTED = ("hash_map", "redis_cluster")


def check_together(volatile: Mapping[str, VolatileDbClause], persistent: PersistentDbClause, source: str) -> None:
    """Refuse tiers that make no sense together.

    Args:
        volatile: the clauses of ``volatile_db`` by their JSON paths, fastest first.
        persistent: what is behind them.
        source: the file, for messages.

    Raises:
        ConfigError: no tier would hold a row, one would never be asked, or rows that one leaves out are in no other.
    """
    if len(volatile) > 1:
        _check_order(volatile, source)
    clauses, has_persistent = list(volatile.values()), persistent.type != "disabled"
    if clauses[0].type == "disabled" and not has_persistent:
        raise ConfigError(source, "", "volatile_db and persistent_db are both disabled: no tier would hold a row")
    if clauses[0].type == "snapshot" and has_persistent:
        reason = "behind a volatile_db of the type snapshot, which holds every row, it would never be asked for one"
        raise ConfigError(source, "persistent_db.type", reason)
    *_, (path, slowest) = volatile.items()
    if not has_persistent:
        _check_holds_all(path, slowest, source)


def _check_order(volatile: Mapping[str, VolatileDbClause], source: str) -> None:
    last = -1
    for path, clause in volatile.items():
        if clause.type not in _LISTED:
            reason = f"in a list of tiers expected {' and '.join(_LISTED)}, got {clause.type}"
            if clause.type != "disabled":
                reason += ", which has every row of the models' files, so that no tier behind it would be asked"
            raise ConfigError(source, f"{path}.type", reason)
        place = _LISTED.index(clause.type)
        if place == last:
            raise ConfigError(source, f"{path}.type", f"two tiers of the type {clause.type}")
        if place < last:
            reason = f"{clause.type} behind {_LISTED[last]}, which is slower: the faster tier comes first"
            raise ConfigError(source, f"{path}.type", reason)
        last = place


def _check_holds_all(path: str, slowest: VolatileDbClause, source: str) -> None:
    """Refuse a slowest tier that leaves rows out."""
    if slowest.type == "hash_map" and not slowest.initialize_after_startup:
        reason = "false, and there is no persistent_db: no tier would hold a row"
        raise ConfigError(source, f"{path}.initialize_after_startup", reason)
    if slowest.initial_cache_rate < 1.0:
        reason = "below 1, and there is no persistent_db: no tier would hold the other rows"
        raise ConfigError(source, f"{path}.initial_cache_rate", reason)
    if slowest.type == "redis_cluster" and slowest.margin is not None:
        reason = "rows that Redis evicts must be held by another tier: add a persistent_db, or leave the margin out"
        raise ConfigError(source, f"{path}.overflow_margin", reason)
