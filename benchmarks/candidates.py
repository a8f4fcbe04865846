"""One user and many candidates: what a request that says the user once saves.

A request of 500 candidates with 20 slots and 13 numbers of the user and 6 slots of the item, one value each, over HTTP
with binary tensors by name, one connection. It is measured against the same request with the user repeated for each
candidate: with strings, whose hashes are keys, and with keys. The network is a weighted sum, so the times are mostly
those of decoding, lookups and the wire. Bodies are made before the clock starts.

Targets: at least 3 times as many candidates per second as the expanded request, and at most a third of its bytes.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.http_client import answer_of, compile_client, measure, port_in_url, request_with, running
from benchmarks.report import Record, parse_arguments, publish
from tests.tools.tiny_model import NamedModel

CANDIDATES, USER_SLOTS, ITEM_SLOTS, DENSE, DIM, ROWS = 500, 20, 6, 13, 16, 100_000
SLOTS = tuple(f"u{slot}" for slot in range(USER_SLOTS)) + tuple(f"i{slot}" for slot in range(ITEM_SLOTS))
NUMBERS = tuple(f"n{column}" for column in range(DENSE))


def main():
    arguments = parse_arguments(__doc__)
    rounds, seconds = (1, 0.5) if arguments.quick else (9, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        publish(requests(Path(folder), rounds, seconds), arguments.json)


def requests(folder, rounds, seconds):
    """The rates of both requests, in turns, with strings and with keys."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, ROWS, (1, USER_SLOTS)), rng.integers(0, ROWS, (CANDIDATES, ITEM_SLOTS))
    numbers = rng.normal(size=(1, DENSE)).astype(np.float32)
    model = NamedModel(
        tables={"t": len(SLOTS)},
        dense_dim=DENSE,
        dim=DIM,
        rows=ROWS,
        max_batchsize=1024,
        names=SLOTS,
        dense_names=NUMBERS,
    )
    models = folder / "models"
    model.write(models, "keys")
    write_features(model.write(models, "strings"))
    client, records = compile_client(folder), []
    command = ["serving.cli.main", "serve", str(models), "--http-port", "0", "--device", "cpu"]
    with running(command, port_in_url) as port:
        for name in ("strings", "keys"):
            columns = [*users.T, *items.T, *numbers.T]
            sent = {"shared": columns, "expanded": [np.broadcast_to(column, CANDIDATES) for column in columns]}
            bodies = {form: request_with(name, tensors_of(name, of_form)) for form, of_form in sent.items()}
            if len({answer_of(port, body)[-4 * CANDIDATES :] for body in bodies.values()}) > 1:
                raise SystemExit("both forms of one request must have the same answer")
            for form, body in bodies.items():
                (folder / form).write_bytes(body)
            pairs = []
            for _ in range(rounds + 1):
                found = [measure(client, port, 1, seconds, folder / form)["requests_per_s"] for form in bodies]
                pairs.append(tuple(CANDIDATES * rate for rate in found))
            params = {"values": name, "candidates": CANDIDATES, "user_slots": USER_SLOTS, "item_slots": ITEM_SLOTS}
            records.append(Record.of("candidates.rate", params, "candidates/s", pairs[1:]))
            records.append(Record.of("candidates.bytes", params, "bytes", [tuple(map(len, bodies.values()))]))
    return records


def write_features(version):
    """Make the keys of a version from hashes of strings."""
    (version / "manifest.json").unlink()
    features = [
        {"name": name, "slot": f"t[{slot}]", "kind": "hash", "buckets": ROWS, **({"shares": SLOTS[0]} if slot else {})}
        for slot, name in enumerate(SLOTS)
    ]
    features += [{"name": name, "kind": "dense"} for name in NUMBERS]
    (version / "features.json").write_text(json.dumps({"format": 1, "features": features}))


def tensors_of(model, columns):
    """The column of each slot and number, by name."""
    tensors = dict(zip([*SLOTS, *NUMBERS], columns, strict=True))
    if model == "strings":
        tensors |= {name: [f"value_{key}" for key in tensors[name]] for name in SLOTS}
    return tensors


if __name__ == "__main__":
    main()
