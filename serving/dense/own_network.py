"""A user's own dense network: an ONNX file instead of a graph's layers and weights."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.dense.needs import output_needs
from serving.dense.network import Floats
from serving.dense.network_parts import parts_of_outputs
from serving.dense.onnx import OnnxNetwork
from serving.dense.onnx_file import read_structure, refuse_unread_inputs, refuse_weights_elsewhere, serialized
from serving.dense.onnx_signature import unread_tables
from serving.errors import ModelFileError, ServingError
from serving.model.records import Graph

_log = logging.getLogger(__name__)

_TRIAL_SAMPLES = 3
_MOST_SHOWN = 8
# The largest difference that rounding explains between the answers to a sample alone and in a batch. The difference is
# relative to the answer, because probabilities of ads are about a thousandth.
_MOST_ROUNDING_RATIO, _MOST_ROUNDING = 1e-3, 1e-5


def open_own_network(graph: Graph, file: Path, threads: int = 1) -> tuple[OnnxNetwork, Graph]:
    """Open a user's ONNX network and try it on a few samples; its inputs match the inputs of ``graph`` by name.

    Returns:
        the network, and the graph, which knows what the network depends on: each output on dense features and rows, and
        the answer to a sample on the others of its batch.

    Raises:
        ModelFileError: the file is missing or does not match the graph, or no node reads one of its inputs.
    """
    if not file.is_file():
        raise ModelFileError(file, "no such file")
    structure = _structure_of(file)
    if structure is not None:
        refuse_weights_elsewhere(file, structure)
    network = OnnxNetwork(graph, file, threads, str(file))
    structure = structure or read_structure(file)
    refuse_unread_inputs(structure.graph, file)
    for table in unread_tables(network.inputs, graph):
        _log.warning("%s: no input reads the table %r, so its lookups have no effect", file, table)
    mixes_samples = _try(network, graph, file)
    network.parts = {
        output.name: OnnxNetwork(replace(graph, label_dim=output.width), serialized(part), threads, str(file))
        for output, part in parts_of_outputs(structure, graph)
    }
    return network, replace(graph, mixes_samples=mixes_samples, needs=output_needs(structure, graph))


def _structure_of(file: Path) -> Any:
    """Return the structure of an ONNX file; None: ONNX Runtime says what is wrong with it."""
    from google.protobuf.message import DecodeError

    try:
        return read_structure(file)
    except (DecodeError, ValueError, OSError):
        return None


def _try(network: OnnxNetwork, graph: Graph, file: Path) -> bool:
    """Run the network on samples together and one by one; return whether their answers differ."""
    rng = np.random.default_rng(0)
    # From 0 to 1: valid as a number and as an index, because some networks turn a feature into an index.
    dense = rng.random((_TRIAL_SAMPLES, graph.dense_width), np.float32)
    dense[:, graph.dense_dim :] = 1.0  # masks of full sequences
    tables = [rng.random((_TRIAL_SAMPLES, e.slots, e.dim), np.float32) for e in graph.embeddings]
    together = _answer(network, dense, tables, file)
    each = [slice(sample, sample + 1) for sample in range(_TRIAL_SAMPLES)]
    alone = np.concatenate(
        [_answer(network, dense[sample], [table[sample] for table in tables], file) for sample in each]
    )
    answer = [float(f"{value:.6g}") for value in together[0][:_MOST_SHOWN]]
    if not np.isfinite(together).all():
        _log.warning(
            "%s: answers such as %s are not finite; does it have weights that are NaN or infinite?", file, answer
        )
    probabilities = [together[:, output.columns] for output in graph.outputs if output.kind == "probability"]
    if any((part < 0).any() or (part > 1).any() for part in probabilities):
        _log.warning("%s: answers such as %s are not probabilities; is a sigmoid missing at its end?", file, answer)
    sizes = np.maximum(np.nan_to_num(np.abs(together), posinf=0).max(axis=0), 1)
    mixes = not np.allclose(together, alone, rtol=_MOST_ROUNDING_RATIO, atol=_MOST_ROUNDING * sizes, equal_nan=True)
    if mixes:
        _log.warning("%s: the answer to a sample depends on the other samples of its batch", file)
    return mixes


def _answer(network: OnnxNetwork, dense: Floats, tables: list[Floats], file: Path) -> Floats:
    try:
        return network(dense, tables)
    except ServingError as err:
        raise ModelFileError(file, f"tried on {len(dense)} samples: {err}") from err
