"""A small graph with two tables, whose second table is localized, and Norm files with a planted truth."""

import copy
import json
from functools import cache

import numpy as np
import pytest

from training.data import write_file_list, write_norm

ADAM = {"type": "Adam", "update_type": "Local", "adam_hparam": {"learning_rate": 0.01}}
GRAPH = {
    "optimizer": ADAM,
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "source": "file_list.0.txt",
            "eval_source": "file_list.5.txt",
            "check": "Sum",
            "label": {"top": "label", "label_dim": 1},
            "dense": {"top": "dense", "dense_dim": 2},
            "sparse": [
                {"top": "wide", "type": "DistributedSlot", "max_feature_num_per_sample": 8, "slot_num": 2},
                {"top": "deep", "type": "LocalizedSlot", "max_feature_num_per_sample": 8, "slot_num": 3},
            ],
        },
        {
            "name": "wide_table",
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "wide",
            "top": "wide_table",
            "sparse_embedding_hparam": {"embedding_vec_size": 1, "combiner": 1},
        },
        {
            "name": "deep_table",
            "type": "LocalizedSlotSparseEmbeddingHash",
            "bottom": "deep",
            "top": "deep_table",
            "sparse_embedding_hparam": {"embedding_vec_size": 4, "combiner": 0},
        },
        {"name": "flat1", "type": "Reshape", "bottom": "wide_table", "top": "flat1", "leading_dim": 2},
        {"name": "flat2", "type": "Reshape", "bottom": "deep_table", "top": "flat2", "leading_dim": 12},
        {"name": "concat", "type": "Concat", "bottom": ["flat1", "flat2", "dense"], "top": "concat"},
        {"name": "fc1", "type": "InnerProduct", "bottom": "concat", "top": "fc1", "fc_param": {"num_output": 8}},
        {
            "name": "norm1",
            "type": "BatchNorm",
            "bottom": "fc1",
            "top": "norm1",
            "bn_param": {"factor": 0.1, "eps": 1e-5},
        },
        {"name": "relu1", "type": "ReLU", "bottom": "norm1", "top": "relu1"},
        {"name": "dropout1", "type": "Dropout", "rate": 0.25, "bottom": "relu1", "top": "dropout1"},
        {"name": "fc2", "type": "InnerProduct", "bottom": "dropout1", "top": "fc2", "fc_param": {"num_output": 1}},
        {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"},
    ],
}
SAMPLES = 400  # of each file list
KEYS_PER_SLOT = 30


@pytest.fixture
def graph():
    return copy.deepcopy(GRAPH)


@pytest.fixture
def write_graph(tmp_path):
    def write(graph, name="graph.json"):
        path = tmp_path / name
        path.write_text(json.dumps(graph), encoding="utf-8")
        return str(path)

    return write


@cache  # many tests write the same files
def samples_of(part, samples=SAMPLES, shift=0):
    """Labels, dense features and keys. A key belongs to one slot; ``shift`` moves the keys of the last slot."""
    rng = np.random.default_rng([7, part])
    dense = rng.normal(size=(samples, 2)).astype(np.float32)
    firsts = np.arange(5) * KEYS_PER_SLOT
    slots = [
        [
            (firsts[slot] + rng.choice(KEYS_PER_SLOT, rng.integers(0 if slot else 1, 3), replace=False)).tolist()
            for slot in range(5)
        ]
        for _ in range(samples)
    ]
    for sample in slots:
        sample[4] = [key + shift for key in sample[4]]
    weights = np.random.default_rng(3).normal(size=5 * KEYS_PER_SLOT)
    score = dense[:, 0] + [
        sum(weights[key - shift * (slot == 4)] for slot, bag in enumerate(sample) for key in bag) for sample in slots
    ]
    labels = (rng.random(samples) < 1 / (1 + np.exp(-score))).astype(np.float32)[:, None]
    return labels, dense, slots


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Six file lists with keysets in the working directory, ``file_list.0.txt`` to ``file_list.5.txt``."""
    monkeypatch.chdir(tmp_path)
    write_data("uint32")


def write_data(key_type, shifts=(0,) * 6):
    for part, shift in enumerate(shifts):
        labels, dense, slots = samples_of(part, shift=shift)
        half = SAMPLES // 2
        names = [f"part{part}.0.norm", f"part{part}.1.norm"]
        for name, some in zip(names, (slice(0, half), slice(half, None)), strict=True):
            write_norm(name, labels[some], dense[some], slots[some], key_type, "Sum")
        write_file_list(f"file_list.{part}.txt", names)
        keys = np.unique([key for sample in slots for bag in sample for key in bag])
        keys.astype(key_type).tofile(f"file_list.{part}.keyset")
