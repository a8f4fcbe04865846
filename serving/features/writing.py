"""Write a ``features.json``, and what Triton must know about it."""

import json
import shutil
from pathlib import Path

from serving.features.definition import FeatureDefinition
from serving.features.opening import definition_of_names, slots_of_graph
from serving.features.vocabulary import compiled_vocabulary
from serving.model.names import OFFSETS
from serving.model.records import Graph
from serving.model.triton_config import RawInput, TritonTensors

_TRITON_TYPES = {"string": "TYPE_STRING", "integer": "TYPE_INT64", "float": "TYPE_FP32", "boolean": "TYPE_BOOL"}


def triton_tensors(graph: Graph, features: FeatureDefinition | None) -> TritonTensors:
    """Return what Triton must know of the tensors of a model, which may have raw features or names of its inputs."""
    definition = features or definition_of_names(slots_of_graph(graph), graph.dense_names)
    return TritonTensors(graph.dense_dim, graph.outputs, () if definition is None else triton_inputs(definition))


def triton_inputs(definition: FeatureDefinition) -> list[RawInput]:
    """Return the tensors of requests with raw features, and their datatypes in ``config.pbtxt``."""
    found = []
    for feature in definition.columns:
        found.append((feature.name, _TRITON_TYPES[feature.value_type]))
        if feature.is_list:
            found.append((f"{feature.name}{OFFSETS}", "TYPE_INT32"))
    return found


def write_definition(definition: FeatureDefinition, path: Path) -> None:
    """Write a definition, and each of its vocabularies compiled into a file next to it.

    Raises:
        ConfigError: a vocabulary cannot be read.
        OSError: the file system refuses.
    """
    document = definition.model_dump(mode="json", exclude_defaults=True)
    names = [feature.name for feature in definition.features]
    for number, (feature, entry) in enumerate(zip(definition.features, document["features"], strict=True)):
        if feature.kind != "vocabulary":
            continue
        entry.pop("values", None)
        owner = number if feature.shares is None else names.index(feature.shares)
        entry["vocabulary"] = f"feature{owner}.vocabulary"
        if owner != number:
            continue
        with compiled_vocabulary(feature, str(path), f"features[{number}]") as (compiled, _):
            shutil.copyfile(compiled, path.with_name(entry["vocabulary"]))
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
