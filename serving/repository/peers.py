"""The other processes that serve the same models."""

from collections.abc import Collection, Sequence
from typing import Protocol

from serving.config import ModelConfig, ParameterServerConfig
from serving.errors import VersionConflictError
from serving.repository.source import Versions


class Peers(Protocol):
    """The other processes that serve the same models from the same tables.

    Attributes:
        leads: whether this process decides which versions all of them serve. It alone writes the tables.
    """

    leads: bool

    def shared(self, ps: ParameterServerConfig) -> ParameterServerConfig:
        """Return the tiers through which the processes share their tables."""

    def versions(self) -> Versions | None:
        """Return the versions to serve from the start; None: those that the repository has."""

    def follow(self, versions: Versions) -> Collection[str]:
        """Have every other process serve these versions; raise WorkerError if a process could not follow.

        Returns:
            see ``ModelRepository.follow``.
        """

    def renew(self, model: str) -> Versions | None:
        """Make the leading process load the files that a model's folder has now, and return ``versions``."""


def check_same(models: Sequence[ModelConfig], served: Versions | None) -> None:
    """Check that other processes serve these models from the same files, if they serve any."""
    ours = {(model.name, str(model.version), model.digest) for model in models}
    theirs = {(name, *item) for name, versions in (served or {}).items() for item in versions.items()}
    if served is not None and ours != theirs:
        now, before = (
            " and ".join(
                f"version {version} of {name!r} with digest {digest}" for name, version, digest in sorted(keys)
            )
            for keys in (ours - theirs, theirs - ours)
        )
        reason = f"the other processes serve {before or 'the other models'}, but the files are {now or 'gone'} now"
        raise VersionConflictError(f"{reason}; restart the server, or in the control mode none send it SIGHUP")
