"""Write a planned import into a model repository."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from serving.config import read_inference_config
from serving.dense.files import open_dense
from serving.features import FEATURES_FILE, triton_tensors, write_definition
from serving.importers.network import answer_to, rows_tried
from serving.importers.plan import ImportPlan, PlannedTable
from serving.model.sparse_rows import Keys, Vectors
from serving.model.sparse_writer import write_sparse_batches
from serving.model.version_writer import GRAPH_FILE, ONNX_FILE, write_version
from serving.parameter_server.table_files import open_table_file

_BATCH_BYTES = 16 << 20  # of vectors that are in memory at once

#: Table, rows written, V.
Progress: TypeAlias = Callable[[str, int, int], None]

_log = logging.getLogger(__name__)


def write_model(
    plan: ImportPlan,
    repository: str | Path,
    name: str,
    version: int | None = None,
    progress: Progress | None = None,
    check: Callable[[Path], None] | None = None,
    run: str = "",
    positions: Mapping[str, str] | None = None,
) -> Path:
    """Write ``<repository>/<name>/<version>/``, complete or absent.

    Vectors pass through memory in batches. A row that is not finite is written and logged as a warning, because it may
    be one of millions that nobody asks for. Before the version appears, its files are opened as a server opens them,
    and make one prediction.

    Args:
        plan: what to write.
        repository: the model repository, which is created if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        version: at least 1. The default is one more than the newest version.
        progress: called after each batch with the table's name, the rows written so far, and V.
        check: called with the folder of the finished files before the version appears. If it raises an error, no
            version appears.
        run: the training run that publishes updates of the rows; empty if it publishes none.
        positions: for each partition of the update log, the position that the rows include.

    Returns:
        the version's folder.

    Raises:
        OutputError: the name or the version cannot be used, or the file system refuses.
        ConfigError: a table has the name of one of the version's files.
        ModelFileError: a source has changed or is damaged.
    """

    def write_files(folder: Path) -> None:
        _write_files(folder, plan, name, progress or _say_nothing)
        if check is not None:
            check(folder)

    graph = plan.graph()
    triton = triton_tensors(graph, plan.features)
    return write_version(Path(repository), name, graph, write_files, version, run, positions, triton=triton)


def _write_files(folder: Path, plan: ImportPlan, name: str, progress: Progress) -> None:
    (folder / GRAPH_FILE).write_text(json.dumps(plan.document(), indent=2) + "\n", encoding="utf-8")
    (folder / ONNX_FILE).write_bytes(plan.network.content())
    if plan.features is not None:
        write_definition(plan.features, folder / FEATURES_FILE)
    for table in plan.tables:
        batch_rows = max(1, _BATCH_BYTES // (4 * table.rows.dim))
        write_sparse_batches(folder / table.name, _watched(table, batch_rows, progress))
    _predict_once(folder, name)


def _watched(table: PlannedTable, batch_rows: int, progress: Progress) -> Iterator[tuple[Keys, Vectors]]:
    """Yield a table's batches and report progress. At the end, log how many rows are not finite."""
    written, faults, first = 0, 0, 0
    for keys, vectors in table.rows.batches(batch_rows):
        faulty = ~np.isfinite(vectors).all(axis=1)
        if faulty.any():
            first = first if faults else int(keys[np.argmax(faulty)])
            faults += int(np.count_nonzero(faulty))
        yield keys, vectors
        written += keys.size
        progress(table.name, written, table.rows.rows)
    if faults:
        rows = f"{faults:,} of {table.rows.rows:,} rows have values that are NaN or infinite"
        _log.warning("%s: %s, the first has key %d", table.rows.source, rows, first)


def _say_nothing(table: str, written: int, rows: int) -> None:
    """Ignore progress."""


def _predict_once(folder: Path, name: str) -> None:
    """Open the files as a server does, and predict from the first rows of each table."""
    config = read_inference_config(folder / GRAPH_FILE, name)
    graph, network = open_dense(*config.network_files(), config.onnx_file)
    # no warnings: faulty rows were reported when they were copied, and the folder is about to be renamed
    batches = [
        open_table_file(config, table).batches(rows_tried(table.positions), warns=False) for table in config.tables
    ]
    first_rows = [next(batch)[1] for batch in batches]
    answer_to(graph, network, first_rows, str(folder))
