"""The rows of all embedding servers, for a ``Publisher`` in the NN worker. A feature group is a served table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from training.persia.config import EmbeddingConfig
from training.persia.signs import Keys, keys_of_group, servers_of, signs_of_group
from training.persia.wire import Message, Peer
from training.processes import Processes
from training.publishing.rows import PART_KEYS, Part


class ServerRows:
    """The rows of embedding servers; see ``PublishedRows``."""

    def __init__(
        self, config: EmbeddingConfig, servers: Sequence[Peer], quiet: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Have the servers note changes.

        Args:
            config: the features.
            servers: in the order of their numbers.
            quiet: inside its block, no row changes.

        Raises:
            RoleError: a server refuses.
        """
        self.names = tuple(config.groups)
        self.processes = Processes()
        self._config = config
        self._servers = servers
        self._quiet = quiet
        self._ask("note_changes")

    def changed(self) -> Iterator[Part]:
        """Yield the changes; see ``PublishedRows``."""
        with self._quiet():
            for server in self._servers:
                part = server.call("changed", begin=True)
                while part.arrays:
                    yield from self._by_group(part)
                    part = server.call("changed", begin=False)

    def present(self, keys: Mapping[str, Keys]) -> Iterator[Part]:
        """Yield rows; see ``PublishedRows``."""
        for group, signs in keys.items():
            feature = self._config.groups[group]
            of_group = keys_of_group(feature, signs.view(np.uint64))
            owners = servers_of(of_group, len(self._servers))
            for number, server in enumerate(self._servers):
                mine = of_group[owners == number]
                for first in range(0, mine.size, PART_KEYS):
                    found = server.call("present", {"keys": mine[first : first + PART_KEYS]}, dim=feature.dim)
                    yield from self._by_group(found)

    def commit(self) -> None:
        """Note what is published; see ``PublishedRows``."""
        self._ask("commit", all=False)

    def commit_all(self) -> None:
        """Note what is published; see ``PublishedRows``."""
        self._ask("commit", all=True)

    def close(self) -> None:
        """Do nothing: the servers end with the run."""

    def _by_group(self, message: Message) -> Iterator[Part]:
        """Yield the keys and vectors of each group. Without vectors, the keys have no row any more."""
        keys, vectors = message.arrays["keys"], message.arrays.get("vectors")
        for group, feature in self._config.groups.items():
            if feature.dim == message.facts["dim"]:
                is_of_group, signs = signs_of_group(feature, keys)
                if is_of_group.any():
                    of_group = None if vectors is None else vectors[is_of_group]
                    yield Part(group, signs.view(np.int64), of_group, message.facts["step"])

    def _ask(self, method: str, **facts: bool) -> None:
        for answer in [server.start(method, None, **facts) for server in self._servers]:
            answer.result()
