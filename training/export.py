"""Write a trained model into a model repository: one version, complete or absent."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.dense.onnx import build_onnx
from serving.errors import ConfigError
from serving.model.atomic import atomic_directory, atomic_write, sync
from serving.model.dense_file import write_dense
from serving.model.graph import Graph, inference_document, parse_graph
from serving.model.manifest import MANIFEST_NAME, write_manifest
from serving.model.names import MODEL_NAME
from serving.model.sparse_file import write_sparse_directory
from serving.model.statistics_file import statistics_path
from training.ctr_model import CtrModel
from training.errors import OutputError
from training.triton_config import TRITON_ENTRY, triton_config

_MAX_BATCHSIZE = 1024
_HIT_RATE_THRESHOLD = 0.5
_DENSE_FILE, _ONNX_FILE, _GRAPH_FILE, _ENTRY_FILE = "dense.model", "dense.onnx", "graph.json", "model.py"
_OWN_NAMES = {
    _DENSE_FILE,
    statistics_path(_DENSE_FILE).name,
    _ONNX_FILE,
    _GRAPH_FILE,
    _ENTRY_FILE,
    MANIFEST_NAME,
    "__pycache__",
}
_TIERS = {"supportlonglong": True, "models": [], "volatile_db": {"type": "parallel_hash_map"}}


def export_model(
    model: CtrModel, document: dict[str, Any], repository: Path, name: str, version: int | None = None
) -> Path:
    """Write ``<repository>/<name>/<version>/``, and beside it what is not there yet: ``config.pbtxt``, ``ps.json``.

    All files of the version are synced in a hidden folder that is then renamed, so that a reader, a crash or a power
    cut sees the whole version or none. Exports of one model take turns, also those of several processes; hidden
    folders that a killed export left behind are deleted by the next.

    Args:
        model: the trained model.
        document: the JSON of its training graph; ``graph.json`` is its inference form.
        repository: the model repository; made if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        version: at least 1; by default one more than the newest there.

    Returns:
        the version's folder.

    Raises:
        OutputError: the name or the version cannot be used, or the file system refuses.
        ConfigError: a table has the name of one of the files beside it.
    """
    check_output(repository, name, model.graph)
    folder = repository / name
    try:
        folder.mkdir(exist_ok=True)
        with _turn(folder):
            _remove_unfinished(folder)
            target = folder / str(_next_version(folder) if version is None else _free_version(folder, version))
            _write_if_absent(folder / "config.pbtxt", triton_config(name, model.graph))
            _write_if_absent(repository / "ps.json", json.dumps(_TIERS, indent=2) + "\n")
            with atomic_directory(target) as unfinished:
                _write_version(unfinished, model, document)
                write_manifest(unfinished, name, int(target.name))
            sync(repository)
    except OSError as err:
        raise OutputError(f"{folder}: cannot write the model: {err.strerror or err}") from err
    return target


def check_output(repository: Path, name: str, graph: Graph) -> None:
    """Check before hours of training that a model can be written under this name; make the repository's folder.

    Raises:
        OutputError: it cannot.
        ConfigError: a table has the name of one of the files beside it.
    """
    if not MODEL_NAME.fullmatch(name):
        raise OutputError(f"model name {name!r}: expected 1 to 120 letters, digits, '_' or '-'")
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise OutputError(f"{repository}: cannot be made: {err.strerror or err}") from err
    if not os.access(repository, os.W_OK | os.X_OK):
        raise OutputError(f"{repository}: cannot be written")
    for embedding in graph.embeddings:
        if embedding.table in _OWN_NAMES:
            raise ConfigError(graph.source, "layers", f"a table cannot be called {embedding.table!r}: a file is")


def _write_version(folder: Path, model: CtrModel, document: dict[str, Any]) -> None:
    inference = {
        "max_batchsize": _MAX_BATCHSIZE,
        "hit_rate_threshold": _HIT_RATE_THRESHOLD,
        "input_key_type": "I64",
        "dense_model_file": _DENSE_FILE,
        "sparse_model_file": [embedding.table for embedding in model.graph.embeddings],
    }
    layers = inference_document(document)["layers"]
    graph = parse_graph({"inference": inference, "layers": layers}, str(folder / _GRAPH_FILE))
    weights = model.dense_weights()
    (folder / _GRAPH_FILE).write_text(json.dumps({"inference": inference, "layers": layers}, indent=2) + "\n")
    write_dense(folder / _DENSE_FILE, graph, weights)
    (folder / _ONNX_FILE).write_bytes(build_onnx(graph, weights))
    (folder / _ENTRY_FILE).write_text(TRITON_ENTRY)
    for embedding, table in zip(graph.embeddings, model.tables, strict=True):
        write_sparse_directory(folder / embedding.table, *table.rows())


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait for other exports into this folder. The kernel ends the turn of a process that dies."""
    with (folder / ".export.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unfinished(folder: Path) -> None:
    """Delete hidden temporary folders; during a turn no living export owns one."""
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
