"""A model that is only looked up: its embeddings on one device or several, and no dense network."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate

import numpy as np

from serving.lookup import LookupResult, LookupSession, defaulted_keys_of, failed_devices
from serving.metrics import MetricSample
from serving.routes import LeastBusy
from serving.storage.store import Keys


class LookupModelSession:
    """Looks rows up for the front ends. Several threads may use it at the same time.

    Attributes:
        config: the model.
        health: see ``InferenceSession``.
    """

    def __init__(self, lookups: Sequence[LookupSession]) -> None:
        """Take at least one lookup; each request goes to the lookup with the fewest requests."""
        self.config = lookups[0].config
        self._lookups = tuple(lookups)
        self.health = lookups[0].health
        self._least_busy = LeastBusy(lookups, lambda lookup: lookup.is_answering)

    @property
    def never_waits(self) -> bool:
        """See ``LookupSession.never_waits``."""
        return all(one.never_waits for one in self._lookups)

    @property
    def is_answering(self) -> bool:
        """Whether some device can still answer."""
        return len(self.failed_devices) < len(self._lookups)

    @property
    def failed_devices(self) -> list[str]:
        """See ``InferenceSession.failed_devices``."""
        return failed_devices(self._lookups)

    def lookup(self, keys: Sequence[Keys]) -> LookupResult:
        """See ``LookupSession.lookup``."""
        with self._least_busy.one() as lookup:
            return lookup.lookup(keys)

    def lookup_together(self, requests: Sequence[Sequence[Keys]]) -> list[LookupResult]:
        """Look up the keys of several requests as one request, and return the answer to each request.

        Raises:
            HotrowError: see ``LookupSession.lookup``; no request has an answer.
        """
        of_tables = list(zip(*requests, strict=True))
        together = self.lookup([np.concatenate(of_table) for of_table in of_tables])
        parts = [
            np.split(rows, list(accumulate(keys.size for keys in of_table))[:-1])
            for rows, of_table in zip(together.embeddings, of_tables, strict=True)
        ]
        defaulted = defaulted_keys_of(self._lookups[0], requests, together.defaulted_keys, together.incomplete)
        return [LookupResult(rows, count) for rows, count in zip(zip(*parts, strict=True), defaulted, strict=True)]

    def readings(self) -> Iterator[MetricSample]:
        """Return the counters of its caches for the metrics page."""
        for lookup in self._lookups:
            yield from lookup.readings()

    def close(self) -> None:
        """Free the caches after the requests in flight. Closing twice is allowed."""
        with ExitStack() as releases:
            for lookup in self._lookups:
                releases.callback(lookup.close)
