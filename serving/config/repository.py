"""Read the models of a path: a repository's folder, a ``ps.json``, a v3.0 inference JSON or one model's folder."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from os.path import abspath, isdir, isfile  # these return False for an impossible path; Path.is_file raises
from pathlib import Path
from typing import Any

from kernels.errors import HotrowError
from serving.config.inference import name_after, read_inference_config
from serving.config.model_directory import (
    entries_without_version,
    has_numbered_entries,
    is_dead_link,
    is_model_directory,
    read_model_directory,
    read_version,
    version_number,
    versions_of,
    why_unreadable,
)
from serving.config.models import ModelConfig, ParameterServerConfig
from serving.config.ps import PS_KEYS, check_named_tables, read_ps_config
from serving.config.row_dtypes import with_row_dtypes
from serving.config.tiers import HashMapConfig, PersistentDbConfig
from serving.config.version_policy import CONFIG_FILE, VersionPolicy, read_triton_config
from serving.errors import ConfigError, ModelFileError, UnknownModelError, about, did_you_mean
from serving.model.manifest import GoOn
from serving.model.names import MODEL_NAME
from serving.model.regular_file import is_absent, real_path
from serving.model.strict_json import read_json

PS_FILE = "ps.json"
_SHOWN_FAULTS = 5  # of the versions of one model


@dataclass(frozen=True)
class ModelFolder:
    """One model's folder in a repository, whose versions are read one by one.

    Attributes:
        name: the model's name.
        versions: the folders of the versions, by number; none of a model that needs no graph.
    """

    name: str
    versions: Mapping[int, Path]
    _looked_up: ModelConfig | None
    _directory: Path
    _ps: ParameterServerConfig
    _policy: VersionPolicy
    _known: dict[int, ModelConfig] = field(default_factory=dict)  # versions with tables, which are read once

    @classmethod
    def of(cls, directory: Path, ps: ParameterServerConfig, policy: VersionPolicy | None = None) -> "ModelFolder":
        """Read the names in a folder, and its ``config.pbtxt`` if there is no ``policy``.

        Raises:
            ConfigError: ``config.pbtxt`` cannot be accepted.
            ModelFileError: the folder cannot be read.
        """
        if fault := why_unreadable(directory):
            raise ModelFileError(directory, fault)
        policy = read_triton_config(directory).policy if policy is None else policy
        looked_up = _looked_up(directory, ps)
        versions = versions_of(directory) if looked_up is None else {}
        return cls(directory.name, versions, looked_up, directory, ps, policy)

    def chosen(self, broken: Collection[int] = ()) -> Sequence[int]:
        """Return the versions to serve, newest first.

        Args:
            broken: versions that cannot be loaded; the policy chooses among the others.

        Raises:
            ConfigError: the policy names a version that is not there.
            ModelFileError: there is no version.
        """
        if self._looked_up is not None:
            return [self._looked_up.version]
        if self.is_incomplete:
            faults = sorted(entries_without_version(self._directory).items(), reverse=True)
            reasons = "; ".join(f"{number} {reason}" for number, reason in faults[:_SHOWN_FAULTS])
            if len(faults) > _SHOWN_FAULTS:
                reasons += f"; and {len(faults) - _SHOWN_FAULTS} more"
            raise ModelFileError(self._directory, f"has no version: {reasons or 'it is empty'}")
        return self._policy.choose(self.versions, str(self._directory / CONFIG_FILE), broken)

    def read(self, version: int, go_on: GoOn | None = None, loaded: Collection[ModelConfig] = ()) -> ModelConfig:
        """Read a version with the settings of ``ps.json``; its files are checked against its manifest.

        See ``read_version`` for ``go_on``. A version that shares the tables of a ``loaded`` version needs no other
        folder.

        Raises:
            ConfigError: a configuration cannot be accepted.
            ModelFileError: a file is missing or does not match the manifest.
        """
        if self._looked_up is not None:
            return self._looked_up
        config = self._known.get(version)
        if config is None:
            config = read_version(self.versions[version], go_on, [*loaded, *self._known.values()])
            if config.of_tables not in loaded:  # whose folder may have other files now
                self._known[config.of_tables.version] = config.of_tables
        _check_key_type(config, self._ps)
        return config if self._listed is None else _as_listed(config, self._listed, self._ps)

    def read_to_serve(
        self, version: int, go_on: GoOn | None = None, loaded: Collection[ModelConfig] = ()
    ) -> ModelConfig:
        """Read a version that is loaded alone, with the row types of the tiers; see ``read``."""
        ps, config = self._ps, self.read(version, go_on, loaded)
        check_named_tables(ps.volatile_tiers, [config], ps.source, of_these_models_only=True)
        return with_row_dtypes(config, ps.volatile_tiers, ps.persistent_db, ps.source)

    @property
    def is_incomplete(self) -> bool:
        """Whether there is nothing to serve: no version, and no model that needs none."""
        return not self.versions and self._looked_up is None

    @property
    def _listed(self) -> ModelConfig | None:
        return _listed_in(self._ps, self.name)


def read_repository(
    path: str | Path, faults: list[HotrowError] | None = None, only_versions: bool = False
) -> ParameterServerConfig:
    """Read the models of ``path``, each with a version, and the tiers that hold their rows.

    - A repository's folder has one or several versions of each model, see ``VersionPolicy``. A ``ps.json`` next to the
      models has the tiers. Without model folders the models are those that ``ps.json`` lists.
    - A ``ps.json`` has the models that it lists. If it lists none, the models are those of its folder.
    - The folder of one model has this model, and the tiers of the ``ps.json`` of its repository.
    - A model that ``ps.json`` lists without a dense network needs no ``graph.json`` in its folder.

    Without a ``ps.json`` all rows are in memory. The model of a JSON file has the version of its graph's folder, or
    version 1.

    Args:
        path: a folder or a file.
        faults: an empty list. A faulty model is left out, and its fault is added to the list instead of being raised.
        only_versions: leave out models without a version; a repository may then be empty.

    Raises:
        ConfigError: the path does not exist, has no models, or has a configuration that cannot be accepted.
        ModelFileError: a file of a model is missing or does not match the manifest.
    """
    path = Path(path)
    try:
        return _read(path, faults, only_versions)
    except OSError as err:  # the name is too long, or the folder cannot be listed
        raise ConfigError(str(err.filename or path)[:200], "", f"cannot be read: {err.strerror}") from err


def models_folder(path: Path) -> Path | None:
    """Return the folder whose folders are the models of a repository; None if a JSON file or one folder is a model.

    Raises:
        ConfigError: the path does not exist, or a configuration cannot be accepted.
    """
    if path.is_dir():
        is_listed = isfile(path / PS_FILE) and not _has_folders(path) and read_ps_config(path / PS_FILE, []).models
        return None if is_model_directory(path) or is_listed else path
    if not _has(read_json(path), *PS_KEYS) or read_ps_config(path, []).models:
        return None
    return path.parent


def open_model_folder(folder: Path, name: str, policy: VersionPolicy | None = None) -> ModelFolder:
    """Look at one model of a repository.

    Args:
        folder: ``models_folder`` of the repository.
        name: the model's name.
        policy: which versions to serve; None: as its ``config.pbtxt`` says.

    Raises:
        UnknownModelError: there is no such model.
        ConfigError: ``ps.json`` or the model's ``config.pbtxt`` cannot be accepted.
        ModelFileError: the model's folder cannot be read.
    """
    directories = {directory.name: directory for directory in _model_directories(folder)}
    if name not in directories:
        close = did_you_mean(name, directories)
        raise UnknownModelError(f"no model {name[:64]!r} is in the repository{close}")
    return ModelFolder.of(directories[name], _tiers_of(folder, []), policy)


def model_names(folder: Path) -> Sequence[str]:
    """Return the names of the models of a repository, also of those that cannot be read.

    Raises:
        ConfigError: the folder cannot be listed.
    """
    try:
        return [directory.name for directory in _model_directories(folder)]
    except OSError as err:
        raise ConfigError(str(folder), "", f"cannot be read: {err.strerror}") from err


def incomplete_entries(folder: Path, name: str) -> dict[int, str]:
    """Return why entries with the name of a version are not versions, by number.

    Number 0 stands for the folder itself, if it cannot be read.
    """
    if fault := why_unreadable(folder / name):
        return {0: fault}
    found = entries_without_version(folder / name)
    with suppress(HotrowError):
        model = open_model_folder(folder, name) if found else None
        if model is not None and not model.versions and not model.is_incomplete:
            return {}  # a lookup-only model needs no graph
    return found


def read_model(path: str | Path) -> ModelConfig:
    """Read one model from its folder (``read_model_directory``) or from its v3.0 inference JSON.

    Raises:
        ConfigError: the file has another kind, or a configuration cannot be accepted.
        ModelFileError: there is no model, or a file does not match the manifest.
    """
    if str(path) == "":  # the current folder would be a surprise
        raise ConfigError("", "", "expected a path, got ''")
    if not isfile(path):
        return read_model_directory(path)
    if not _has(read_json(path), "inference"):
        reason = (
            "expected a model's folder, or an inference JSON (with 'inference'); the models that a ps.json lists are"
            " loaded by ParameterServer.from_config, or served by `hotrow serve`"
        )
        raise ConfigError(str(path), "", reason)
    return read_inference_config(path, name_after(Path(path)))


def _read(path: Path, faults: list[HotrowError] | None, only_versions: bool) -> ParameterServerConfig:
    if not path.exists():
        raise ConfigError(str(path), "", "no such file or folder")
    if path.is_dir():
        if is_model_directory(path):
            return _read_model_folder(path)
        return _read_lookup_folder(path) or _read_folder(path, faults, only_versions)
    document = read_json(path)
    if _has(document, "inference"):
        return _alone(read_inference_config(path, name_after(path)))
    if _has(document, *PS_KEYS):
        ps = read_ps_config(path, faults)
        return _listed(ps) if ps.models or faults else _of_folders(ps, path.parent, faults, only_versions)
    hints = (did_you_mean(key, ("inference", *PS_KEYS)) for key in document) if isinstance(document, dict) else ()
    reason = "expected an inference JSON (with 'inference') or a ps.json (with 'models')"
    raise ConfigError(str(path), "", reason + next(filter(None, hints), ""))


def read_tiers(directory: str | Path, config: ModelConfig) -> ParameterServerConfig | None:
    """Read the ``ps.json`` of the repository of one model.

    Args:
        directory: the model's or the version's folder.
        config: the model in this folder.

    Returns:
        the tiers, with the model as ``ps.json`` lists it, or None if there is no ``ps.json`` next to the models.

    Raises:
        ConfigError: ``ps.json`` cannot be accepted, or does not fit the model.
        ModelFileError: ``ps.json`` lists the model, and a file of the model is missing or damaged.
    """
    ps = _ps_of(directory, config.name)
    if ps is None:
        return None
    _check_key_type(config, ps)
    listed = _listed_in(ps, config.name)
    served = config if listed is None else _as_listed(config, listed, ps)
    check_named_tables(ps.volatile_tiers, [served], ps.source, of_these_models_only=True)
    served = with_row_dtypes(served, ps.volatile_tiers, ps.persistent_db, ps.source)
    return ps.model_copy(update={"models": (served,)})


def _ps_of(directory: str | Path, name: str) -> ParameterServerConfig | None:
    """Read the ``ps.json`` of the repository of the model ``name``; raise only this model's faults."""
    folders = (Path(abspath(directory)), real_path(directory))  # the given path may be a link
    file = next((file for folder in folders if not is_absent(file := _ps_file_of(folder))), None)
    if file is None:
        return None
    faults: list[HotrowError] = []
    ps = read_ps_config(file, faults)
    for fault in faults:
        if fault.model == name:
            raise fault
    return ps


