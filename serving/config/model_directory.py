"""The folders of a model repository: ``<model>/<version>/graph.json`` and the files next to it."""

from pathlib import Path

from serving.config.inference import read_version_graph
from serving.config.models import ModelConfig
from serving.errors import ModelFileError
from serving.model.manifest import MANIFEST_NAME, Manifest, verify_manifest

GRAPH_FILE = "graph.json"


def read_model_directory(path: str | Path) -> ModelConfig:
    """Read a version directory, or the newest complete version of a model directory.

    A version directory has a ``graph.json``. If it has a ``manifest.json``, its files are checked against the manifest.
    The folders have the names of model and version: ``dcn/3/graph.json`` is version 3 of ``dcn``. A folder whose name
    is not an integer is a model without a version. ``.<version>.tmp`` folders are unfinished exports, not versions.

    Args:
        path: the directory.

    Raises:
        ModelFileError: there is no version, or a file does not match the manifest.
        ConfigError: ``graph.json`` cannot be accepted.
    """
    try:
        directory = Path(path).resolve()
        is_version = (directory / GRAPH_FILE).is_file()
    except (OSError, ValueError) as err:
        raise ModelFileError(str(path)[:200], f"cannot be a model's folder: {err}") from err
    if not is_version:
        directory = _newest_version(directory)
    if (directory / MANIFEST_NAME).exists():
        _check_place(directory, verify_manifest(directory))
    version = version_number(directory)
    name = directory.parent.name if version else directory.name
    return read_version_graph(directory / GRAPH_FILE, name, version)


def _check_place(directory: Path, manifest: Manifest) -> None:
    """Refuse a version folder that was swapped with another version or moved to another model."""
    is_version = bool(version_number(directory))
    if is_version and (manifest.model, manifest.version) != (directory.parent.name, version_number(directory)):
        here = f"{directory.parent.name}/{directory.name}"
        reason = (
            f"expected the manifest of {here}, found that of {manifest.model}/{manifest.version}; if the folder was"
            " copied or renamed on purpose, correct 'model' and 'version' in this file, or remove it"
        )
        raise ModelFileError(directory / MANIFEST_NAME, reason)


def is_model_directory(directory: Path) -> bool:
    """Return whether a folder is a version or a model, not a repository."""
    return (directory / GRAPH_FILE).is_file() or bool(complete_versions(directory))


def version_number(directory: Path) -> int:
    """Return the version in a folder's name, or 0 if the name is not a version."""
    name = directory.name
    return int(name) if name.isascii() and name.isdecimal() and not name.startswith("0") else 0


def is_complete_version(directory: Path) -> bool:
    """Return whether a folder is a version with a graph."""
    return bool(version_number(directory)) and (directory / GRAPH_FILE).is_file()


def complete_versions(directory: Path) -> dict[int, Path]:
    """Return the version directories of a model directory by their numbers."""
    return {version_number(child): child for child in directory.iterdir() if is_complete_version(child)}


def _newest_version(directory: Path) -> Path:
    if not directory.is_dir():
        raise ModelFileError(directory, "no such directory")
    versions = complete_versions(directory)
    if not versions:
        raise ModelFileError(directory, f"expected {GRAPH_FILE}, or version folders 1, 2, ... that hold one")
    return versions[max(versions)]
