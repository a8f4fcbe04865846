"""What the replacement rule of policy.cuh is told with each call: who is let in, by lot."""

from __future__ import annotations

import numpy as np

_ALL = 1 << 32
_GOLDEN = 0x9E3779B97F4A7C15  # an odd number whose multiples have little in common


def lottery(call: int, new_keys: int, slots: int, has_marks: bool) -> tuple[np.uint64, np.uint64]:
    """Return what decides which keys may take other keys' slots in one call.

    The cap keeps a call that brings more keys than the cache could hold from sweeping it clean: of those beyond a fifth
    of the slots, each is let in with the probability that makes a fifth. Without marks (``U32`` lines) no key is let in
    with more than 1/4, and the cap is a tenth.

    Args:
        call: its number among those of the cache, from 1.
        new_keys: keys of the call, at least 1.
        slots: of the cache.
        has_marks: whether lines remember who was missed before.

    Returns:
        salt: a number that no other call has.
        limit: 2^32 times the probability.
    """
    cap = max(1, slots // (5 if has_marks else 10))
    limit = _ALL if new_keys <= cap else (cap << 32) // new_keys
    return np.uint64(call * _GOLDEN % (1 << 64)), np.uint64(limit if has_marks else min(limit, _ALL // 4))
