"""Small models in HugeCTR v3.0's files, written here byte by byte, and what they must answer, computed by PyTorch."""

import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from serving.storage.shared.folder import SHARED_MEMORY

HIDDEN = 5


@dataclass(frozen=True)
class TableSketch:
    """One embedding table of a model to be written; ``rows`` is how many keys it has."""

    slots: int = 3
    dim: int = 4
    combiner: int = 0  # HugeCTR v3.0: 0 sum, 1 mean
    layout: str = "distributed"
    rows: int = 50
    max_keys: int = 40


class WrittenModel:
    """A model on disk, and everything that was written, for the oracle."""

    def __init__(self, folder, sketches, features, key_type, seed, declare_key_type):
        rng = np.random.default_rng(seed)
        self.sketches, self.features, self.key_type = sketches, features, key_type
        self.tables = [self._draw_rows(rng, sketch) for sketch in sketches]
        width = features + sum(sketch.slots * sketch.dim for sketch in sketches)
        shapes = [(width,), (width,), (width, HIDDEN), (HIDDEN,), (width + HIDDEN, 1), (1,)]
        self.weights = [rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_dense_10.model").write_bytes(
            b"".join(struct.pack(f"<{weight.size}f", *weight.reshape(-1)) for weight in self.weights)
        )
        names = [f"{index}_sparse_10.model" for index in range(len(sketches))]
        for name, sketch, rows in zip(names, sketches, self.tables, strict=True):
            (folder / name).write_bytes(self._pack(sketch, rows))
        inference = {"max_batchsize": 64, "dense_model_file": "./_dense_10.model", "sparse_model_file": names}
        if declare_key_type:
            inference["input_key_type"] = key_type
        if len(names) == 1:
            inference["sparse_model_file"] = names[0]
        self.document = {"inference": inference, "layers": self._layers(width)}
        self.config_file = folder / "model.json"
        self.write_config()

    def write_config(self):
        self.config_file.write_text(json.dumps(self.document))

    def _draw_rows(self, rng, sketch):
        high = 2**32 - 1 if self.key_type == "I32" else 2**63 - 3
        keys = {0, high, *rng.integers(0, high, sketch.rows - 2).tolist()}
        return {key: rng.normal(0, 1, sketch.dim).astype(np.float32) for key in sorted(keys)}

    def _pack(self, sketch, rows):
        key = "<q" if self.key_type == "I64" else "<I"
        packed = []
        for number, (value, row) in enumerate(rows.items()):
            slot_id = struct.pack("<Q", number % sketch.slots) if sketch.layout == "localized" else b""
            packed.append(struct.pack(key, value) + slot_id + struct.pack(f"<{sketch.dim}f", *row))
        return b"".join(packed)

    def _layers(self, width):
        sparse, embeddings, reshapes = [], [], []
        for index, sketch in enumerate(self.sketches):
            kind = "Distributed" if sketch.layout == "distributed" else "Localized"
            sparse.append(
                {
                    "top": f"data{index}",
                    "type": f"{kind}Slot",
                    "max_feature_num_per_sample": sketch.max_keys,
                    "slot_num": sketch.slots,
                }
            )
            embeddings.append(
                {
                    "name": f"table{index}",
                    "type": f"{kind}SlotSparseEmbeddingHash",
                    "bottom": f"data{index}",
                    "top": f"embedding{index}",
                    "sparse_embedding_hparam": {"embedding_vec_size": sketch.dim, "combiner": sketch.combiner},
                }
            )
            reshapes.append(
                {
                    "name": f"reshape{index}",
                    "type": "Reshape",
                    "bottom": f"embedding{index}",
                    "top": f"reshape{index}",
                    "leading_dim": sketch.slots * sketch.dim,
                }
            )
        data = {
            "name": "data",
            "type": "Data",
            "label": {"label_dim": 1},
            "dense": {"top": "dense", "dense_dim": self.features},
            "sparse": sparse,
        }
        bottoms = [reshape["top"] for reshape in reshapes] + ["dense"]
        fc = "InnerProduct"
        return [
            data,
            *embeddings,
            *reshapes,
            {"name": "concat1", "type": "Concat", "bottom": bottoms, "top": "concat1"},
            {"name": "slice1", "type": "Slice", "bottom": "concat1", "ranges": [[0, width]] * 2, "top": ["x1", "x2"]},
            {"name": "cross", "type": "MultiCross", "bottom": "x1", "top": "cross", "mc_param": {"num_layers": 1}},
            {"name": "fc1", "type": fc, "bottom": "x2", "top": "fc1", "fc_param": {"num_output": HIDDEN}},
            {"name": "relu1", "type": "ReLU", "bottom": "fc1", "top": "relu1"},
            {"name": "concat2", "type": "Concat", "bottom": ["cross", "relu1"], "top": "concat2"},
            {"name": "fc2", "type": fc, "bottom": "concat2", "top": "fc2", "fc_param": {"num_output": 1}},
            {"name": "sigmoid", "type": "Sigmoid", "bottom": "fc2", "top": "sigmoid"},
        ]

    def draw_request(self, rng, samples, unknown_ratio=0.0, max_hotness=3):
        """Draw dense float32[B, F] and bags[t][sample][slot], each a list of keys."""
        dense = rng.normal(0, 1, (samples, self.features)).astype(np.float32)
        bags = []
        for sketch, rows in zip(self.sketches, self.tables, strict=True):
            known = list(rows)

            def draw(known=known):
                size = int(rng.integers(0, max_hotness + 1))
                picked = [known[int(rng.integers(len(known)))] for _ in range(size)]
                return [123_456_789 if rng.random() < unknown_ratio else key for key in picked]

            bags.append([[draw() for _ in range(sketch.slots)] for _ in range(samples)])
        return dense, bags

    def flatten(self, bags):
        """Give (keys, row_ptrs by table as in HugeCTR v4, row_ptrs as one CSR)."""
        samples = len(bags[0])
        keys = [key for b in range(samples) for of_table in bags for bag in of_table[b] for key in bag]
        by_table, one = [], [0]
        for of_table in bags:
            block = [0]
            for bag in (bag for sample in of_table for bag in sample):
                block.append(block[-1] + len(bag))
            by_table += block
        for b in range(samples):
            for bag in (bag for of_table in bags for bag in of_table[b]):
                one.append(one[-1] + len(bag))
        return keys, by_table, one

    def expected(self, dense, bags):
        """Compute the probabilities in float64: float64[B, 1]."""
        import torch  # here, so that tests which need no oracle run where PyTorch is not installed

        parts = []
        for sketch, rows, of_table in zip(self.sketches, self.tables, bags, strict=True):
            pooled = torch.zeros(len(of_table), sketch.slots, sketch.dim, dtype=torch.float64)
            for b, sample in enumerate(of_table):
                for s, bag in enumerate(sample):
                    for key in bag:
                        pooled[b, s] += torch.from_numpy(rows.get(key, np.zeros(sketch.dim, np.float32))).double()
                    if sketch.combiner == 1 and len(bag) > 1:
                        pooled[b, s] /= len(bag)
            parts.append(pooled.flatten(1))
        x = torch.cat([*parts, torch.from_numpy(np.asarray(dense)).double()], dim=1)
        cross_w, cross_b, w1, b1, w2, b2 = (torch.from_numpy(weight).double() for weight in self.weights)
        cross = x * (x @ cross_w)[:, None] + x + cross_b
        hidden = torch.relu(x @ w1 + b1)
        return torch.sigmoid(torch.cat([cross, hidden], dim=1) @ w2 + b2).numpy()


@pytest.fixture
def write_model(tmp_path):
    """Write a model in v3.0's files into a folder of its own; returns the WrittenModel."""

    def write(*sketches, features=2, key_type="I64", seed=0, declare_key_type=True, folder="model"):
        sketches = sketches or (TableSketch(),)
        return WrittenModel(Path(tmp_path) / folder, sketches, features, key_type, seed, declare_key_type)

    write.table = TableSketch
    return write


@pytest.fixture(scope="session")
def genuine_config():
    """Give the path of a HugeCTR configuration by its name, or skip."""
    default = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("HOTROW_TEST_DATA", default)) / "hugectr_configs"

    def find(name):
        if not (folder / name).exists():
            pytest.skip(f"{folder / name} is absent; set HOTROW_TEST_DATA")
        return folder / name

    return find


@pytest.fixture
def shared_memory_name():
    """A name under which processes may share memory; what they leave there goes."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip(f"this system has no {SHARED_MEMORY}")
    name = f"hotrow_test_{uuid4().hex}"
    yield name
    shutil.rmtree(SHARED_MEMORY / name, ignore_errors=True)
