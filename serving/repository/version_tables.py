"""The tables that versions serve from: loaded once, and used by every version that shares them."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from kernels.device import Device
from serving.config import ModelConfig, bringing_tables
from serving.lookup import LookupSession, open_lookups
from serving.parameter_server import ParameterServer
from serving.parameter_server.table_files import Progress

_Key = tuple[str, int, str]  # the name, the version and the digest of the version that brings the tables


class VersionTables:
    """The loaded tables of one version, and its lookups with their caches on devices.

    Attributes:
        config: the version that brings the tables, as it was loaded.
        lookups: one per device.
        users: how many versions use them.
    """

    def __init__(self, key: _Key, config: ModelConfig, lookups: Sequence[LookupSession]) -> None:
        """Begin with one user."""
        self.key = key
        self.config = config
        self.lookups = tuple(lookups)
        self.users = 1

    def close(self) -> None:
        """Free the caches after the requests in flight."""
        with ExitStack() as stack:  # calls every close, also after one of them fails
            for lookup in self.lookups:
                stack.callback(lookup.close)


class TablesInUse:
    """All loaded tables. Loads take turns; tables may be released from any thread."""

    def __init__(self, server: ParameterServer) -> None:
        """Load into ``server``."""
        self._server = server
        self._lock = threading.Lock()  # guards the tables and their numbers of users
        self._tables: dict[_Key, VersionTables] = {}

    def configs(self, name: str) -> list[ModelConfig]:
        """The versions of a model that have brought tables."""
        return [tables.config for tables in list(self._tables.values()) if tables.config.name == name]

    def has(self, config: ModelConfig) -> bool:
        """Whether the tables of a version are loaded."""
        return _key(config) in self._tables

    def take(self, config: ModelConfig, devices: Sequence[Device], progress: Progress | None) -> VersionTables:
        """Use the tables of a version; the first user loads them and opens their caches.

        Raises:
            HotrowError: see ``ParameterServer.load_model`` and ``open_lookups``.
        """
        key = _key(config)
        with self._lock:
            tables = self._tables.get(key)
            if tables is not None:
                tables.users += 1
                return tables
        loaded = self._server.load_model(config, progress)
        with ExitStack() as opened:
            opened.callback(self._server.unload_model, loaded.name, loaded.version, loaded)
            tables = VersionTables(key, loaded, open_lookups(self._server, loaded, devices))
            opened.pop_all()
        with self._lock:
            self._tables[key] = tables
        return tables

    def release(self, tables: VersionTables, remove: Callable[[ModelConfig], None]) -> None:
        """End the use of tables; the last user closes their caches and removes them from the tiers."""
        with self._lock:
            tables.users -= 1
            if tables.users:
                return
            self._tables.pop(tables.key, None)
        try:
            tables.close()
        finally:
            remove(tables.config)

    def share_bounds(self, configs: Iterable[ModelConfig], leaving: Iterable[VersionTables]) -> None:
        """Share the room in RAM between tables that are not loaded yet; see ``ParameterServer.share_bounds``.

        Args:
            configs: the versions that will be loaded.
            leaving: the tables of each version that ``configs`` replace.
        """
        new = [config for config in bringing_tables(configs) if not self.has(config)]
        ends = [tables.config for tables, users in Counter(leaving).items() if users == tables.users]
        if new:
            self._server.share_bounds(new, ends)

    def close(self) -> None:
        """Close all caches. The tables stay loaded."""
        with self._lock:
            closed, self._tables = list(self._tables.values()), {}
        with ExitStack() as stack:
            for tables in closed:
                stack.callback(tables.close)


def _key(config: ModelConfig) -> _Key:
    of_tables = config.of_tables
    return of_tables.name, of_tables.version, of_tables.digest
