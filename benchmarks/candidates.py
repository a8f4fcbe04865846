"""One user and many candidates: what a request that says the user once saves, and how much it could save.

A request of 500 candidates with 20 slots and 13 numbers of the user and 6 slots of the item, one value each, over HTTP
with binary tensors by name, one connection. It is measured against the same request with the user repeated for each
candidate. Bodies are made before the clock starts.

- With a sum as the network, rows of 16 floats as DCN has and of 128 as DLRM has, and with strings and with keys. The
  time of the network alone is measured in this process, and taken from both sides.
- The limit of this ratio: each side exchanges as many bytes with a bare socket, gathers known rows in C, and writes the
  network's input, 26 x 500 rows. Nothing is decoded and no key is found, so this is measured for keys alone.
- DCN and DLRM of HugeCTR's samples, against the time of the network alone.

Targets: without the network at least 3 times as fast as the expanded request, at most a third of its bytes, and whole
models at most 15 % above the time of the network.
"""

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.families import FAMILIES, FEATURES, SLOTS, data, embedding, layer
from benchmarks.gather import aligned, compile_gather, gather
from benchmarks.http_client import answer_of, compile_client, measure, port_in_url, request_with, running
from benchmarks.predict import write_model
from benchmarks.report import Record, parse_arguments, publish
from serving.config import read_model_directory
from serving.dense.files import open_dense
from serving.model.graph import name_inputs

CANDIDATES, USER_SLOTS, ROWS = 500, 20, 100_000
ITEM_SLOTS = SLOTS - USER_SLOTS
NAMES = [f"u{slot}" for slot in range(USER_SLOTS)] + [f"i{slot}" for slot in range(ITEM_SLOTS)]
NUMBERS = [f"n{column}" for column in range(FEATURES)]
ANSWER_BYTES = 4 * CANDIDATES + 200


class Sum:
    """The sum of all numbers, as a network."""

    def __init__(self, dim):
        self.DIMS = (dim,)
        self.LAYERS = (
            data("sparse"),
            embedding("embedding", "sparse", dim),
            layer("Reshape", "flat", "embedding", leading_dim=SLOTS * dim),
            layer("ReduceSum", "rows", "flat", axis=1),
            layer("ReduceSum", "numbers", "dense", axis=1),
            layer("Add", "add", ["rows", "numbers"]),
            layer("Sigmoid", "probability", "add"),
        )


#: By model: its layers, and whether requests have strings, whose hashes are keys.
MODELS = {
    "strings16": (Sum(16), True),
    "keys16": (Sum(16), False),
    "strings128": (Sum(128), True),
    "keys128": (Sum(128), False),
    "dcn": (FAMILIES["dcn"], False),
    "dlrm": (FAMILIES["dlrm"], False),
}


