"""The versions that serve, as requests find them, and the versions that wait to serve."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from serving.config import ModelConfig
from serving.errors import UnknownModelError, did_you_mean
from serving.parameter_server.health import Readiness
from serving.repository.served_model import ServedModel
from serving.repository.source import Versions
from serving.repository.states import VersionStates
from serving.session import InferenceSession, ModelSession

logger = logging.getLogger("hotrow.repository")


class ServedVersions:
    """The versions of each model. Any thread may call a public method. A lock of the subclass guards changes."""

    def __init__(self) -> None:
        """Serve nothing."""
        # Replaced as a whole, never changed in place, so requests need no lock. Versions are newest first.
        self._models: dict[str, dict[int, ServedModel]] = {}
        # By model, oldest first: loaded versions whose tables have not reached their positions; replaced as a whole.
        self._waiting: dict[str, Sequence[ServedModel]] = {}
        self._wanted: dict[str, Collection[int]] = {}  # by model: the versions that are to serve
        self._states = VersionStates()

    def served(self) -> Versions:
        """The served versions of every model, newest first, and their digests."""
        return {
            name: {str(number): model.config.digest for number, model in versions.items()}
            for name, versions in self._models.items()
        }

    def models(self) -> Mapping[str, ModelSession]:
        """The sessions by model name: of each model's newest version."""
        return {name: next(iter(versions.values())).session for name, versions in self._models.items()}

    def versions(self, name: str) -> Sequence[int]:
        """The served versions of a model, newest first; raises UnknownModelError if there are none."""
        if name not in self._models:
            raise self._unknown(name)
        return tuple(self._models[name])

    def session(self, name: str, version: str = "") -> InferenceSession:
        """The session of a model with a dense network; see ``loaded``."""
        session = self.loaded(name, version).session
        if not isinstance(session, InferenceSession):
            raise UnknownModelError(f"model {name!r} has no dense network")
        return session

    def loaded(self, name: str, version: str = "") -> ServedModel:
        """A loaded version; raises UnknownModelError if this model or this version is not served.

        ``version`` is text that a client wrote, empty for the newest version.
        """
        model = self.find(name, version)
        if model is not None:
            return model
        versions = self._models.get(name)
        if versions is None:
            raise self._unknown(name)
        known = ", ".join(map(str, versions))
        raise UnknownModelError(
            f"no version {version[:20]!r} of model {name!r} is served; there is version {known}"
            if len(versions) == 1
            else f"no version {version[:20]!r} of model {name!r} is served; there are versions {known}"
        )

    def find(self, name: str, version: str = "") -> ServedModel | None:
        """See ``loaded``; None if this model or this version is not served, without a search for similar names."""
        versions = self._models.get(name, {})
        if not version:
            return next(iter(versions.values()), None)
        return next((model for number, model in versions.items() if version == str(number)), None)

    def begin(self, model: ServedModel, version: str) -> ServedModel:
        """Return a version that stays loaded until the caller calls its ``end``.

        Args:
            model: what ``loaded`` returned. If it has been dropped since then, another version may serve.
            version: what ``loaded`` got.

        Raises:
            UnknownModelError: this model or this version is not served any more.
        """
        while True:
            with suppress(UnknownModelError):
                model.begin()
                return model
            model = self.loaded(model.name, version)

    @contextmanager
    def use(self, name: str, version: str = "") -> Iterator[ServedModel]:
        """Keep a version loaded while the block runs; see ``loaded``."""
        model = self.begin(self.loaded(name, version), version)
        try:
            yield model
        finally:
            model.end()

    def readiness(self, model: ServedModel) -> Readiness:
        """Whether requests for a served model can succeed, by what is known of tiers and GPUs; never waits."""
        failed = f"{' and '.join(model.session.failed_devices)} failed"
        if not model.session.is_answering:
            return Readiness("not ready", failed)
        readiness = model.session.health.readiness()
        is_degraded = bool(model.session.failed_devices) and readiness.state == "ready"
        return Readiness("degraded", failed) if is_degraded else readiness

    def all_loaded(self) -> list[ServedModel]:
        """The served versions of all models, newest first."""
        return [model for versions in self._models.values() for model in versions.values()]

    def _unknown(self, name: str) -> UnknownModelError:
        known_models = ", ".join(repr(known) for known in sorted(self._models))
        close = did_you_mean(name, self._models)
        return UnknownModelError(f"no model {name[:64]!r} is served; there is {known_models or 'none'}{close}")

    def _loaded_versions(self, name: str) -> dict[int, ServedModel]:
        """The versions of a model that serve or wait; of two with one number, the version that waits is newer."""
        waiting = {model.config.version: model for model in self._waiting.get(name, ())}
        return {**self._models.get(name, {}), **waiting}

    def _waits(self, name: str) -> bool:
        """Whether a version waits that is to serve."""
        return any(model.config.version in self._wanted[name] for model in self._waiting.get(name, ()))

    def _settle(
        self, name: str, live: Mapping[int, ServedModel], older: Sequence[ServedModel], newer: Sequence[ServedModel]
    ) -> Sequence[ServedModel]:
        """Serve the versions ``live``. If there are any, or if all wanted versions serve, the others leave.

        Args:
            name: the model.
            live: versions that may answer.
            older: versions that waited before these came. They leave, too.
            newer: versions that go on waiting.

        Returns:
            the versions that leave.
        """
        wanted, before = self._wanted[name], self._models.get(name, {})
        stay, waits = before, older
        if wanted and (live or not any(model.config.version in wanted for model in (*older, *newer))):
            stay = {number: model for number, model in before.items() if number in wanted}
            waits = [model for model in older if model.config.version in wanted]
        versions = {**stay, **live}
        self._waiting = {other: models for other, models in {**self._waiting, name: (*waits, *newer)}.items() if models}
        newest_first = {number: versions[number] for number in sorted(versions, reverse=True)}
        self._models = {other: models for other, models in {**self._models, name: newest_first}.items() if models}
        for number, model in live.items():
            self._states.clear(name, number)
            logger.info("model %s: version %s serves%s", name, number, _of_files(model.config))
        return [model for model in (*before.values(), *older) if model not in (*versions.values(), *waits)]


def _of_files(config: ModelConfig) -> str:
    return f", digest {config.short_digest}" if config.digest else ""
