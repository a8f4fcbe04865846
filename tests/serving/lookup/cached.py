"""Models of several tables, requests for them, and caches in front of their tiers."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from serving.batch import Batch, TableKeys
from serving.config import GpuCacheConfig, ModelConfig, TableConfig
from serving.lookup.cached_session import CachedLookupSession
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.storage import MemoryStore

UNKNOWN_KEYS = [-7, 10**15]


@dataclass(frozen=True)
class Sketch:
    """A table to write."""

    dim: int
    rows: int = 60
    slots: int = 2
    combiner: str = "sum"
    default_value: float = 0.0
    row_dtype: str = "fp32"


THREE_TABLES = (
    Sketch(4, slots=1),
    Sketch(7, rows=90, slots=3, combiner="mean", default_value=0.25),
    Sketch(4, rows=40, combiner="sqrtn"),
)


def write_model(folder, sketches=THREE_TABLES, name="m", **gpu_cache):
    """Write a model's tables with the keys 0, 3, 6, ...; return the model's configuration."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(11)
    tables = []
    for place, sketch in enumerate(sketches):
        keys = np.arange(sketch.rows) * 3
        rows = rng.normal(0, 1, (sketch.rows, sketch.dim)).astype(np.float32)
        file = folder / f"t{place}"
        write_sparse_directory(file, keys, rows)
        tables.append(
            TableConfig(
                name=f"t{place}",
                dim=sketch.dim,
                slots=sketch.slots,
                combiner=sketch.combiner,
                default_value=sketch.default_value,
                file=file,
                row_dtype=sketch.row_dtype,
            )
        )
    return ModelConfig(
        name=name,
        graph_file=folder / "graph.json",
        dense_file=folder / "dense.model",
        tables=tuple(tables),
        key_type="I64",
        max_batchsize=16,
        dense_dim=0,
        label_dim=1,
        gpu_cache=GpuCacheConfig(**{"size_ratio": 0.5, "fills_at_start": False} | gpu_cache),
    )


def with_cache(config, **changes):
    """Return the configuration with other cache settings."""
    return config.model_copy(update={"gpu_cache": config.gpu_cache.model_copy(update=changes)})


@contextmanager
def served(config, *stores):
    """Open a parameter server that holds the model, in RAM by default."""
    with ParameterServer(stores or [MemoryStore()]) as server:
        server.load_model(config)
        yield server


@contextmanager
def cached(server, config, device):
    """Open the model's caches."""
    lookup = CachedLookupSession(server, config, device)
    try:
        yield lookup
    finally:
        lookup.close()


def request(config, rng, samples=5, longest=4, unknown_ratio=0.1, hottest=None):
    """Draw a batch; ``hottest`` limits it to the first ``hottest`` keys of each table."""
    tables = []
    for table in config.tables:
        rows = table.max_keys_per_sample or _rows(table)
        sizes = rng.integers(0, longest + 1, samples * table.slots)
        row_ptrs = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        keys = rng.integers(0, min(hottest or rows, rows), row_ptrs[-1]) * 3
        unknown = rng.random(keys.size) < unknown_ratio
        keys[unknown] = rng.choice(UNKNOWN_KEYS, np.count_nonzero(unknown))
        tables.append(TableKeys(keys, row_ptrs))
    return Batch(np.zeros((samples, 0), dtype=np.float32), tuple(tables))


def _rows(table):
    return (table.file / "key").stat().st_size // 8


def same(answer, expected):
    """Whether two answers are equal to the bit."""
    return answer.defaulted_keys == expected.defaulted_keys and all(
        one.tobytes() == other.tobytes() and one.shape == other.shape
        for one, other in zip(answer.embeddings, expected.embeddings, strict=True)
    )
