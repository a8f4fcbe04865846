"""Write a trained model into a model repository, or only the rows that changed."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.dense.onnx import build_onnx
from serving.model.dense_file import write_dense
from serving.model.graph import inference_document, parse_graph
from serving.model.slot_sizes import SlotKeys, SlotRange, ranges_by_input
from serving.model.sparse_writer import write_sparse_batches
from serving.model.version_writer import CALIBRATION_FILE, DENSE_FILE, GRAPH_FILE, ONNX_FILE, write_version
from training.embedding.table_folders import write_tables
from training.model.ctr_model import CtrModel
from training.row_file import TableRows
from training.samples import Bags, Samples

if TYPE_CHECKING:
    from training.publishing import Publisher

_MAX_BATCHSIZE = 1024
_HIT_RATE_THRESHOLD = 0.5

_log = logging.getLogger(__name__)


def export_model(
    model: CtrModel,
    document: dict[str, Any],
    repository: Path,
    name: str,
    version: int | None = None,
    calibration: Samples | None = None,
    publisher: "Publisher | None" = None,
) -> Path:
    """Write ``<repository>/<name>/<version>/``, complete or absent. Of several processes, the first writes.

    If the graph has ``slot_size_array`` and training shifted keys by it, requests to the version have unshifted keys.

    Args:
        model: the trained model.
        document: the JSON of its training graph. ``graph.json`` is its inference form.
        repository: the model repository, which is created if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        version: at least 1. The default is one more than the newest version.
        calibration: samples that the model was not trained on. The engine int8 measures its error on them.
        publisher: publishes what has changed, before the version is written. The manifest states its run, and the
            position up to which the version includes the updates. If the log is away, this is an earlier position.

    Returns:
        the version's folder.

    Raises:
        OutputError: the name or the version cannot be used, or the file system refuses.
        ConfigError: a table has the name of one of the version's files.
    """
    path = None
    run, positions = "", dict[str, str]()
    if publisher is not None:
        publisher.publish()
        run, positions = publisher.run, publisher.flush()
    if model.processes.is_first:
        write_files = partial(_write_files, model=model, document=document, calibration=calibration)
        path = write_version(repository, name, model.graph, write_files, version, run, positions)
    else:
        model.send_rows()
    path = model.processes.from_first("the exported version", path)
    assert path is not None
    return path


def export_delta(model: CtrModel, folder: str | Path, since_step: int) -> dict[str, int]:
    """Write the rows that changed after a step, one folder ``<folder>/<table>`` per table, for ``hotrow load``.

    With the update type "Global" every row changes in every step. The dense weights are not in the delta.

    Args:
        model: the trained model.
        folder: is complete or absent, and replaces an earlier folder of tables. A table without changed rows has no
            folder.
        since_step: ``model.step`` at the last export.

    Returns:
        the number of rows of each table.

    Raises:
        OutputError: ``folder`` has other files, or the file system refuses.
    """
    names = [embedding.table for embedding in model.graph.embeddings]
    rows = {name: _vectors(table.dump(since_step)) for name, table in zip(names, model.tables, strict=True)}
    return write_tables(model.processes, folder, rows)


def _write_files(folder: Path, model: CtrModel, document: dict[str, Any], calibration: Samples | None) -> SlotKeys:
    """Write the files of a version, and return how the keys of its requests come."""
    inference = {
        "max_batchsize": _MAX_BATCHSIZE,
        "hit_rate_threshold": _HIT_RATE_THRESHOLD,
        "input_key_type": "I64",
        "dense_model_file": DENSE_FILE,
        "sparse_model_file": [embedding.table for embedding in model.graph.embeddings],
    }
    layers = inference_document(document)["layers"]
    graph = parse_graph({"inference": inference, "layers": layers}, str(folder / GRAPH_FILE))
    weights = model.dense_weights()
    text = json.dumps({"inference": inference, "layers": layers}, indent=2) + "\n"
    (folder / GRAPH_FILE).write_text(text, encoding="utf-8")
    write_dense(folder / DENSE_FILE, graph, weights)
    (folder / ONNX_FILE).write_bytes(build_onnx(graph, weights))
    ranges = {} if graph.slot_sizes is None else ranges_by_input(graph)
    shifts = [_Shift(ranges.get(embedding.bottom, ())) for embedding in graph.embeddings]
    for number, embedding in enumerate(graph.embeddings):
        write_sparse_batches(folder / embedding.table, _vectors(shifts[number].watch(model.dump(number))))
    are_shifted = all(shift.has_all for shift in shifts)
    if graph.slot_sizes is not None and not are_shifted:
        _log.warning(
            "%s: the tables have keys beyond slot_size_array, so training did not shift keys; requests have the same "
            "keys as the training samples",
            graph.source,
        )
    if calibration is not None:
        of_tables = model.bags(calibration)
        if are_shifted:
            of_tables = [shift.undo(bags) for shift, bags in zip(shifts, of_tables, strict=True)]
        bags = Bags.side_by_side(of_tables)
        np.savez(folder / CALIBRATION_FILE, DES=calibration.dense, CATCOLUMN=bags.keys, ROWINDEX=bags.row_ptrs)
    return "unshifted" if are_shifted else "stored"


class _Shift:
    """The keys of one table, which training may have shifted by the sizes of the slots.

    Attributes:
        has_all: whether every key so far is one that the shift makes. False without sizes.
    """

    def __init__(self, ranges: Sequence[SlotRange]) -> None:
        self.has_all = bool(ranges)
        self._offsets = np.array([of_slot.offset for of_slot in ranges], np.int64)
        self._end = max((of_slot.offset + of_slot.size for of_slot in ranges), default=0)

    def watch(self, parts: Iterable[TableRows]) -> Iterator[TableRows]:
        """Yield the rows of the table, and note whether all keys are in its range."""
        for part in parts:
            if self.has_all and len(part):
                self.has_all = bool(self._offsets.min() <= part.keys.min() and part.keys.max() < self._end)
            yield part

    def undo(self, bags: Bags) -> Bags:
        """Return the bags as requests send them."""
        of_keys = np.repeat(np.tile(self._offsets, len(bags)), bags.sizes.reshape(-1))
        return Bags(bags.keys - of_keys, bags.row_ptrs, bags.slots)


def _vectors(parts: Iterable[TableRows]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    return ((part.keys, part.vectors) for part in parts)
