"""Try a network on a few rows of its tables, before a model becomes a version."""

from collections.abc import Sequence

import numpy as np

from serving.dense.network import DenseNetwork, Floats
from serving.dense.onnx import OnnxNetwork
from serving.errors import ModelFileError, RequestError
from serving.importers.network import ImportedNetwork
from serving.importers.rows import TableRows
from serving.model.records import Graph
from serving.model.sparse_rows import Vectors

_SAMPLES = 4


def try_network(graph: Graph, network: ImportedNetwork, tables: Sequence[TableRows]) -> None:
    """Open a network and run it on the first rows of its tables.

    Args:
        graph: the model's inputs.
        network: the network.
        tables: the rows, in graph order.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelFileError: the network cannot be opened or run, or its answers are no probabilities.
    """
    opened = OnnxNetwork(graph, network.content(), source=str(network.path))
    first_rows = [
        rows.read(0, min(rows.rows, rows_tried(embedding.slots)))
        for rows, embedding in zip(tables, graph.embeddings, strict=True)
    ]
    answer = answer_to(graph, opened, first_rows, str(network.path))
    if (answer < 0).any() or (answer > 1).any():
        shown = [float(f"{value:.6g}") for value in answer.reshape(-1)[:3]]
        reason = f"answers such as {shown} are no probabilities; if they are logits, say so by --logits "
        reason += "(logits=True): a Sigmoid is then added"
        raise ModelFileError(network.path, reason)


def rows_tried(slots: int) -> int:
    """How many rows of a table a trial takes; a smaller table's are taken again."""
    return _SAMPLES * slots


def answer_to(graph: Graph, network: DenseNetwork, first_rows: Sequence[Vectors], source: str) -> Floats:
    """Run a network on samples with one key a slot, and dense features of 0.

    Args:
        graph: the model's inputs.
        network: the network.
        first_rows: float32[n, D] per table, n at least 1.
        source: where it comes from, for messages.

    Returns:
        float32[B, L], all finite.

    Raises:
        ModelFileError: the network cannot run, or answers with something else.
    """
    embeddings = [
        # rows that are not finite are told of when they are copied; they say nothing of the network
        np.resize(np.nan_to_num(rows, posinf=0, neginf=0), (_SAMPLES, embedding.slots, embedding.dim))
        for rows, embedding in zip(first_rows, graph.embeddings, strict=True)
    ]
    try:
        answer = network(np.zeros((_SAMPLES, graph.dense_dim), np.float32), embeddings)
    except RequestError as err:
        raise ModelFileError(source, f"tried on {_SAMPLES} samples: {err}") from err
    if not np.isfinite(answer).all():
        raise ModelFileError(source, f"tried on {_SAMPLES} samples: its answer is no finite number")
    return answer
