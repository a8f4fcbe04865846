"""RAM that holds every row, shared by the processes that serve the same models."""

import hashlib
import os

from serving.config.models import ParameterServerConfig
from serving.config.tiers import HashMapConfig, SharedMemoryConfig

_ANY_SIZE = 1 << 50  # the machine's memory is the bound


def shared_ram_name(identity: str) -> str:
    """Return the ``shared_memory_name`` of this user's processes that have the same ``identity``."""
    return f"hotrow-{hashlib.sha256(f'{os.getuid()} {identity}'.encode()).hexdigest()[:16]}"


def with_shared_ram(ps: ParameterServerConfig, identity: str) -> ParameterServerConfig:
    """Return tiers that hold tables once for all processes of one ``identity``: RAM with every row becomes shared RAM.

    Other tiers stay as they are. RAM that holds a part of the rows is a cache, which every process has for itself. With
    an ``update_source`` every process has all rows for itself, too, and reads the updates itself.
    """
    tiers = ps.volatile_tiers
    if ps.update_source.type != "disabled":
        return ps
    if len(tiers) != 1 or not isinstance(tiers[0], HashMapConfig) or not _has_every_row(tiers[0]):
        return ps
    shared = SharedMemoryConfig(
        name=shared_ram_name(identity), size_bytes=_ANY_SIZE, lookup_threads=tiers[0].lookup_threads
    )
    return ps.model_copy(update={"volatile_tiers": (shared,)})


def _has_every_row(ram: HashMapConfig) -> bool:
    return not ram.is_bounded and ram.initialize_after_startup and ram.initial_cache_rate == 1.0
