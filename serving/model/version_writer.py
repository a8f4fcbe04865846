"""Write one version of a model into a model repository: complete or absent, and never changed afterwards."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.errors import ConfigError, OutputError
from serving.model.atomic import atomic_directory, atomic_write, sync
from serving.model.calibration_file import CALIBRATION_FILE
from serving.model.manifest import MANIFEST_NAME, write_manifest
from serving.model.names import MODEL_NAME
from serving.model.records import Graph
from serving.model.statistics_file import statistics_path
from serving.model.strict_json import read_json
from serving.model.triton_config import TRITON_ENTRY, label_dim_in, triton_config

GRAPH_FILE, DENSE_FILE, ONNX_FILE = "graph.json", "dense.model", "dense.onnx"
_ENTRY_FILE, _CONFIG_FILE = "model.py", "config.pbtxt"
_OWN_NAMES = {
    DENSE_FILE,
    statistics_path(DENSE_FILE).name,
    ONNX_FILE,
    GRAPH_FILE,
    CALIBRATION_FILE,
    _ENTRY_FILE,
    MANIFEST_NAME,
    "__pycache__",
}
_log = logging.getLogger(__name__)

_TIERS_FILE = "ps.json"
_TIERS = {"supportlonglong": True, "models": [], "volatile_db": {"type": "parallel_hash_map"}}


def write_version(
    repository: Path, name: str, graph: Graph, write_files: Callable[[Path], None], version: int | None = None
) -> Path:
    """Write ``<repository>/<name>/<version>/``, and beside it what is not there yet: ``config.pbtxt``, ``ps.json``.

    All files of the version are synced in a hidden folder that is then renamed, so that a reader, a crash or a power
    cut sees the whole version or none. Writers of one model take turns, also those of several processes; hidden
    folders that a killed one left behind are deleted by the next.

    Args:
        repository: the model repository; made if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        graph: what the model's ``graph.json`` says.
        write_files: writes everything but ``model.py`` and ``manifest.json`` into the hidden folder it is given. When
            it raises, there is no version.
        version: at least 1; by default one more than the newest there.

    Returns:
        the version's folder.

    Raises:
        OutputError: the name or the version cannot be used, or the file system refuses.
        ConfigError: see ``check_output``.
    """
    check_output(repository, name, graph)
    folder = repository / name
    try:
        folder.mkdir(exist_ok=True)
        with _turn(folder):
            _remove_unfinished(folder)
            target = folder / str(_next_version(folder) if version is None else _free_version(folder, version))
            with atomic_directory(target) as unfinished:
                (unfinished / _ENTRY_FILE).write_text(TRITON_ENTRY, encoding="utf-8")
                write_files(unfinished)
                write_manifest(unfinished, name, int(target.name))
                # not sooner: what a failure left would stay, and describe this model to Triton in place of the next
                _write_if_absent(folder / _CONFIG_FILE, triton_config(name, graph))
                _write_if_absent(repository / _TIERS_FILE, json.dumps(_TIERS, indent=2) + "\n")
            sync(repository)
            _compare_with_config(folder / _CONFIG_FILE, graph)
    except OSError as err:
        raise OutputError(f"{folder}: cannot write the model: {err.strerror or err}") from err
    return target


def check_output(repository: Path, name: str, graph: Graph) -> None:
    """Check before hours of work that a model can be written under this name; make the repository's folder.

    Raises:
        OutputError: it cannot.
        ConfigError: a table has the name of one of the files beside it, or the repository's ``ps.json`` is not JSON or
            not of int64 keys, which all written models have.
    """
    check_model_name(name)
    _check_tiers(repository / _TIERS_FILE)
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise OutputError(f"{repository}: cannot be made: {err.strerror or err}") from err
    if not os.access(repository, os.W_OK | os.X_OK):
        raise OutputError(f"{repository}: cannot be written")
    check_table_names(graph)


def check_target(repository: Path, name: str, version: int | None = None) -> None:
    """Check that a version can be written, as far as that can be told without making anything.

    Args:
        repository: the model repository, which need not exist.
        name: the model's name.
        version: the version's number; None is one that is free.

    Raises:
        OutputError: the name or the version cannot be used, or a file is in the way, or a folder is not writable.
        ConfigError: see ``check_output``, of ``ps.json``.
    """
    check_model_name(name)
    _check_tiers(repository / _TIERS_FILE)
    folder = repository / name
    try:
        if version is not None:
            _free_version(folder, version)
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as err:
        raise OutputError(f"{folder}: cannot be read: {err.strerror or err}") from err
    if not there.is_dir():
        raise OutputError(f"{there}: expected a folder, found a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"{there}: cannot be written")


def check_model_name(name: str) -> None:
    """Check that servers take this name.

    Raises:
        OutputError: they do not.
    """
    if not MODEL_NAME.fullmatch(name):
        raise OutputError(f"model name {name!r}: expected 1 to 120 letters, digits, '_' or '-'")


def check_table_names(graph: Graph) -> None:
    """Check that no table has the name of one of the files beside it.

    Raises:
        ConfigError: one has.
    """
    for embedding in graph.embeddings:
        if embedding.table in _OWN_NAMES:
            raise ConfigError(graph.source, "layers", f"a table cannot be called {embedding.table!r}: a file is")


def _check_tiers(path: Path) -> None:
    """Check of a ``ps.json``, if there is one, what would keep servers from taking any model that is written here."""
    if not path.exists():
        return
    document = read_json(path)
    if not isinstance(document, dict):
        raise ConfigError(str(path), "", f"expected an object, got {json.dumps(document)[:64]}")
    said = document.get("supportlonglong")
    if said is not True and str(said).lower() != "true":
        came = json.dumps(said)[:64] if "supportlonglong" in document else "nothing"
        reason = f"expected true, as the model's keys are int64, but {came} came; write into another repository"
        raise ConfigError(str(path), "supportlonglong", reason)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait for other writers into this folder. The kernel ends the turn of a process that dies."""
    with (folder / ".export.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unfinished(folder: Path) -> None:
    """Delete hidden temporary folders; during a turn no living writer owns one."""
    for entry in folder.glob(".*.tmp"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _next_version(folder: Path) -> int:
    return 1 + max((int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()), default=0)


def _free_version(folder: Path, version: int) -> int:
    if version < 1:
        raise OutputError(f"version {version}: expected at least 1")
    if (folder / str(version)).exists():
        raise OutputError(f"{folder / str(version)}: this version exists, and a version is never changed")
    return version


def _write_if_absent(path: Path, text: str) -> None:
    """Leave a file alone that somebody may have changed."""
    if not path.exists():
        with atomic_write(path) as file:
            file.write(text.encode())


def _compare_with_config(path: Path, graph: Graph) -> None:
    """Tell where an older version's ``config.pbtxt``, which is left alone, says another L than this version has."""
    said = label_dim_in(path.read_text(encoding="utf-8", errors="replace"))
    if said not in (None, graph.label_dim):
        columns = f"that an answer has {said} columns, but this version's has {graph.label_dim}"
        _log.warning("%s says %s: Triton will refuse it; correct the file", path, columns)
