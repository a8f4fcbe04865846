"""Write one version of a model into a model repository, complete or absent. It never changes afterwards."""

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from serving.errors import ConfigError, OutputError
from serving.model.atomic import atomic_directory, atomic_write, remove_killed_writes, sync
from serving.model.dense_file import statistics_path
from serving.model.manifest import MANIFEST_NAME, SharedTables, write_manifest
from serving.model.names import MODEL_NAME, NAME_EXPECTED
from serving.model.records import Graph
from serving.model.regular_file import is_absent
from serving.model.slot_sizes import SlotKeys
from serving.model.strict_json import read_json
from serving.model.triton_config import TRITON_FILES, TritonTensors, triton_config, triton_faults

FEATURES_FILE = "features.json"
GRAPH_FILE, DENSE_FILE, ONNX_FILE = "graph.json", "dense.model", "dense.onnx"
TRAINING_FILE = "training.json"  # how `hotrow train` made the version
CALIBRATION_FILE = "calibration.npz"  # one request, which measures the error of the engine int8
_ENTRY_FILE = "model.py"
_OWN_NAMES = {
    DENSE_FILE,
    statistics_path(DENSE_FILE).name,
    ONNX_FILE,
    GRAPH_FILE,
    CALIBRATION_FILE,
    _ENTRY_FILE,
    FEATURES_FILE,
    TRAINING_FILE,
    MANIFEST_NAME,
    "__pycache__",
}
_log = logging.getLogger(__name__)

#: A version's ``model.py``. Triton loads the class of this name from it.
TRITON_ENTRY = '''"""Triton's way into Hotrow."""

from serving.frontend.triton import TritonPythonModel  # noqa: F401
'''

_TIERS_FILE = "ps.json"
_TIERS = {"supportlonglong": True, "models": [], "volatile_db": {"type": "parallel_hash_map"}}


def write_version(
    repository: Path,
    name: str,
    graph: Graph,
    write_files: Callable[[Path], SlotKeys | None],
    version: int | None = None,
    run: str = "",
    positions: Mapping[str, str] | None = None,
    tables: SharedTables | None = None,
    triton: TritonTensors | None = None,
) -> Path:
    """Write ``<repository>/<name>/<version>/``, and Triton's configurations and ``ps.json`` if they are missing.

    All files of the version are synced in a hidden folder, which is then renamed. So a reader, a crash or a power loss
    sees the whole version or none. Writers of one model wait for each other, across processes too. Hidden folders that
    a killed writer left behind are deleted by the next writer, and by ``check_output``.

    Args:
        repository: the model repository, which is created if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        graph: the model's graph.
        write_files: writes everything except ``model.py`` and ``manifest.json`` into the hidden folder. It returns how
            the keys of requests come, for the manifest; None: as the tables have them. If it raises, there is no
            version.
        version: at least 1. The default is one more than the newest version.
        run: the training run that publishes updates of the rows; empty if it publishes none.
        positions: for each partition of the update log, the position that the files include.
        tables: the version whose tables it shares; None: ``write_files`` writes tables.
        triton: what Triton must know of requests and answers; None: requests have keys alone.

    Returns:
        the version's folder.

    Raises:
        OutputError: the name or the version cannot be used, or the file system refuses.
        ConfigError: see ``check_output``.
    """
    check_output(repository, name, graph)
    folder = repository / name
    try:
        with _lock(folder):
            target = folder / str(_next_version(folder) if version is None else _free_version(folder, version))
            with atomic_directory(target) as unfinished:
                (unfinished / _ENTRY_FILE).write_text(TRITON_ENTRY, encoding="utf-8")
                keys = write_files(unfinished)
                write_manifest(unfinished, name, int(target.name), keys or "stored", run, positions, tables)
                # last, because a file left by a failed export would describe the wrong model to Triton
                described = triton or TritonTensors(graph.dense_dim, graph.outputs)
                for kind, file in TRITON_FILES.items():
                    (folder / file).parent.mkdir(exist_ok=True)
                    _write_if_absent(folder / file, triton_config(name, described, kind))
                _write_if_absent(repository / _TIERS_FILE, json.dumps(_TIERS, indent=2) + "\n")
            sync(repository)
            for line in triton_faults(folder, described):
                _log.warning("%s; `hotrow check %s --write-config` corrects it", line, folder)
    except OSError as err:
        raise OutputError(f"{folder}: cannot write the model: {err.strerror or err}") from err
    return target


