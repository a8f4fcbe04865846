"""One prediction of WDL, DeepFM, DCN and DLRM, against the same model in eager PyTorch, in fp32 and in int8.

Both use the same weights and number of threads. The peer looks embeddings up by row number (EmbeddingBag over a dense
table, tensors made in advance, inference_mode). Hotrow takes NumPy arrays, checks them and finds rows by hashing.
Targets: fp32 >= 1.3 for 1 sample, >= 1.1 for 64, >= 1.0 for 1024; int8 >= 3 for 64 and 1024.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.families import FAMILIES, FEATURES, SLOTS
from benchmarks.report import Record, parse_arguments, publish
from serving import load_model
from serving.model.dense_file import weight_key, write_dense
from serving.model.graph import read_graph
from serving.model.sparse_file import write_sparse_directory

SAMPLES = (1, 64, 1024)
#: Tolerances: float32 sums in another order, and int8 against fp32 (the default of calibration).
FP32_ERROR, INT8_ERROR = 1e-4, 0.01


def main():
    arguments = parse_arguments(
        __doc__,
        threads={"type": int, "default": 1, "help": "threads of both sides (default 1)"},
        families={"nargs": "+", "choices": FAMILIES, "default": list(FAMILIES), "help": "default: all"},
    )
    torch.set_num_threads(arguments.threads)
    records = []
    for name in arguments.families:
        records += time_family(name, arguments)
    publish(records, arguments.json)


def time_family(name, arguments):
    rows, rounds, round_s = (10_000, 1, 0.005) if arguments.quick else (1_000_000, 21, 0.1)
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        weights, tables = write_model(Path(folder), family, rows)
        peer = family(weights, tables).eval()
        for engine, error in (("onnx", FP32_ERROR), ("int8", INT8_ERROR)):
            with load_model(folder, engine=engine, threads=arguments.threads) as session:
                for samples in SAMPLES:
                    requests = [draw_request(rows, samples, seed) for seed in range(2 if arguments.quick else 8)]
                    check(session, peer, family, requests, error)
                    params = {"samples": samples, "rows": rows, "threads": arguments.threads, "engine": engine}
                    pairs = measure(session, peer, family, requests, rounds, round_s)
                    yield Record.of(f"predict.{name}", params, "call/s", pairs)


def write_model(folder, family, rows):
    """Write a version directory; returns the dense weights by name, and the vectors of each table."""
    rng = np.random.default_rng(0)
    tables = [rng.uniform(-0.05, 0.05, (rows, dim)).astype(np.float32) for dim in family.DIMS]
    names = [entry["name"] for entry in family.LAYERS if "sparse_embedding_hparam" in entry]
    for name, vectors in zip(names, tables, strict=True):
        write_sparse_directory(folder / name, np.arange(rows), vectors)
    inference = {
        "max_batchsize": max(SAMPLES),
        "input_key_type": "I64",
        "dense_model_file": "dense.model",
        "sparse_model_file": names,
    }
    (folder / "graph.json").write_text(json.dumps({"inference": inference, "layers": family.LAYERS}))
    graph = read_graph(folder / "graph.json")
    weights = {
        weight_key(spec): rng.normal(0, 1 / np.sqrt(spec.shape[0]), spec.shape).astype(np.float32)
        for spec in graph.weights
    }
    write_dense(folder / "dense.model", graph, weights)
    dense, keys, row_ptrs = arrays_of(draw_request(rows, 512, seed=99), family)
    np.savez(folder / "calibration.npz", DES=dense, CATCOLUMN=keys, ROWINDEX=row_ptrs)
    return weights, tables


def draw_request(rows, samples, seed):
    """(dense, keys, row_ptrs) of one table, one key per slot."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(0, 1, (samples, FEATURES)).astype(np.float32)
    return dense, rng.integers(0, rows, samples * SLOTS), np.arange(samples * SLOTS + 1, dtype=np.int32)


def arrays_of(request, family):
    """The request's arrays: the keys of a sample once for each table, the offsets table after table."""
    dense, keys, row_ptrs = request
    tables = len(family.DIMS)
    return dense, np.tile(keys.reshape(-1, 1, SLOTS), (1, tables, 1)).reshape(-1), np.tile(row_ptrs, tables)


def tensors_of(request):
    dense, keys, row_ptrs = request
    return torch.from_numpy(dense), torch.from_numpy(keys), torch.from_numpy(row_ptrs).long()


def check(session, peer, family, requests, error):
    for request in requests:
        with torch.inference_mode():
            expected = peer(*tensors_of(request)).numpy()
        np.testing.assert_allclose(session.predict(*arrays_of(request, family)), expected, rtol=0, atol=error)


def measure(session, peer, family, requests, rounds, round_s):
    """Calls per second of (ours, peer), one pair per round; another side goes first each round."""
    sent = [arrays_of(request, family) for request in requests]
    prepared = [tensors_of(request) for request in requests]

    def ours(number):
        session.predict(*sent[number % len(sent)])

    def theirs(number):
        with torch.inference_mode():
            peer(*prepared[number % len(prepared)])

    pairs = []
    for number in range(rounds):
        rates = {}
        for call in (ours, theirs) if number % 2 else (theirs, ours):
            calls, begin = 0, time.perf_counter()
            while (took := time.perf_counter() - begin) < round_s:
                call(calls)
                calls += 1
            rates[call] = calls / took
        pairs.append((rates[ours], rates[theirs]))
    return pairs


if __name__ == "__main__":
    main()
