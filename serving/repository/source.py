"""The contents of a repository: its tiers, its models and their versions. A broken entry does not affect others."""

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import isdir  # False for an impossible path, where Path.is_dir raises
from pathlib import Path

from kernels.errors import HotrowError
from serving.config import (
    ModelConfig,
    ModelFolder,
    ParameterServerConfig,
    VersionPolicy,
    check_sizes,
    incomplete_entries,
    model_names,
    models_folder,
    open_model_folder,
    read_repository,
    read_triton_config,
)
from serving.errors import ConfigError, UnknownModelError, did_you_mean, printable
from serving.model.manifest import MANIFEST_NAME, Stamp, read_manifest, sha256_of, stamp_of
from serving.model.regular_file import is_absent
from serving.option_values import EVERY_MODEL, ControlMode
from serving.parameter_server.table_files import open_table_file

logger = logging.getLogger("hotrow.repository")

#: The served versions of each model, newest first, and their digests.
Versions = Mapping[str, Mapping[str, str]]
#: Maximum looks at the folder between two attempts to load a version whose files do not change.
_MOST_PAUSES = 63


@dataclass(slots=True)
class _Attempt:
    """The last try to serve what the folder of a model has.

    Attributes:
        mark: what the folder looked like.
        failures: how often loading this has failed.
        pauses: how many looks pass before the next try; None: it was loaded.
    """

    mark: object
    failures: int = 0
    pauses: int | None = 0