def check_output(repository: Path, name: str, graph: Graph) -> None:
    """Check before hours of work that a model can be written, and create the repository's folder.

    Files that killed writers of the model left behind are deleted.

    Raises:
        OutputError: it cannot be written.
        ConfigError: a table has the name of one of the version's files, or the repository's ``ps.json`` is not JSON or
            not for int64 keys, which all written models have.
    """
    check_model_name(name)
    _check_tiers(repository / _TIERS_FILE)
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise OutputError(f"{repository}: cannot be created: {err.strerror or err}") from err
    if not os.access(repository, os.W_OK | os.X_OK):
        raise OutputError(f"{repository}: cannot be written")
    check_table_names(graph)
    remove_killed_writes(repository / name, rf"[0-9]+|{re.escape(TRITON_FILES['CPU'].name)}")


def check_target(repository: Path, name: str, version: int | None = None) -> None:
    """Check that a version can be written, without creating anything. Raise as ``check_output`` does."""
    check_model_name(name)
    _check_tiers(repository / _TIERS_FILE)
    folder = repository / name
    try:
        if version is not None:
            _free_version(folder, version)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as err:
        raise OutputError(f"{folder}: cannot be read: {err.strerror or err}") from err
    if not existing.is_dir():
        raise OutputError(f"{existing}: expected a folder, found a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{existing}: cannot be written")


def check_model_name(name: str) -> None:
    """Raise OutputError if servers do not accept this name."""
    if not MODEL_NAME.fullmatch(name):
        raise OutputError(f"model name {name!r}: {NAME_EXPECTED}")


def check_table_names(graph: Graph) -> None:
    """Raise ConfigError if a table has the name of one of the version's files."""
    for embedding in graph.embeddings:
        if embedding.table in _OWN_NAMES:
            raise ConfigError(
                graph.source, "layers", f"a table cannot be called {embedding.table!r}, because a file is"
            )


def _check_tiers(path: Path) -> None:
    """Refuse a ``ps.json`` that makes servers refuse every model in this repository."""
    if is_absent(path):
        return
    document = read_json(path)
    if not isinstance(document, dict):
        raise ConfigError(str(path), "", f"expected an object, got {json.dumps(document)[:64]}")
    value = document.get("supportlonglong")
    if value is not True and str(value).lower() != "true":
        came = json.dumps(value)[:64] if "supportlonglong" in document else "nothing"
        reason = f"expected true, because the model's keys are int64, got {came}; write into another repository"
        raise ConfigError(str(path), "supportlonglong", reason)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Create this folder if it is absent, and wait for other writers into it. A folder without a version is removed.

    The kernel releases the lock of a process that dies.
    """
    path = folder / ".export.lock"
    with _locked_file(path):
        try:
            yield
        finally:
            if os.listdir(folder) == [path.name]:
                path.unlink()
                with suppress(OSError):  # another writer has just begun
                    folder.rmdir()


def _locked_file(path: Path) -> IO[str]:
    while True:
        with suppress(FileExistsError):
            path.parent.mkdir()
        with suppress(FileNotFoundError):  # a writer that failed has just removed the folder
            lock = path.open("w", encoding="utf-8")
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    return lock
            lock.close()


def _next_version(folder: Path) -> int:
    return 1 + max((int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()), default=0)


def _free_version(folder: Path, version: int) -> int:
    if version < 1:
        raise OutputError(f"version {version}: expected at least 1")
    if not is_absent(folder / str(version)):
        raise OutputError(f"{folder / str(version)}: this version exists, and a version is never changed")
    return version


def _write_if_absent(path: Path, text: str) -> None:
    """Write a file unless it exists, because a user may have changed it."""
    if not path.exists():
        with atomic_write(path) as file:
            file.write(text.encode())