def _ps_file_of(folder: Path) -> Path:
    """Return the ``ps.json`` next to the model whose folder or version folder is ``folder``."""
    return (folder.parent.parent if version_number(folder) else folder.parent) / PS_FILE


def _has(document: Any, *keys: str) -> bool:
    return isinstance(document, dict) and not document.keys().isdisjoint(keys)


def _read_model_folder(path: Path) -> ParameterServerConfig:
    config = read_model_directory(path)
    ps = read_tiers(path, config)
    return _alone(config) if ps is None else _listed(ps)


def _read_lookup_folder(path: Path) -> ParameterServerConfig | None:
    """Read the model of a folder without a ``graph.json``, or return None if no ``ps.json`` lists it as lookup-only."""
    folder = real_path(path)
    version = version_number(folder)
    name = folder.parent.name if version else folder.name
    ps = _ps_of(path, name)
    listed = None if ps is None else _listed_in(ps, name)
    if ps is None or listed is None or listed.graph_file is not None:
        return None
    model = _with_version(listed)
    tables = real_path(model.tables[0].file).parent
    if version and tables.parent == folder.parent and version_number(tables) != version:
        raise ConfigError(ps.source, f"models: {name!r}", f"names {tables}, but version {version} is opened")
    served = model.model_copy(update={"version": version or model.version})
    return ps.model_copy(update={"models": (served,)})