def main():
    arguments = parse_arguments(
        __doc__, models={"nargs": "+", "choices": MODELS, "default": list(MODELS), "help": "default: all"}
    )
    rounds, seconds = (1, 0.1) if arguments.quick else (7, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        publish(requests(Path(folder), rounds, seconds, arguments.models), arguments.json)


def requests(folder, rounds, seconds, models):
    """The records of the models."""
    for name in models:
        family, has_strings = MODELS[name]
        version = folder / "models" / name / "1"
        version.mkdir(parents=True)
        write_model(version, family, ROWS)
        name_inputs_of(version, has_strings)
    client, records = compile_client(folder), []
    command = ["serving.cli.main", "serve", str(folder / "models"), "--http-port", "0", "--device", "cpu"]
    with running(command, port_in_url) as port:
        for name in models:
            family, has_strings = MODELS[name]
            bodies = bodies_of(name, has_strings)
            answers = [answer_of(port, body) for body in bodies]
            if answers[0][-4 * CANDIDATES :] != answers[1][-4 * CANDIDATES :]:
                raise SystemExit("both forms of one request must have the same answer")
            run = network_of(folder / "models" / name / "1")
            times = [
                (*exchanges(client, port, bodies, folder, seconds), seconds_of(run, seconds)) for _ in range(rounds + 1)
            ]
            shape = {"candidates": CANDIDATES, "user_slots": USER_SLOTS, "item_slots": ITEM_SLOTS}
            if not isinstance(family, Sum):
                whole = [(1e3 * shared, 1e3 * alone) for shared, _, alone in times[1:]]
                records.append(Record.of("candidates.whole", {"model": name, **shape}, "ms", whole))
                continue
            params = {"values": "strings" if has_strings else "keys", "dim": family.DIMS[0], **shape}
            pairs = {
                "rate": [(shared, expanded) for shared, expanded, _ in times],
                "without_network": [(shared - alone, expanded - alone) for shared, expanded, alone in times],
            }
            if not has_strings:
                pairs["limit"] = limits(client, bodies, family.DIMS[0], folder, rounds, seconds)
            for what, of_rounds in pairs.items():
                rates = [(CANDIDATES / shared, CANDIDATES / expanded) for shared, expanded in of_rounds[1:]]
                records.append(Record.of(f"candidates.{what}", params, "candidates/s", rates))
            share = [(1e6 * alone, 1e6 * shared) for shared, _, alone in times[1:]]
            records.append(Record.of("candidates.network", params, "us", share))
            records.append(Record.of("candidates.bytes", params, "bytes", [tuple(map(len, bodies))]))
    return records


def name_inputs_of(version, has_strings):
    """Give the inputs of a version names; its slots may have hashes of strings."""
    graph = version / "graph.json"
    graph.write_text(json.dumps(name_inputs(json.loads(graph.read_text()), NAMES, NUMBERS)))
    if has_strings:
        features = [
            {"name": name, "kind": "hash", "buckets": ROWS, **({"shares": NAMES[0]} if slot else {})}
            for slot, name in enumerate(NAMES)
        ]
        features += [{"name": name, "kind": "dense"} for name in NUMBERS]
        (version / "features.json").write_text(json.dumps({"format": 1, "features": features}))


def bodies_of(model, has_strings):
    """The request that says the user once, and the request that repeats the user."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, ROWS, (USER_SLOTS, 1)), rng.integers(0, ROWS, (ITEM_SLOTS, CANDIDATES))
    columns = [*users, *items, *rng.normal(size=(FEATURES, 1)).astype(np.float32)]
    bodies = []
    for of_form in (columns, [np.broadcast_to(column, CANDIDATES) for column in columns]):
        tensors = dict(zip([*NAMES, *NUMBERS], of_form, strict=True))
        if has_strings:
            tensors |= {name: [f"value_{key}" for key in tensors[name]] for name in NAMES}
        bodies.append(request_with(model, tensors))
    return bodies


def network_of(version):
    """A function that runs the network of a version on one batch of candidates."""
    config = read_model_directory(version)
    graph, network = open_dense(*config.network_files(), config.onnx_file)
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(CANDIDATES, graph.dense_dim)).astype(np.float32)
    rows = [rng.uniform(-0.05, 0.05, (CANDIDATES, e.slots, e.dim)).astype(np.float32) for e in graph.embeddings]
    return lambda: network(dense, rows)


def seconds_of(call, seconds):
    """Seconds of one call, which is repeated for some time."""
    calls, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds / 4:
        call()
        calls += 1
    return took / calls


def exchanges(client, port, bodies, folder, seconds):
    """Seconds of one exchange of each of the bodies."""
    for number, body in enumerate(bodies):
        (folder / f"body{number}").write_bytes(body)
        yield 1 / measure(client, port, 1, seconds, folder / f"body{number}")["requests_per_s"]


def limits(client, bodies, dim, folder, rounds, seconds):
    """Seconds of the least work of both forms, round by round: the exchange of their bytes, and the network's input."""
    library, rng = compile_gather(), np.random.default_rng(2)
    table, rows = aligned(ROWS, dim), np.empty((CANDIDATES * SLOTS, dim), np.float32)
    table[:] = rng.random((ROWS, dim), np.float32)
    of_items, of_all = (rng.integers(0, ROWS, CANDIDATES * slots) for slots in (ITEM_SLOTS, SLOTS))
    of_users = rows.reshape(CANDIDATES, SLOTS, dim)[:, :USER_SLOTS]

    def shared():
        gather(library, "l2", table, of_items, rows)
        of_users[:] = table[:USER_SLOTS]

    def expanded():
        gather(library, "l2", table, of_all, rows)

    works, found = (shared, expanded), []
    with ExitStack() as stack:
        servers = [(stack.enter_context(bare_server(len(body), folder)), [body]) for body in bodies]
        for _ in range(rounds + 1):
            wires = (next(exchanges(client, *server, folder, seconds)) for server in servers)
            found.append(tuple(wire + seconds_of(work, seconds) for wire, work in zip(wires, works, strict=True)))
    return found


def bare_server(request_bytes, folder):
    """A server that reads requests of this size, and answers each with as many bytes as an answer has."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % ANSWER_BYTES
    (folder / "answer").write_bytes(head + bytes(ANSWER_BYTES))
    return running(["benchmarks.bare_socket", str(request_bytes), str(folder / "answer")], int)


if __name__ == "__main__":
    main()
