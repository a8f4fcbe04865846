"""Logs once if a model answers most keys with default values."""

import logging
import threading

from serving.batch import Batch
from serving.config import ModelConfig
from serving.parameter_server import ParameterServer

_FEWEST_KEYS = 1_000

_log = logging.getLogger(__name__)


class DefaultsWatch:
    """Counts the keys of one loaded model's requests. May be used from any thread."""

    def __init__(self, server: ParameterServer, config: ModelConfig) -> None:
        """Start at zero for the model of ``config`` in ``server``."""
        self._server, self._config = server, config
        self._lock = threading.Lock()  # guards the counts below
        self._keys = self._defaulted_keys = 0
        self._has_warned = False

    def note(self, batch: Batch, defaulted_keys: int) -> None:
        """Count an answered request, and warn once if more than half of all keys so far had no row."""
        if self._has_warned:
            return
        keys = batch.joined.keys.size
        with self._lock:
            self._keys += keys
            self._defaulted_keys += defaulted_keys
            if self._has_warned or self._keys < _FEWEST_KEYS or 2 * self._defaulted_keys <= self._keys:
                return
            self._has_warned = True
            keys, defaulted_keys = self._keys, self._defaulted_keys
        _log.warning(
            "model %r: %s of its first %s keys were answered with default values, most of them in table %r; are the "
            "keys hashed or encoded as in training?",
            *(self._config.name, f"{defaulted_keys:,}", f"{keys:,}", self._worst_table()),
        )

    def _worst_table(self) -> str:
        counters = self._server.counters()
        unknown = {
            table.name: counters[name].defaulted_keys
            for table in self._config.tables
            if (name := self._config.full_name(table)) in counters
        }
        return max(unknown, key=lambda name: unknown[name], default="")
