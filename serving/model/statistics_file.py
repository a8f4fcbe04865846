"""HugeCTR's file of parameters that are not trained, beside the dense model file: what BatchNorm layers remember.

Format (HugeCTR v3.1 to v24.06): ``<dense file>.ntp.json``, ``{"layers": [{"type": "BatchNorm", "mean": [...],
"var": [...]}, ...]}``, one entry per BatchNorm in the order of the graph. A graph without one has no such file.
HugeCTR writes its numbers with six decimals (``std::to_string`` in batch_norm_layer.cu): a small variance loses digits.
"""

import json
from pathlib import Path

import numpy as np

from serving.errors import ConfigError, ModelFileError
from serving.model.atomic import atomic_write
from serving.model.dense_weights import Weights, weight_key
from serving.model.records import Graph, WeightSpec
from serving.model.strict_json import Fields, read_json


def statistics_path(dense_file: str | Path) -> Path:
    """Return where the side file of a dense model file lies."""
    return Path(f"{dense_file}.ntp.json")


def read_statistics(dense_file: str | Path, graph: Graph) -> Weights:
    """Read ``graph.statistics``; nothing is read of a graph that has none.

    Raises:
        ModelFileError: the side file is missing, or does not hold the mean and the variance of exactly the graph's
            BatchNorm layers.
    """
    if not graph.statistics:
        return {}
    path = statistics_path(dense_file)
    names = list(dict.fromkeys(spec.layer for spec in graph.statistics))
    if not path.exists():
        raise ModelFileError(path, f"no such file; it holds the mean and variance of {', '.join(names)}")
    try:
        layers = list(Fields(read_json(path), str(path), "", ("layers",)).objects("layers"))
        if len(layers) != len(names):
            reason = f"layers: expected {len(names)} entries, for {', '.join(names)}, found {len(layers)}"
            raise ModelFileError(path, reason)
        for fields in layers:
            fields.allow(("type", "mean", "var"))
            fields.choice("type", {"BatchNorm": "BatchNorm"})
        entries = dict(zip(names, layers, strict=True))
        return {weight_key(spec): _numbers(entries[spec.layer], spec) for spec in graph.statistics}
    except ConfigError as err:
        raise ModelFileError(path, ": ".join(part for part in (err.path, err.reason) if part)) from err


def _numbers(fields: Fields, spec: WeightSpec) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    items, (count,) = fields.items(spec.name), spec.shape
    if len(items) != count:
        reason = f"expected {count} numbers, the columns of {spec.layer}, got {len(items)}"
        raise fields.error(reason, spec.name)
    numbers = [fields.check_number(item, f"{spec.name}[{index}]") for index, item in enumerate(items)]
    for index, number in enumerate(numbers):
        if spec.name == "var" and number < 0:
            raise fields.error(f"expected a variance, at least 0, got {number}", f"{spec.name}[{index}]")
    return np.array(numbers, np.float32)


def write_statistics(dense_file: str | Path, graph: Graph, weights: Weights) -> None:
    """Write ``graph.statistics``, if it has any; an existing file is replaced at once or not at all.

    The caller has checked the weights.

    Raises:
        OSError: the disk refuses.
    """
    if not graph.statistics:
        return
    layers: dict[str, dict[str, object]] = {}
    for spec in graph.statistics:
        entry = layers.setdefault(spec.layer, {"type": "BatchNorm"})
        entry[spec.name] = weights[weight_key(spec)].astype(float).tolist()
    with atomic_write(statistics_path(dense_file)) as file:
        file.write(json.dumps({"layers": list(layers.values())}, allow_nan=False).encode() + b"\n")
