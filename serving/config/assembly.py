"""Where a checked clause and a layer graph meet."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.config.records import TableConfig
from serving.errors import ConfigError
from serving.model.graph import Embedding, Graph, is_network_file
from serving.model.names import MODEL_NAME
from serving.model.sparse_rows import KeyType


@dataclass(frozen=True, slots=True)
class Place:
    """Where in which file a value stands, for messages, and the folder its relative paths start from."""

    source: str
    path: str
    folder: Path

    def at(self, key: str) -> str:
        """The JSON path of ``key`` inside this place."""
        return f"{self.path}.{key}" if self.path else key

    def file(self, text: str) -> Path:
        """``text`` as an absolute path, relative ones starting from the folder of the configuration file."""
        return (self.folder / text).resolve()

    def error(self, key: str, reason: str) -> ConfigError:
        """A ConfigError that names ``key`` here."""
        return ConfigError(self.source, self.at(key), reason)


def check_model_name(name: str, source: str, path: str = "") -> str:
    """Return ``name``, or raise ConfigError where it cannot name a model."""
    if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
        raise ConfigError(source, path, f"model name {name!r}: expected 1 to 120 of the characters A-Z a-z 0-9 _ -")
    return name


def check_key_bits(key_bits: int, key_type: KeyType, place: Place) -> None:
    """Refuse lines of 32-bit keys, in the GPU caches of a model, for keys that may be larger.

    Raises:
        ConfigError: the model's keys are int64.
    """
    if key_bits == 32 and key_type == "I64":
        raise place.error("embedding_cache_key_bits", "32, but the model's keys are int64")


def build_tables(graph: Graph, files: Sequence[str], key: str, place: Place) -> tuple[TableConfig, ...]:
    """One record per embedding layer of ``graph``, in graph order.

    Args:
        graph: the layer graph.
        files: the sparse model files, in the same order.
        key: the JSON key that lists the files.
        place: where it stands.

    Raises:
        ConfigError: there are more or fewer files than embedding layers, or no embedding layer at all.
    """
    if not graph.embeddings:
        raise ConfigError(graph.source, "layers", "expected at least one embedding layer, found none")
    if len(files) != len(graph.embeddings):
        reason = f"{len(files)} files, but the graph has {len(graph.embeddings)} embedding layers"
        raise place.error(key, reason)
    return tuple(
        _table(graph, embedding, place.file(file)) for embedding, file in zip(graph.embeddings, files, strict=True)
    )


def _table(graph: Graph, embedding: Embedding, file: Path) -> TableConfig:
    sparse = next(one for one in graph.sparse if one.top == embedding.bottom)
    return TableConfig(
        name=embedding.table,
        dim=embedding.dim,
        slots=embedding.slots,
        combiner=embedding.combiner,
        default_value=float(embedding.default_value),
        file=file,
        row_layout=embedding.row_layout,
        max_keys_per_sample=sparse.max_keys_per_sample,
    )


def onnx_beside(dense_file: Path) -> Path | None:
    """The exported ONNX file that lies beside ``dense_file``, if there is one; none beside a network of its own."""
    onnx_file = dense_file.with_suffix(".onnx")
    return onnx_file if onnx_file.is_file() and not is_network_file(dense_file) else None
