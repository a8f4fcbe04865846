"""Write a trained model into a model repository, or only its network, or only the rows that changed."""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.dense.onnx import build_onnx
from serving.errors import ConfigError, ModelFileError, OutputError
from serving.features import (
    FEATURES_FILE,
    read_definition,
    triton_tensors,
    write_definition,
)
from serving.model.dense_file import write_dense
from serving.model.graph import Graph, inference_document, name_inputs, parse_graph, read_graph
from serving.model.manifest import MANIFEST_NAME, Manifest, SharedTables, read_manifest, sha256_of
from serving.model.slot_sizes import SlotKeys, SlotRange, ranges_by_input
from serving.model.sparse_writer import write_sparse_batches
from serving.model.strict_json import read_json
from serving.model.version_writer import (
    CALIBRATION_FILE,
    DENSE_FILE,
    GRAPH_FILE,
    ONNX_FILE,
    TRAINING_FILE,
    check_model_name,
    write_version,
)
from training.embedding.table_folders import write_tables
from training.model.ctr_model import CtrModel
from training.row_file import TableRows
from training.samples import Bags, Samples

if TYPE_CHECKING:
    from training.data.checks import ColumnMap
    from training.features import FeatureFile
    from training.publishing import Publisher

#: Of the clause ``inference``.
_SETTINGS = {"max_batchsize": 1024, "hit_rate_threshold": 0.5, "input_key_type": "I64"}

_log = logging.getLogger(__name__)


