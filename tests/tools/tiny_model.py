"""A small model in a real version directory, with its answers computed in NumPy, for tests and benchmarks."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.dense.onnx import build_onnx, network_digest
from serving.model.dense_file import write_dense
from serving.model.graph import name_inputs, read_graph
from serving.model.manifest import SharedTables, sha256_of, write_manifest
from serving.model.sparse_file import write_sparse_directory

_onnx_files: dict[str, bytes] = {}  # by digest, because many tests write the same model
_versions: dict[tuple[object, ...], dict[Path, bytes]] = {}  # the files of small models, by all that they depend on
MOST_KEPT_ROWS = 1000


@dataclass(frozen=True)
class TinyModel:
    """Logistic regression over dense features and the sums of embedding rows.

    Attributes:
        tables: slots by table name, in graph order. Every table holds the keys 0 to ``rows`` - 1.
        dense_dim: F.
        dim: D of every table.
        rows: V of every table.
        max_batchsize: maximum number of samples of a request.
        seed: seed of all random numbers.
        network_seed: that of the dense layer; None: the same.
        key_type: ``"I64"`` or ``"I32"``.
    """

    tables: dict[str, int] = field(default_factory=lambda: {"user": 1, "item": 2})
    dense_dim: int = 3
    dim: int = 4
    rows: int = 1000
    max_batchsize: int = 64
    seed: int = 0
    key_type: str = "I64"
    network_seed: int | None = None

    @property
    def slots(self):
        """S over all tables."""
        return sum(self.tables.values())

    def vectors(self, table):
        """float32[V, D] of one table."""
        number = list(self.tables).index(table)
        return np.random.default_rng([self.seed, number]).normal(size=(self.rows, self.dim)).astype(np.float32)

    def weights(self):
        """The dense layer's float32[F + S * D, 1] and float32[1]."""
        rng = np.random.default_rng([self.seed if self.network_seed is None else self.network_seed, 99])
        inputs = self.dense_dim + self.slots * self.dim
        return rng.normal(size=(inputs, 1)).astype(np.float32), rng.normal(size=1).astype(np.float32)

    def probabilities(self, dense, bags):
        """The oracle: float64[B, 1].

        Args:
            dense: [B, F] numbers.
            bags: for each sample one list of keys per slot, in graph order; unknown keys count as zeros.
        """
        tables = [self.vectors(table) for table, slots in self.tables.items() for _ in range(slots)]
        weight, bias = self.weights()
        logits = []
        for features, slots in zip(dense, bags, strict=True):
            pooled = [
                sum((vectors[key].astype(np.float64) for key in bag if 0 <= key < self.rows), np.zeros(self.dim))
                for vectors, bag in zip(tables, slots, strict=True)
            ]
            logits.append(np.concatenate([features, *pooled]) @ weight.astype(np.float64) + bias)
        return 1 / (1 + np.exp(-np.array(logits).reshape(-1, 1)))

    def write(self, repository, name="tiny", version=1, run="", positions=None):
        """Write ``<repository>/<name>/<version>/`` and return that directory."""
        form = (type(self), repr(self), name, version, run, repr(positions))
        if form in _versions:
            directory = Path(repository) / name / str(version)
            directory.mkdir(parents=True)
            for path, content in _versions[form].items():
                (directory / path).parent.mkdir(exist_ok=True)
                (directory / path).write_bytes(content)
            return directory
        directory = self._write_network(repository, name, version)
        for table in self.tables:
            write_sparse_directory(directory / table, np.arange(self.rows, dtype=np.int64), self.vectors(table))
        write_manifest(directory, name, version, run=run, positions=positions)
        if self.rows <= MOST_KEPT_ROWS:
            files = (path for path in directory.rglob("*") if path.is_file())
            _versions[form] = {path.relative_to(directory): path.read_bytes() for path in files}
        return directory

    def write_dense(self, repository, name="tiny", version=2, base=1, run="", positions=None, digest=""):
        """Write a version without tables, which shares those of the version ``base``."""
        digest = digest or sha256_of(Path(repository) / name / str(base) / "manifest.json")
        directory = self._write_network(repository, name, version)
        tables = SharedTables(base, digest)
        write_manifest(directory, name, version, run=run, positions=positions, tables=tables)
        return directory

    def _write_network(self, repository, name, version):
        directory = Path(repository) / name / str(version)
        directory.mkdir(parents=True)
        (directory / "graph.json").write_text(json.dumps(self.graph(), indent=1))
        graph = read_graph(directory / "graph.json")
        weights = dict(zip(("fc.weight", "fc.bias"), self.weights(), strict=True))
        write_dense(directory / "dense.model", graph, weights)
        # Exporters write this file too. Without it, each server that starts would build it.
        (directory / "dense.onnx").write_bytes(_onnx_file(graph, weights))
        return directory

    def graph(self):
        """The layers and the ``inference`` clause."""
        sparse = [
            {
                "top": f"{table}_keys",
                "type": "DistributedSlot",
                "max_feature_num_per_sample": 16 * slots,
                "slot_num": slots,
            }
            for table, slots in self.tables.items()
        ]
        embeddings = [
            {
                "name": table,
                "type": "DistributedSlotSparseEmbeddingHash",
                "bottom": f"{table}_keys",
                "top": f"{table}_vectors",
                "sparse_embedding_hparam": {"embedding_vec_size": self.dim, "combiner": "sum"},
            }
            for table in self.tables
        ]
        reshapes = [
            {
                "name": f"{table}_flat",
                "type": "Reshape",
                "bottom": f"{table}_vectors",
                "top": f"{table}_flat",
                "leading_dim": slots * self.dim,
            }
            for table, slots in self.tables.items()
        ]
        return {
            "inference": {
                "max_batchsize": self.max_batchsize,
                "hit_rate_threshold": 1.0,
                "input_key_type": self.key_type,
                "dense_model_file": "dense.model",
                "sparse_model_file": list(self.tables),
            },
            "layers": [
                {
                    "name": "data",
                    "type": "Data",
                    "label": {"top": "label", "label_dim": 1},
                    "dense": {"top": "dense", "dense_dim": self.dense_dim},
                    "sparse": sparse,
                },
                *embeddings,
                *reshapes,
                {
                    "name": "concat",
                    "type": "Concat",
                    "bottom": ["dense", *(f"{table}_flat" for table in self.tables)],
                    "top": "features",
                },
                {
                    "name": "fc",
                    "type": "InnerProduct",
                    "bottom": "features",
                    "top": "logit",
                    "fc_param": {"num_output": 1},
                },
                {"name": "sigmoid", "type": "Sigmoid", "bottom": "logit", "top": "probability"},
            ],
        }

    def sample_requests(self, samples, seed=0, most_keys=3):
        """Random dense features and bags for ``probabilities``, with known keys."""
        rng = np.random.default_rng(seed)
        dense = rng.random((samples, self.dense_dim)).astype(np.float32)
        bags = [
            [rng.integers(0, self.rows, rng.integers(0, most_keys + 1)).tolist() for _ in range(self.slots)]
            for _ in range(samples)
        ]
        return dense, bags


