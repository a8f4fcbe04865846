"""What the path of a repository has: its tiers, its models and their versions."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from kernels.errors import HotrowError
from serving.config import (
    ModelConfig,
    ParameterServerConfig,
    VersionPolicy,
    models_folder,
    read_repository,
    read_versions,
    version_folders,
)
from serving.config.control import EVERY_MODEL, ControlMode
from serving.errors import ConfigError, UnknownModelError, did_you_mean, is_about, is_about_a_model

#: The served versions of each model.
Versions = Mapping[str, Sequence[int]]


class ModelSource:
    """Reads the models of a repository at the start, and later the versions of one model. Not safe for threads."""

    def __init__(self, path: str | Path, control: ControlMode, startup: Sequence[str]) -> None:
        """Take the arguments of ``ModelRepository``; nothing is read."""
        self.path = Path(path)
        self._control = control
        self._startup = startup
        self._folder: Path | None = None  # of the models, if versions can come and go
        self._marks: dict[str, tuple[object, ...]] = {}  # of ``version_folders`` at the last look

    @property
    def can_change(self) -> bool:
        """Whether versions can come and go; a JSON file and the folder of one model stay as they are."""
        return self._folder is not None

    @property
    def names(self) -> Collection[str]:
        """The models that the folder had at the last look; none if versions cannot come and go."""
        return self._marks.keys()

    def read_start(self, wanted: Versions | None) -> tuple[ParameterServerConfig, Sequence[ModelConfig]]:
        """Return the tiers and the models to load at the start.

        Args:
            wanted: the versions that other processes serve already; None: the control mode decides.

        Raises:
            ConfigError, ModelFileError: see ``ModelRepository.load``.
        """
        folder = models_folder(self.path) if self._control != "none" or wanted is not None else None
        if self._control != "none":
            if folder is None:
                reason = f"control mode {self._control!r} needs a folder of models, <model>/<version>/graph.json"
                raise ConfigError(str(self.path), "", reason)
            self._marks = version_folders(folder)
        self._folder = folder
        faults: list[HotrowError] | None = [] if self._control == "explicit" or (wanted and folder) else None
        ps = read_repository(self.path, faults)
        if wanted is not None and folder is not None:
            self._marks = dict.fromkeys(self._marks, ())  # the first look finds what has changed since
            policies = {name: VersionPolicy.of_versions(numbers) for name, numbers in wanted.items()}
            return ps, [one for name, policy in policies.items() for one in read_versions(folder, name, policy)]
        return ps, ps.models if faults is None else self._chosen(ps.models, faults)

    def read_model(self, name: str, policy: VersionPolicy | None) -> Sequence[ModelConfig]:
        """Return the versions of a model that are to be served.

        Args:
            name: a folder of the repository.
            policy: chooses the versions; None: as the model's ``config.pbtxt`` says.

        Raises:
            UnknownModelError: the repository has no such model.
            ConfigError, ModelFileError: a version is broken.
        """
        if self._folder is None:
            raise UnknownModelError("the repository is not a folder of models")
        return read_versions(self._folder, name, policy)

    def changed(self) -> Iterable[str]:
        """Look at the folder again, and return the models that are new or have changed since the last look."""
        if self._folder is None:
            return ()
        before, self._marks = self._marks, version_folders(self._folder)
        return [name for name, mark in self._marks.items() if mark != before.get(name)]

    def forget(self, name: str) -> None:
        """Have the next look return a model as changed."""
        self._marks[name] = ()

    def _chosen(self, models: Sequence[ModelConfig], faults: Sequence[HotrowError]) -> Sequence[ModelConfig]:
        """Return the models of the start in the mode ``"explicit"``; the others may be faulty."""
        names = {config.name for config in models}
        every = EVERY_MODEL in self._startup
        for fault in faults:
            if every or any(is_about(fault, name) for name in self._startup) or not is_about_a_model(fault):
                raise fault
        for name in self._startup:
            if name not in names and name != EVERY_MODEL:
                raise ConfigError(str(self.path), "", f"no model {name[:64]!r} to load{did_you_mean(name, names)}")
        return [config for config in models if every or config.name in self._startup]
