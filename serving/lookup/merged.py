"""Requests that are looked up together: how many defaults each of them got."""

from collections.abc import Sequence

import numpy as np

from serving.lookup.session import LookupSession
from serving.storage.store import Keys, Mask


def defaulted_keys_of(
    session: LookupSession,
    requests: Sequence[Sequence[Keys]],
    defaulted_keys: int,
    incomplete: Sequence[tuple[int, Mask]],
) -> list[int]:
    """Return how many keys of each request got a default; in the asynchronous mode without late keys.

    Args:
        session: answered the requests together.
        requests: the keys of each request, one int64[N] per table.
        defaulted_keys: how many keys of all requests got a default.
        incomplete: see ``LookupResult``.

    Raises:
        StoreError: a tier did not answer, and no other tier holds one of the keys.
    """
    if not defaulted_keys:
        return [0] * len(requests)
    if not incomplete:  # caches on a device count the keys of all requests together
        names = map(session.config.full_name, session.config.tables)
        of_tables = (np.concatenate(of_table) for of_table in zip(*requests, strict=True))
        incomplete = [(place, _held(session, *pair)) for place, pair in enumerate(zip(names, of_tables, strict=True))]
    counts = [0] * len(requests)
    for place, found in incomplete:
        begin = 0
        for at, keys in enumerate(requests):
            end = begin + keys[place].size
            counts[at] += end - begin - int(np.count_nonzero(found[begin:end]))
            begin = end
    return counts


def _held(session: LookupSession, table: str, keys: Keys) -> Mask:
    """Return which keys the tiers hold; each distinct key is read once."""
    distinct, places = np.unique(keys, return_inverse=True)
    return session.server.contains(table, distinct)[places]
