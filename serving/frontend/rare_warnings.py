"""Warnings about what clients do. Clients must not fill the log."""

import logging
import math
from time import monotonic

_INTERVAL_S = 60.0


class RareWarnings:
    """Logs warnings, each kind at most once a minute. Not thread-safe."""

    def __init__(self, log: logging.Logger) -> None:
        """Warn in ``log``."""
        self._log = log
        self._warned_s: dict[str, float] = {}  # by form

    def warn(self, form: str, *fields: object) -> None:
        """Log a line, unless a line of the same form was logged in the last minute."""
        now_s = monotonic()
        if now_s - self._warned_s.get(form, -math.inf) >= _INTERVAL_S:
            self._warned_s[form] = now_s
            self._log.warning(f"{form}; logged at most once a minute", *fields)