@dataclass(frozen=True)
class NamedModel(TinyModel):
    """A model whose graph names its inputs.

    Attributes:
        names: of the slots.
        dense_names: of the dense features.
        labels: of the label; empty: it has none.
    """

    names: tuple[str, ...] = ()
    dense_names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def graph(self):
        """See ``TinyModel.graph``."""
        return name_inputs(super().graph(), self.names, self.dense_names, self.labels)


class Heads(TinyModel):
    """A model with two tasks on the same features: clicks and purchases."""

    def graph(self):
        """See ``TinyModel.graph``."""
        graph = super().graph()
        graph["layers"][0]["label"] = {"top": ["click", "buy"], "label_dim": [1, 1]}
        graph["layers"][-2]["fc_param"]["num_output"] = 2
        return graph

    def weights(self):
        """See ``TinyModel.weights``."""
        weight, bias = super().weights()
        return np.concatenate([weight, -weight / 2], axis=1), np.concatenate([bias, bias + 1])


def _onnx_file(graph, weights):
    digest = network_digest(graph, weights)
    if digest not in _onnx_files:
        _onnx_files[digest] = build_onnx(graph, weights)
    return _onnx_files[digest]


def flatten(bags):
    """Bags by sample and slot as CATCOLUMN int64[N] and ROWINDEX int32[B * S + 1]."""
    flat = [bag for slots in bags for bag in slots]
    keys = np.array([key for bag in flat for key in bag], dtype=np.int64)
    return keys, np.cumsum([0, *map(len, flat)]).astype(np.int32)