def _alone(config: ModelConfig) -> ParameterServerConfig:
    return _in_memory((_with_version(config),), config.key_type, config.source)


def _in_memory(models: tuple[ModelConfig, ...], key_type: Any, source: str) -> ParameterServerConfig:
    return ParameterServerConfig(
        models=models,
        volatile_tiers=(HashMapConfig(),),
        persistent_db=PersistentDbConfig(),
        key_type=key_type,
        source=source,
    )


def _listed(ps: ParameterServerConfig) -> ParameterServerConfig:
    return ps.model_copy(update={"models": tuple(map(_with_version, ps.models))})


def _listed_in(ps: ParameterServerConfig, name: str) -> ModelConfig | None:
    return next((model for model in ps.models if model.name == name), None)


def _looked_up(directory: Path, ps: ParameterServerConfig) -> ModelConfig | None:
    """Return the model that ``ps.json`` lists without a dense network, so that its folder needs no graph."""
    listed = _listed_in(ps, directory.name)
    is_only_listed = listed is not None and listed.graph_file is None and not is_model_directory(directory)
    return _with_version(listed) if listed is not None and is_only_listed else None


def _with_version(config: ModelConfig) -> ModelConfig:
    """Give a model without a version version 1, because clients name a version and Triton's first is 1."""
    version = config.version or version_number(real_path(config.source).parent) or 1
    return config.model_copy(update={"version": version})


