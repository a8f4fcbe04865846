"""One user and many candidates: what a request that says the user once saves.

A request of 500 candidates with 40 slots and 13 numbers of the user and 10 slots of the item, one key each, over HTTP
with binary tensors, one connection. It is measured against the same request with the user repeated for each candidate,
by name and as ``CATCOLUMN``. The network is a weighted sum, so the times are those of decoding, lookups and the wire.
Bodies are made before the clock starts.

Targets: at least 3 times as many candidates per second as the expanded request, and at most a third of its bytes.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.http_client import answer_of, compile_client, measure, port_in_url, request_of, running
from benchmarks.report import Record, parse_arguments, publish
from tests.tools.tiny_model import NamedModel

CANDIDATES, USER_SLOTS, ITEM_SLOTS, DENSE, DIM, ROWS = 500, 40, 10, 13, 16, 100_000
SLOTS = [f"u{slot}" for slot in range(USER_SLOTS)] + [f"i{slot}" for slot in range(ITEM_SLOTS)]
NUMBERS = [f"n{column}" for column in range(DENSE)]


def main():
    arguments = parse_arguments(__doc__)
    rounds, seconds = (1, 0.5) if arguments.quick else (9, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        publish(requests(Path(folder), rounds, seconds), arguments.json)


def requests(folder, rounds, seconds):
    """The rates of the three requests, in turns, for one table and for a table of each slot."""
    keys = np.random.default_rng(0).integers(0, ROWS, (CANDIDATES, len(SLOTS)))
    keys[:, :USER_SLOTS] = keys[0, :USER_SLOTS]
    dense = np.repeat(np.random.default_rng(1).normal(size=(1, DENSE)).astype(np.float32), CANDIDATES, axis=0)
    models = {"one": {"t": len(SLOTS)}, "each": dict.fromkeys(SLOTS, 1)}
    for name, tables in models.items():
        rows = ROWS if name == "one" else ROWS // len(SLOTS)
        NamedModel(
            tables=tables, names=SLOTS, dense_names=NUMBERS, dense_dim=DENSE, dim=DIM, rows=rows, max_batchsize=1024
        ).write(folder / "models", name)
    rates = {}
    sizes = {}
    client = compile_client(folder)
    with running(
        ["serving.cli.main", "serve", str(folder / "models"), "--http-port", "0", "--device", "cpu"], port_in_url
    ) as port:
        for name in models:
            of_tables = keys if name == "one" else keys % (ROWS // len(SLOTS))
            sent = {
                "shared": named_request(name, of_tables, dense, 1),
                "expanded": named_request(name, of_tables, dense, CANDIDATES),
                "catcolumn": request_of(
                    dense, of_tables.reshape(-1), np.arange(of_tables.size + 1, dtype=np.int32), name=name
                ),
            }
            answers = {form: answer_of(port, request)[-4 * CANDIDATES :] for form, request in sent.items()}
            if len(set(answers.values())) > 1:
                raise SystemExit("the forms of one request get different answers")
            for form, request in sent.items():
                (folder / form).write_bytes(request)
                sizes[name, form], rates[name, form] = len(request), []
            for _ in range(rounds + 1):
                for form in sent:
                    found = measure(client, port, 1, seconds, folder / form)
                    rates[name, form].append(CANDIDATES * found["requests_per_s"])
    records = []
    for name, tables in models.items():
        params = {"candidates": CANDIDATES, "user_slots": USER_SLOTS, "item_slots": ITEM_SLOTS, "tables": len(tables)}
        for peer in ("expanded", "catcolumn"):
            pairs = list(zip(rates[name, "shared"][1:], rates[name, peer][1:], strict=True))
            records.append(Record.of(f"candidates.against_{peer}", params, "candidates/s", pairs))
            both = (sizes[name, "shared"], sizes[name, peer])
            records.append(Record.of(f"candidates.bytes_against_{peer}", params, "bytes", [both]))
    return records


def named_request(model, keys, dense, rows):
    """The raw bytes of an HTTP request with one tensor for each slot and number; those of the user have ``rows``."""
    users, items = np.split(keys.T, [USER_SLOTS])
    columns = [column[:rows] for column in users] + list(items) + [column[:rows] for column in dense.T]
    tensors = list(zip([*SLOTS, *NUMBERS], map(np.ascontiguousarray, columns), strict=True))
    inputs = [
        {
            "name": name,
            "datatype": "INT64" if column.dtype == np.int64 else "FP32",
            "shape": [len(column)],
            "parameters": {"binary_data_size": column.nbytes},
        }
        for name, column in tensors
    ]
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    body = head + b"".join(column.tobytes() for _, column in tensors)
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


if __name__ == "__main__":
    main()
