"""The folders of a model repository: ``<model>/<version>/graph.json`` and the files next to it."""

import os
from collections.abc import Collection
from contextlib import suppress
from os.path import exists, isdir, isfile, islink, lexists  # False where Path's methods raise, as without rights
from pathlib import Path

from serving.config.inference import read_version_graph
from serving.config.models import ModelConfig
from serving.errors import ModelFileError
from serving.model.dense_file import check_dense_size
from serving.model.graph import is_network_file, read_model_graph
from serving.model.manifest import (
    MANIFEST_NAME,
    GoOn,
    Manifest,
    SharedTables,
    check_size,
    digest_of_files,
    read_manifest,
    sha256_of,
    verify_manifest,
)
from serving.model.regular_file import is_absent, real_path
from serving.model.sparse_file import COLUMNS, open_sparse

GRAPH_FILE = "graph.json"


def read_model_directory(path: str | Path) -> ModelConfig:
    """Read a version directory, or the newest version of a model directory; see ``read_version``.

    A folder with a ``graph.json`` or a ``manifest.json`` is a version, even if this file is a pipe or a dead link.

    Raises:
        ModelFileError: there is no version, or a file does not match the manifest.
        ConfigError: ``graph.json`` cannot be accepted.
    """
    try:
        directory = real_path(path)
        (directory / GRAPH_FILE).is_file()  # raises for an impossible path
    except (OSError, ValueError) as err:
        raise ModelFileError(str(path)[:200], f"cannot be a model's folder: {err}") from err
    is_version = any(lexists(directory / name) for name in (GRAPH_FILE, MANIFEST_NAME))
    return read_version(path if is_version else _newest_version(directory))


def read_version(path: str | Path, go_on: GoOn | None = None, known: Collection[ModelConfig] = ()) -> ModelConfig:
    """Read a version directory.

    It has a ``graph.json``. If it has a ``manifest.json``, its files are checked against the manifest.
    The digest of a version is that of its manifest, or of its files; see ``serving.model.manifest``.
    The folders have the names of model and version: ``dcn/3/graph.json`` is version 3 of ``dcn``. A folder whose name
    is not an integer is a model without a version. ``.<version>.tmp`` folders are unfinished exports, not versions.
    If the manifest names the version whose tables it shares, this version is read too.

    Args:
        path: the directory.
        go_on: called between parts of the files that are hashed; it raises an error to end the hashing.
        known: versions of this model that were read or loaded before. Their folders may be gone.

    Raises:
        ModelFileError: the directory cannot be read, or a file does not match the manifest; or the version whose tables
            it shares is missing, has another digest, has no tables, or does not fit its network.
        ConfigError: ``graph.json`` cannot be accepted.
    """
    given, directory = Path(os.path.abspath(path)), real_path(path)
    if fault := why_unreadable(given):
        raise ModelFileError(given, fault)
    named = given if version_number(given) else directory  # a version may be a link to a folder of any name
    version = version_number(named)
    manifest = None if is_absent(directory / MANIFEST_NAME) else verify_manifest(directory, go_on=go_on)
    if manifest is not None:
        _check_place(named, manifest)
    # Before the digest, because the graph's size is checked, and a digest reads files of any size.
    config = read_version_graph(directory / GRAPH_FILE, named.parent.name if version else named.name, version)
    digest = ""
    if manifest is not None:
        digest = sha256_of(directory / MANIFEST_NAME)
    elif version:  # otherwise its tables have no names of their own, and the digest is not worth reading every file
        digest = digest_of_files(directory, check_sizes(config), go_on)  # a wrong size is not worth reading either
    config = config.model_copy(update={"digest": digest})
    if manifest is not None and manifest.tables is not None:
        return _on_shared_tables(config, manifest.tables, named, go_on, known)
    return config.model_copy(update={"table_tag": f"{version}-{config.short_digest}" if version else ""})


def _on_shared_tables(
    config: ModelConfig, shared: SharedTables, directory: Path, go_on: GoOn | None, known: Collection[ModelConfig]
) -> ModelConfig:
    """Return a version without tables with those of the version that its manifest names; see ``read_version``."""
    at, what = directory / MANIFEST_NAME, f"tables: shares those of version {shared.version}"
    if not config.version:
        raise ModelFileError(at, f"{what}, but is in no version folder")
    wanted = shared.version, shared.digest
    base = next((other for other in known if (other.version, other.digest) == wanted), None)
    folder = directory.parent / str(shared.version)
    if base is None and is_absent(folder):
        raise ModelFileError(at, f"{what}, but {folder} is missing")
    if base is None:
        its_manifest = None if is_absent(folder / MANIFEST_NAME) else read_manifest(folder)
        if its_manifest is not None and its_manifest.tables is not None:
            reason = f"which itself shares those of version {its_manifest.tables.version}; name a version with tables"
            raise ModelFileError(at, f"{what}, {reason}")
        base = read_version(folder, go_on)
    if base.digest != shared.digest:
        raise ModelFileError(at, f"{what} with digest {shared.digest}, but {folder} has digest {base.digest}")
    for name, ours, its in zip(_INPUTS, _inputs(config), _inputs(base), strict=True):
        if ours != its:
            raise ModelFileError(at, f"{what}, but its graph has another {name}: expected {its}, found {ours}")
    run = None if base.stream is None else base.stream.run
    if config.stream is not None and config.stream.run != run:
        its_run = "no training run" if run is None else f"the training run {run!r}"
        raise ModelFileError(at, f"{what}, which follow {its_run}, but its run is {config.stream.run!r}")
    return config.on_tables_of(base)