def _read_folder(path: Path, faults: list[HotrowError] | None, only_versions: bool) -> ParameterServerConfig:
    ps = _tiers_of(path, faults)
    if (ps.models or faults) and not _has_folders(path):
        return _listed(ps)
    return _of_folders(ps, path, faults, only_versions)


def _tiers_of(folder: Path, faults: list[HotrowError] | None) -> ParameterServerConfig:
    file = folder / PS_FILE
    return _in_memory((), "I64", str(file)) if is_absent(file) else read_ps_config(file, faults)


def _of_folders(
    ps: ParameterServerConfig, path: Path, faults: list[HotrowError] | None, only_versions: bool
) -> ParameterServerConfig:
    """Return the models of ``path``'s folders, with the settings and tiers of ``ps``."""
    directories = _model_directories(path)
    if not directories and not only_versions:
        raise ConfigError(str(path), "", "no model in it: expected <model>/<version>/graph.json")
    listed = {model.name: model for model in ps.models}
    served: list[ModelConfig] = []
    for directory in directories:
        with about(directory.name, faults):
            if only_versions and directory.name not in listed and not versions_of(directory):
                continue
            model = ModelFolder.of(directory, ps)
            served += map(model.read, model.chosen())
    names = {config.name for config in served} | {directory.name for directory in directories}
    for name in sorted(listed.keys() - names):
        with about(name, faults):
            raise ConfigError(ps.source, "models", f"lists {name!r}, which has no folder in {path}")
    if not faults:  # otherwise a model that cannot be read may have the table
        check_named_tables(ps.volatile_tiers, served, ps.source)
    models = tuple(with_row_dtypes(config, ps.volatile_tiers, ps.persistent_db, ps.source) for config in served)
    return ps.model_copy(update={"models": models})


def _model_directories(path: Path) -> Sequence[Path]:
    """Return the folders that have an entry called like a version, and those that may have one but cannot be read.

    Hidden folders are ignored, and so is a folder without rights whose name no model can have, as ``lost+found``. A
    dead link is a folder that cannot be read.
    """
    entries = [child for child in path.iterdir() if not child.name.startswith(".")]
    folders = [entry for entry in entries if isdir(entry) or is_dead_link(entry)]
    return sorted(folder for folder in folders if has_numbered_entries(folder) or _is_hidden(folder))


def _has_folders(path: Path) -> bool:
    """Whether a folder has folders of models; a dead link alone does not make it a repository."""
    return any(map(isdir, _model_directories(path)))


def _is_hidden(folder: Path) -> bool:
    return bool(MODEL_NAME.fullmatch(folder.name) and why_unreadable(folder))


def _check_key_type(config: ModelConfig, ps: ParameterServerConfig) -> None:
    if config.key_type != ps.key_type and Path(ps.source).exists():
        reason = f"means {ps.key_type} keys for all models, but {config.source} has {config.key_type}"
        raise ConfigError(ps.source, "supportlonglong", reason)


def _as_listed(config: ModelConfig, listed: ModelConfig, ps: ParameterServerConfig) -> ModelConfig:
    """Return the served version with the settings of ``ps.json``, which must name the same files."""
    if config.base is not None:
        reason = f"version {config.version} shares the tables of version {config.base.version}, which a model that is"
        raise ConfigError(ps.source, f"models: {listed.name!r}", f"{reason} listed here cannot; list no models")
    for ours, theirs in zip_longest(_files(config), _files(listed)):
        if ours != theirs:
            reason = f"names {theirs}, but the served version {config.version} has {ours}"
            raise ConfigError(ps.source, f"models: {listed.name!r}", reason)
    update = {"version": config.version, "digest": config.digest, "onnx_file": config.onnx_file}
    return listed.model_copy(update=update)


def _files(config: ModelConfig) -> Sequence[Path]:
    files = [config.graph_file, config.dense_file, *(table.file for table in config.tables)]
    return [real_path(file) for file in files if file is not None]