class ModelSource:
    """Reads the models of a repository at the start, and later one model. Not safe for threads, except ``incomplete``.

    Attributes:
        names: the models that the folder had at the last look.
        leaves_out_faults: whether the start goes on without a faulty version, which a later look finds: in the mode
            ``"poll"``, unless other processes serve the version.
        incomplete: why entries of the folder are not versions, by model and number; 0 stands for the model's folder.
    """

    def __init__(self, path: str | Path, control: ControlMode, startup: Sequence[str]) -> None:
        """Take the arguments of ``ModelRepository``; nothing is read."""
        self.path = Path(path)
        self.names: Collection[str] = ()
        self.leaves_out_faults = False
        self.incomplete: Mapping[tuple[str, int], str] = {}
        self._control = control
        self._startup = startup
        self._folder: Path | None = None  # of the models, if versions can come and go
        self._attempts: dict[str, _Attempt] = {}
        self._stamps: dict[tuple[str, int], Stamp] = {}  # of the versions at the start
        self._without_effect: dict[str, Sequence[str]] = {}  # the keys of each model's config.pbtxt that were logged

    @property
    def can_change(self) -> bool:
        """Whether versions can come and go; a JSON file and the folder of one model stay as they are."""
        return self._folder is not None

    def read_start(self, wanted: Versions | None) -> tuple[ParameterServerConfig, Sequence[ModelConfig]]:
        """Return the tiers and the models to load at the start.

        Args:
            wanted: the versions that other processes serve already; None: the control mode decides.

        Raises:
            ConfigError, ModelFileError: see ``ModelRepository.load``.
        """
        self.leaves_out_faults = self._control == "poll" and wanted is None
        self._folder = folder = models_folder(self.path) if self._control != "none" or isdir(self.path) else None
        if folder is None and self._control != "none":
            reason = f"control mode {self._control!r} needs a folder of models, <model>/<version>/graph.json"
            raise ConfigError(str(self.path), "", reason)
        if folder is None:
            self._warn_of_policy()
        else:
            self.look()
            marks = {name: self._mark(name)[0] for name in self.names}
            self._stamps = {key: stamp for name in self.names for key, stamp in _stamps(folder, name)}
        faults: list[HotrowError] | None = [] if self._control != "none" or (wanted is not None and folder) else None
        ps = read_repository(self.path, faults, only_versions=folder is not None)
        if folder is not None and not self.names:
            logger.warning("%s: no model in it; expected <model>/<version>/graph.json", folder)
        if wanted is not None and folder is not None:
            return ps, [config for name, versions in wanted.items() for config in self._read_wanted(name, versions)]
        if faults is None:
            return ps, ps.models
        if self._control == "explicit":
            return ps, self._chosen(ps.models, faults)
        for fault in faults:
            if not fault.model:
                raise fault
        loaded = {config.name for config in ps.models}
        self._attempts = {name: _Attempt(mark, pauses=None) for name, mark in marks.items() if name in loaded}
        return ps, ps.models

    def open(self, name: str, policy: VersionPolicy | None) -> ModelFolder:
        """Look at one model.

        Args:
            name: a folder of the repository.
            policy: chooses the versions; None: as the model's ``config.pbtxt`` says.

        Raises:
            UnknownModelError: the repository has no such model.
            ConfigError, ModelFileError: its folder or its policy cannot be read.
        """
        if self._folder is None:
            raise UnknownModelError("the repository is not a folder of models")
        return open_model_folder(self._folder, name, policy)

    def start_stamp(self, config: ModelConfig) -> Stamp | None:
        """Return the stamp of a version's files before ``read_start`` read them; None if they are not looked at."""
        return self._stamps.get((config.name, config.version))

    def stamp(self, config: ModelConfig) -> Stamp | None:
        """Return the stamp of a version's files now; see ``start_stamp``."""
        return None if self._folder is None else stamp_of(self._folder / config.name / str(config.version))

    def look(self) -> None:
        """Look at the names in the folder, and log what was not there before and is not served or not read.

        Raises:
            ConfigError: the folder cannot be listed.
        """
        if self._folder is None:
            return
        names = model_names(self._folder)
        incomplete = {
            (name, number): reason
            for name in names
            for number, reason in (incomplete_entries(self._folder, name) | self._absent_bases(name)).items()
        }
        for (name, number), reason in incomplete.items():
            if (name, number) not in self.incomplete:
                version = f": version {number}" if number else ""
                logger.warning("model %s%s %s", printable(name), version, reason)
        self.names, self.incomplete = names, incomplete
        for name in names:
            self._warn_of_keys(name, self._folder / name)

    def _absent_bases(self, name: str) -> dict[int, str]:
        """Return the versions that are gone although a version to serve shares their tables, which are open here."""
        absent: dict[int, str] = {}
        with suppress(HotrowError):  # a load raises it
            model = self.open(name, None)
            for number in model.chosen():
                version = model.versions.get(number)
                shared = (
                    None if version is None or is_absent(version / MANIFEST_NAME) else read_manifest(version).tables
                )
                if shared is not None and shared.version not in model.versions:
                    absent[shared.version] = f"is missing, and a restart needs it: version {number} shares its tables"
        return absent

    def _warn_of_policy(self) -> None:
        """Log that the folder of one model is served without its policy."""
        with suppress(HotrowError):
            if read_triton_config(self.path).policy != VersionPolicy():
                logger.warning("%s: its version_policy has no effect: serve its repository instead", self.path)

    def _warn_of_keys(self, name: str, directory: Path) -> None:
        with suppress(HotrowError):  # a load raises it
            keys = read_triton_config(directory).without_effect
            if keys and keys != self._without_effect.get(name):
                logger.warning("model %s: config.pbtxt: only Triton reads %s", printable(name), ", ".join(keys))
            self._without_effect[name] = keys

    def due(self) -> Iterable[str]:
        """Look at the folder, and return the models that have changed, and those whose last try failed some looks ago.

        The files of a version without a manifest must have stayed as they are since the last look, because only that
        says that they are whole.

        Raises:
            ConfigError: the folder cannot be listed.
        """
        self.look()
        due: list[str] = []
        self._attempts = {name: attempt for name, attempt in self._attempts.items() if name in self.names}
        for name in self.names:
            mark, has_manifests = self._mark(name)
            if mark is None:
                continue
            attempt = self._attempts.get(name)
            if attempt is None or attempt.mark != mark:
                attempt = self._attempts[name] = _Attempt(mark, pauses=0 if has_manifests else 1)
            if attempt.pauses == 0:
                due.append(name)
            elif attempt.pauses is not None:
                attempt.pauses -= 1
        return due

    def tried(self, name: str, *, failed: bool) -> None:
        """Note whether a model that was ``due`` is served as its folder says."""
        attempt = self._attempts[name]
        attempt.failures += failed
        attempt.pauses = None if not failed else min(2**attempt.failures, _MOST_PAUSES + 1) - 1

    def _mark(self, name: str) -> tuple[object, bool]:
        """What a model's folder looks like, and whether the versions to serve have manifests.

        None stands for a folder without versions; ``incomplete`` says why.
        """
        if (name, 0) in self.incomplete:
            return None, True
        try:
            model = self.open(name, None)
            if model.is_incomplete:
                return None, True
            chosen = [model.versions[number] for number in model.chosen() if number in model.versions]
        except HotrowError as err:
            return str(err), True
        has_manifests = not any(is_absent(version / MANIFEST_NAME) for version in chosen)
        return tuple(map(stamp_of, chosen)), has_manifests

    def _read_wanted(self, name: str, versions: Mapping[str, str]) -> Iterable[ModelConfig]:
        model = self.open(name, VersionPolicy.of_versions(map(int, versions)))
        return map(model.read_to_serve, model.chosen())

    def _chosen(self, models: Sequence[ModelConfig], faults: Sequence[HotrowError]) -> Sequence[ModelConfig]:
        """Return the models of the start in the mode ``"explicit"``; the others may be faulty."""
        names = {config.name for config in models}
        every = EVERY_MODEL in self._startup
        for fault in faults:
            if every or not fault.model or fault.model in self._startup:
                raise fault
        for name in self._startup:
            if name in self.names and name not in names:
                self.open(name, None).chosen()  # raises the reason
            if name not in names and name != EVERY_MODEL:
                raise ConfigError(str(self.path), "", f"no model {name[:64]!r} to load{did_you_mean(name, names)}")
        return [config for config in models if every or config.name in self._startup]


def with_digest(config: ModelConfig) -> ModelConfig:
    """Give a model outside of a version folder the digest of its files.

    Raises:
        ModelFileError: a file cannot be read.
    """
    if config.digest:
        return config
    check_sizes(config)
    digests = [sha256_of(file) for file in (config.graph_file, config.dense_file) if file is not None]
    digests += [open_table_file(config, table).digest() for table in config.tables]
    return config.model_copy(update={"digest": hashlib.sha256(" ".join(digests).encode()).hexdigest()})


def base_stamp(model: ModelFolder, number: int) -> dict[int, Stamp]:
    """Return the stamp of the version whose tables a version shares, by its number; nothing if it shares none."""
    with suppress(HotrowError, KeyError):  # a version that cannot be read has no stamp
        shared = read_manifest(model.versions[number]).tables
        if shared is not None:
            return {shared.version: stamp_of(model.versions[shared.version])}
    return {}


def _stamps(folder: Path, name: str) -> Iterable[tuple[tuple[str, int], Stamp]]:
    try:
        versions = open_model_folder(folder, name).versions
    except HotrowError:
        return ()
    return [((name, number), stamp_of(version)) for number, version in versions.items()]
