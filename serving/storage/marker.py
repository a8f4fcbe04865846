"""The marker of a loaded table: what a store that outlives the process remembers of the table."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self

from serving.model.strict_json import log_newer

MARKER_FORMAT = 1
# The digest in the marker of a table that another program wrote, and that Hotrow has changed but never loaded.
NOT_LOADED = "not loaded"


@dataclass(frozen=True, slots=True)
class Marker:
    """What a store that outlives the process remembers of a table's last load.

    Attributes:
        digest: names the model's files that were loaded.
        rows: rows of the table at the end of the load.
        row_dtype: the row type in which the rows are kept.
        changed: the table may hold other rows than the files: rows were written since, or were there before.
        current_caches: the caches, by ``LastingStore.identity``, that have every write to this source of truth; None:
            every cache, because no write has come since the load.
    """

    digest: str
    rows: int = 0
    row_dtype: str = "fp32"
    changed: bool = False
    current_caches: tuple[str, ...] | None = None

    def is_current(self, cache: str) -> bool:
        """Whether a cache of this identity has every write."""
        return self.current_caches is None or cache in self.current_caches

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Read what ``write`` returned.

        Raises:
            ValueError: it is not a marker of this format.
        """
        document = json.loads(raw)
        if not isinstance(document, dict) or document.pop("format", None) != MARKER_FORMAT:
            raise ValueError(f"expected a marker of format {MARKER_FORMAT}, got {raw[:80]!r}")
        known = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        if "digest" not in known:
            raise ValueError(f"expected a marker with a digest, got {raw[:80]!r}")
        log_newer("the marker of a table", frozenset(document.keys() - known.keys()))
        caches = known.pop("current_caches", None)
        return cls(**known, current_caches=None if caches is None else tuple(caches))

    def write(self) -> bytes:
        """Return the marker as JSON."""
        return json.dumps({"format": MARKER_FORMAT} | asdict(self)).encode()


def kept_rows(store: str, table: str) -> str:
    """The log line for rows that another program wrote."""
    return (
        f"table {table!r}: {store} holds rows that Hotrow did not load; the files' rows are inserted over them and "
        "every other row is kept"
    )