def export_model(
    model: CtrModel,
    document: dict[str, Any],
    repository: Path,
    name: str,
    version: int | None = None,
    calibration: Samples | None = None,
    publisher: "Publisher | None" = None,
    features: "FeatureFile | None" = None,
    names: "ColumnMap | None" = None,
    record: Mapping[str, Any] | None = None,
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
        features: how training read raw features. The version has their definition, so requests may have them too.
        names: the columns of data without raw features. Requests have them as names of slots and dense features, unless
            the graph has names. None: the inputs have no names.
        record: how the model was trained, for the version's ``training.json``; None: it has no such file.

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
        document = _named(document, names if features is None else features.columns)
        write_files = partial(
            _write_files, model=model, document=document, calibration=calibration, features=features, record=record
        )
        triton = triton_tensors(parse_graph(document, ""), None if features is None else features.definition)
        path = write_version(repository, name, model.graph, write_files, version, run, positions, triton=triton)
    else:
        model.send_rows()
    path = model.processes.from_first("the exported version", path)
    assert path is not None
    return path


def export_dense(
    model: CtrModel,
    document: dict[str, Any],
    repository: Path,
    name: str,
    base: int,
    version: int | None = None,
    calibration: Samples | None = None,
    publisher: "Publisher | None" = None,
) -> Path:
    """Write a version that has the network alone and shares the tables of the version ``base``.

    A server opens it without loading tables, and serves it when they have reached the position that it states.

    Args:
        model: the trained model.
        document: the JSON of its training graph, with the same inputs as that of the base.
        repository: the model repository.
        name: the model's name.
        base: a version that ``export_model`` wrote. Its folder must stay while a version shares its tables.
        version: at least 1. The default is one more than the newest version.
        calibration: see ``export_model``; None: the samples of the base.
        publisher: publishes the rows that have changed, before the version is written; see ``export_model``. The base
            was exported with a publisher of the same run.

    Returns:
        the version's folder.

    Raises:
        OutputError: the name or the version cannot be used, the file system refuses, or the base is missing, shares
            tables itself, has other inputs, or is of another run.
    """
    run, positions = "", dict[str, str]()
    if publisher is not None:
        publisher.publish()
        run, positions = publisher.run, publisher.flush()
    path = None
    if model.processes.is_first:
        check_model_name(name)
        folder = repository / name / str(base)
        manifest = _base_manifest(folder, base, run)
        document = _with_names_of(document, _check_inputs(model.graph, folder))
        definition = read_definition(folder / FEATURES_FILE) if FEATURES_FILE in manifest.files else None
        triton = triton_tensors(parse_graph(document, ""), definition)
        tables = SharedTables(base, sha256_of(folder / MANIFEST_NAME))

        def write_files(unfinished: Path) -> SlotKeys:
            inference = read_json(folder / GRAPH_FILE)["inference"]
            graph = _write_network(unfinished, model, document, inference)
            if definition is not None:
                write_definition(definition, unfinished / FEATURES_FILE)
            if calibration is not None:
                _write_calibration(unfinished, model, calibration, _shifts_of(graph), manifest.keys == "unshifted")
            elif CALIBRATION_FILE in manifest.files:
                shutil.copyfile(folder / CALIBRATION_FILE, unfinished / CALIBRATION_FILE)
            return manifest.keys

        path = write_version(repository, name, model.graph, write_files, version, run, positions, tables, triton=triton)
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


def _base_manifest(folder: Path, base: int, run: str) -> Manifest:
    """Read the manifest of the version that brings the tables.

    Raises:
        OutputError: it cannot bring them.
    """
    try:
        manifest = read_manifest(folder)
    except ModelFileError as err:
        raise OutputError(f"version {base} brings no tables: {err}") from err
    if manifest.tables is not None:
        reason = f"it shares those of version {manifest.tables.version}; name that version"
        raise OutputError(f"{folder}: version {base} brings no tables: {reason}")
    if run and run != manifest.run:
        its_run = f"the run {manifest.run!r}" if manifest.run else "no run"
        raise OutputError(f"{folder}: its tables follow {its_run}, and the publisher's run is {run!r}")
    return manifest


def _named(document: dict[str, Any], names: "ColumnMap | None") -> dict[str, Any]:
    """Return a graph's document with the names of the columns, if it has no names."""
    if names is None or parse_graph(document, "").sparse[0].names:
        return document
    named = name_inputs(document, names.slots, names.dense, names.labels)
    try:
        parse_graph(named, "")
    except ConfigError as err:
        _log.warning("the version does not have the names of the columns: %s", err.reason)
        return document
    return named


def _with_names_of(document: dict[str, Any], base: Graph) -> dict[str, Any]:
    """Return a graph's document with the names that the inputs of another graph have."""
    slots = [name for entry in base.sparse for name in entry.names]
    return name_inputs(document, slots, base.dense_names, base.label_names) if slots else document


def _check_inputs(graph: Graph, folder: Path) -> Graph:
    """Return the graph of the version in ``folder``. Refuse a network that does not fit its tables."""
    base = read_graph(folder / GRAPH_FILE)
    ours, its = _inputs(graph), _inputs(base)
    if ours != its:
        raise OutputError(f"{folder}: the network has other inputs: expected {its}, got {ours}")
    return base


def _inputs(graph: Graph) -> tuple[object, ...]:
    tables = [(each.table, each.slots, each.dim, each.combiner, each.default_value) for each in graph.embeddings]
    return f"dense_dim {graph.dense_dim}", tables, f"slot_size_array {graph.slot_sizes}"


def _write_network(folder: Path, model: CtrModel, document: dict[str, Any], settings: Mapping[str, Any]) -> Graph:
    """Write the graph, whose clause ``inference`` has these settings, and the dense weights; return the graph."""
    inference = {
        **settings,
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
    return graph


def _write_files(
    folder: Path,
    model: CtrModel,
    document: dict[str, Any],
    calibration: Samples | None,
    features: "FeatureFile | None",
    record: Mapping[str, Any] | None,
) -> SlotKeys:
    """Write the files of a version, and return how the keys of its requests come."""
    if record is not None:
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (folder / TRAINING_FILE).write_text(text, encoding="utf-8")
    if features is not None:
        features.write(folder)
    graph = _write_network(folder, model, document, _SETTINGS)
    shifts = _shifts_of(graph)
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
        _write_calibration(folder, model, calibration, shifts, are_shifted)
    return "unshifted" if are_shifted else "stored"


def _write_calibration(
    folder: Path, model: CtrModel, samples: Samples, shifts: "Sequence[_Shift]", are_shifted: bool
) -> None:
    """Write samples as a request, with the keys that requests have."""
    of_tables = model.bags(samples)
    if are_shifted:
        of_tables = [shift.undo(bags) for shift, bags in zip(shifts, of_tables, strict=True)]
    bags = Bags.side_by_side(of_tables)
    np.savez(folder / CALIBRATION_FILE, DES=samples.dense, CATCOLUMN=bags.keys, ROWINDEX=bags.row_ptrs)


def _shifts_of(graph: Graph) -> "Sequence[_Shift]":
    ranges = {} if graph.slot_sizes is None else ranges_by_input(graph)
    return [_Shift(ranges.get(embedding.bottom, ())) for embedding in graph.embeddings]


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