_INPUTS = "tables", "key_type", "slot keys", "dense_dim", "max_batchsize", "GPU cache"


def _inputs(config: ModelConfig) -> tuple[object, ...]:
    """What a version must have in common with the version whose tables it shares; see ``_INPUTS``."""
    names = "name", "dim", "slots", "combiner", "default_value", "slot_ranges", "sequences", "paddings"
    tables = [tuple(getattr(table, name) for name in names) for table in config.tables]
    return tables, config.key_type, config.slot_keys, config.dense_dim, config.max_batchsize, config.gpu_cache


def check_sizes(config: ModelConfig) -> Collection[Path]:
    """Check the sizes of a model's tables and of its network, and return the real paths of these files.

    Raises:
        ModelFileError: a file of a table is missing, or a file has the wrong size.
    """
    files: set[Path] = set()
    for table in config.tables:
        open_sparse(table.file, table.dim, config.key_type, table.row_layout)
        files |= {real_path(file) for file in (table.file, *(table.file / column for column in COLUMNS))}
    graph_file, weights = config.graph_file, config.dense_file
    if graph_file is not None and weights is not None and isfile(weights):
        if is_network_file(weights):
            check_size(weights)
        else:
            check_dense_size(weights, read_model_graph(graph_file, weights))
        files.add(real_path(weights))
    return files


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
    return any(lexists(folder / GRAPH_FILE) for folder in (directory, *versions_of(directory).values()))


def version_number(directory: Path) -> int:
    """Return the version in a folder's name, or 0 if the name is not a version."""
    return _number(directory.name)


def versions_of(directory: Path) -> dict[int, Path]:
    """Return the version directories of a model directory by their numbers; none if it cannot be read.

    Every folder that is called like a version is a version, also a damaged folder. A folder in which a copy has not
    begun is not.
    """
    return {version_number(entry): entry for entry in _numbered(directory) if not _why_no_version(entry)}


def entries_without_version(directory: Path) -> dict[int, str]:
    """Return the entries of a model directory that are called like versions but are not, with the reason."""
    return {version_number(entry): reason for entry in _numbered(directory) if (reason := _why_no_version(entry))}


def has_numbered_entries(directory: Path) -> bool:
    """Return whether a directory has an entry whose name is that of a version."""
    return any(map(_number, _names(directory)))


def why_unreadable(directory: Path) -> str:
    """Return why a directory cannot be listed or entered; an empty text if it can."""
    try:
        os.stat(directory / ".")
        os.listdir(directory)
    except FileNotFoundError as err:
        return "is a link to a folder that does not exist" if islink(directory) else f"cannot be read: {err.strerror}"
    except OSError as err:
        return f"cannot be read: {err.strerror}"
    return ""


def is_dead_link(entry: Path) -> bool:
    """Return whether a link leads to nothing."""
    return islink(entry) and not exists(entry)


def _numbered(directory: Path) -> list[Path]:
    return [directory / name for name in _names(directory) if _number(name)]


def _names(directory: Path) -> list[str]:
    """Return the names in a directory; none if it cannot be read."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _number(name: str) -> int:
    return int(name) if name.isascii() and name.isdecimal() and not name.startswith("0") else 0


def _why_no_version(entry: Path) -> str:
    with suppress(OSError), os.scandir(entry) as found:  # a load looks at every version, and most are in order
        if next(found, None) is not None:
            return ""
    if is_dead_link(entry):
        return ""
    if not isdir(entry):
        return "is not a folder"
    return "" if _names(entry) or why_unreadable(entry) else "is an empty folder"


def _newest_version(directory: Path) -> Path:
    if not directory.is_dir():
        raise ModelFileError(directory, "not a folder" if lexists(directory) else "no such file or folder")
    versions = versions_of(directory)
    if not versions:
        models = [name for name in sorted(_names(directory)) if versions_of(directory / name)]
        close = f"; this is a repository, and a model of it is {directory / models[0]}" if models else ""
        raise ModelFileError(directory, f"expected {GRAPH_FILE}, or version folders 1, 2, ... that hold one{close}")
    return versions[max(versions)]
