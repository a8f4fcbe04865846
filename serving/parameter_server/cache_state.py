"""The states of a table in a cache, and the changes between them; modelled on the comment of SQLite's ``pager.c``.

::

             loaded               missed a write              a refill begins
    LOADING ───────▶ SERVING ───────────────────▶ INVALID ───────────────▶ REFILLING
       │                ▲                          ▲    ▲                    │   │
       └────────────────┼──────────────────────────┘    └────────────────────┘   │
        unreachable     │                         missed a write, or failed      │
                        └────────────────────────────────────────────────────────┘
                                           has every row

    unload and erase lead from every state to DROPPED

    state      lookups  writes  promotions   what holds
    LOADING    no       no      no           no writer knows the table yet
    SERVING    yes      yes     yes          the cache took every acknowledged write
    INVALID    no       no      no           rows may be old: the cache is to be refilled
    REFILLING  no       yes     no           one refill runs, and the cache took every write since it began
    DROPPED    no       no      no           final

The state says whether the rows may be trusted. Whether the tier answers is another matter: a silent cache may be
SERVING. Partitions of Redis have states of their own; while some of them are invalid, the table is SERVING.
"""

from enum import Enum


class CacheState(Enum):
    """A state of a table in a cache, the best first; see the module."""

    SERVING = "serving"
    LOADING = "loading"
    REFILLING = "refilling"
    INVALID = "invalid"
    DROPPED = "dropped"

    @property
    def takes_writes(self) -> bool:
        """Whether a write must reach the cache."""
        return self in (CacheState.SERVING, CacheState.REFILLING)

    def may_become(self, state: "CacheState") -> bool:
        """Whether the module's diagram has an arrow to ``state``."""
        return state in _TRANSITIONS[self]


_TRANSITIONS = {
    CacheState.LOADING: (CacheState.SERVING, CacheState.INVALID, CacheState.DROPPED),
    CacheState.SERVING: (CacheState.INVALID, CacheState.DROPPED),
    CacheState.INVALID: (CacheState.REFILLING, CacheState.DROPPED),
    CacheState.REFILLING: (CacheState.SERVING, CacheState.INVALID, CacheState.DROPPED),
    CacheState.DROPPED: (),
}
