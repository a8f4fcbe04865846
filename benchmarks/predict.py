"""One prediction of a DCN of Criteo's shape, against the same model in eager PyTorch.

Both have the same weights and the same threads. The peer looks embeddings up by direct index (EmbeddingBag over a
dense table, tensors made beforehand, inference_mode); ours takes NumPy arrays as a request brings them, checks them,
and finds rows by hashing. Targets: ratio >= 1.3 for 1 sample, >= 1.1 for 64, >= 1.0 for 1024; on 8-bit integers, with
VNNI, >= 3 for 64 and 1024.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Record, parse_arguments, publish
from serving import load_model
from serving.model.calibration_file import write_calibration
from serving.model.dense_file import weight_key, write_dense
from serving.model.graph import read_graph
from serving.model.sparse_file import write_sparse_directory

SLOTS, DIM, FEATURES, CROSS_LAYERS, HIDDEN = 26, 16, 13, 6, 1024
WIDTH = SLOTS * DIM + FEATURES


def main():
    arguments = parse_arguments(__doc__, threads={"type": int, "default": 1, "help": "of both (default 1)"})
    rows, rounds, round_s = (10_000, 5, 0.05) if arguments.quick else (1_000_000, 21, 0.2)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        weights, vectors = write_model(Path(folder), rows)
        peer = TorchDcn(weights, vectors)
        records = []
        for engine in ("auto", "int8"):
            session = load_model(folder, engine=engine, threads=arguments.threads)
            for samples in (1, 64, 1024):
                requests = [draw_request(rows, samples, seed) for seed in range(8)]
                check(session, peer, requests)
                params = {"samples": samples, "rows": rows, "threads": arguments.threads, "engine": session.engine}
                pairs = measure(session, peer, requests, rounds, round_s)
                records.append(Record.of("predict.dcn", params, "call/s", pairs))
            session.close()
    publish(records, arguments.json)


def write_model(folder, rows):
    """Write a version directory; returns the dense weights in file order, and the embedding vectors."""
    rng = np.random.default_rng(0)
    vectors = rng.uniform(-0.05, 0.05, (rows, DIM)).astype(np.float32)
    write_sparse_directory(folder / "embedding", np.arange(rows), vectors)
    (folder / "graph.json").write_text(json.dumps(document()))
    graph = read_graph(folder / "graph.json")
    weights = {
        weight_key(spec): rng.normal(0, 1 / np.sqrt(spec.shape[0]), spec.shape).astype(np.float32)
        for spec in graph.weights
    }
    write_dense(folder / "dense.model", graph, weights)
    write_calibration(folder / "calibration.npz", *draw_request(rows, 512, seed=99))
    return list(weights.values()), vectors


def document():
    sparse = {"top": "data1", "type": "DistributedSlot", "max_feature_num_per_sample": 2 * SLOTS, "slot_num": SLOTS}
    data = {"label": {"label_dim": 1}, "dense": {"top": "dense", "dense_dim": FEATURES}, "sparse": [sparse]}
    embedding = {"bottom": "data1", "sparse_embedding_hparam": {"embedding_vec_size": DIM, "combiner": "sum"}}

    def layer(kind, name, bottom, **more):
        return {"type": kind, "name": name, "bottom": bottom, "top": name, **more}

    return {
        "inference": {
            "max_batchsize": 1024,
            "input_key_type": "I64",
            "dense_model_file": "dense.model",
            "sparse_model_file": "embedding",
        },
        "layers": [
            {"type": "Data", "name": "data", **data},
            {"type": "DistributedSlotSparseEmbeddingHash", "name": "embedding", "top": "embedding", **embedding},
            layer("Reshape", "reshape", "embedding", leading_dim=SLOTS * DIM),
            layer("Concat", "concat", ["reshape", "dense"]),
            {"type": "Slice", "name": "slice", "bottom": "concat", "top": ["x1", "x2"], "ranges": [[0, WIDTH]] * 2},
            layer("MultiCross", "cross", "x1", mc_param={"num_layers": CROSS_LAYERS}),
            layer("InnerProduct", "fc1", "x2", fc_param={"num_output": HIDDEN}),
            layer("ReLU", "relu1", "fc1"),
            layer("InnerProduct", "fc2", "relu1", fc_param={"num_output": HIDDEN}),
            layer("ReLU", "relu2", "fc2"),
            layer("Concat", "concat2", ["relu2", "cross"]),
            layer("InnerProduct", "fc3", "concat2", fc_param={"num_output": 1}),
            layer("Sigmoid", "sigmoid", "fc3"),
        ],
    }


class TorchDcn(torch.nn.Module):
    """The same model as PyTorch users write it."""

    def __init__(self, weights, vectors):
        super().__init__()
        tensors = [torch.from_numpy(one) for one in weights]
        self.embedding = torch.nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(vectors), mode="sum", include_last_offset=True
        )
        self.cross = list(zip(tensors[0 : 2 * CROSS_LAYERS : 2], tensors[1 : 2 * CROSS_LAYERS : 2], strict=True))
        linears = tensors[2 * CROSS_LAYERS :]
        self.fc1, self.fc2, self.fc3 = (self.linear(*linears[i : i + 2]) for i in (0, 2, 4))

    @staticmethod
    def linear(weight, bias):
        layer = torch.nn.Linear(*weight.shape)
        layer.weight = torch.nn.Parameter(weight.T.contiguous(), requires_grad=False)
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        return layer

    def forward(self, dense, keys, offsets):
        x0 = torch.cat([self.embedding(keys, offsets).view(dense.shape[0], -1), dense], dim=1)
        x = x0
        for weight, bias in self.cross:
            x = x0 * (x @ weight)[:, None] + x + bias
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(x0))))
        return torch.sigmoid(self.fc3(torch.cat([hidden, x], dim=1)))


def draw_request(rows, samples, seed):
    """(dense, keys, row_ptrs) as a request brings them: one key per slot."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(0, 1, (samples, FEATURES)).astype(np.float32)
    return dense, rng.integers(0, rows, samples * SLOTS), np.arange(samples * SLOTS + 1, dtype=np.int32)


def tensors_of(request):
    dense, keys, row_ptrs = request
    return torch.from_numpy(dense), torch.from_numpy(keys), torch.from_numpy(row_ptrs).long()


def check(session, peer, requests):
    """Both must give the same probabilities: float32 sums of up to 1453 products, in another order; or nearly so."""
    tolerance = {"rtol": 0, "atol": 0.01} if session.engine == "int8" else {"rtol": 1e-4, "atol": 1e-5}
    for request in requests:
        with torch.inference_mode():
            expected = peer(*tensors_of(request)).numpy()
        np.testing.assert_allclose(session.predict(*request), expected, **tolerance)


def measure(session, peer, requests, rounds, round_s):
    """Calls per second of (ours, peer), one pair per round; the two take turns in going first."""
    prepared = [tensors_of(request) for request in requests]

    def ours(number):
        session.predict(*requests[number % len(requests)])

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
