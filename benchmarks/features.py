"""Raw features: what strings cost in a request.

A request of 64 samples with 26 strings each, over HTTP with binary tensors, one connection, against the
same request with int64 values by name, and against the same keys as ``CATCOLUMN``. Bodies are made before the clock
starts. The models differ in their ``features.json`` alone. ``logged`` is the request with strings to a server that logs
a share of its requests, against the same request to a server that logs none.

Targets: at most 1.4 times the time of the request with int64 values; a log of 1 % costs nothing that can be measured.
"""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.http_client import answer_of, compile_client, measure, port_in_url, request_of, request_with, running
from benchmarks.report import Record, parse_arguments, publish
from tests.tools.tiny_model import TinyModel

SAMPLES, SLOTS, DENSE, DIM, ROWS = 64, 26, 13, 16, 100_000


def main():
    arguments = parse_arguments(__doc__)
    rounds, seconds = (1, 0.5) if arguments.quick else (9, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        publish(requests(Path(folder), rounds, seconds), arguments.json)


def requests(folder, rounds, seconds):
    """The time of the three requests, in turns."""
    models, values = folder / "models", np.random.default_rng(0).integers(0, ROWS, (SAMPLES, SLOTS))
    dense = np.random.default_rng(1).normal(size=(SAMPLES, DENSE)).astype(np.float32)
    texts = {f"c{slot}": [f"value_{key}" for key in values[:, slot]] for slot in range(SLOTS)}
    numbers = {f"c{slot}": values[:, slot] for slot in range(SLOTS)}
    prices = {f"i{column}": dense[:, column] for column in range(DENSE)}
    write_model(models, "strings", {"kind": "hash", "buckets": ROWS})
    write_model(models, "integers", {"kind": "identity", "size": ROWS})
    sent = {
        "strings": request_with("strings", {**texts, **prices}),
        "integers": request_with("integers", {**numbers, **prices}),
        "catcolumn": request_of(
            dense, values.reshape(-1), np.arange(SAMPLES * SLOTS + 1, dtype=np.int32), name="integers"
        ),
    }
    for name, request in sent.items():
        (folder / name).write_bytes(request)
    times, shares = {name: [] for name in sent}, (0.01, 1.0)
    logged = {share: [] for share in shares}
    client = compile_client(folder)
    command = ["serving.cli.main", "serve", str(models), "--http-port", "0", "--device", "cpu"]
    with ExitStack() as servers:
        port = servers.enter_context(running(command, port_in_url))
        logging = {}
        for share in shares:
            log = ["--log-requests", str(folder / f"log{share}"), "--sample", str(share)]
            logging[share] = servers.enter_context(running([*command, *log], port_in_url))
        if floats_in(answer_of(port, sent["integers"])) != floats_in(answer_of(port, sent["catcolumn"])):
            raise SystemExit("integers by name get another answer than CATCOLUMN")
        for _ in range(rounds + 1):
            for name in sent:
                times[name].append(1e6 / measure(client, port, 1, seconds, folder / name)["requests_per_s"])
            for share in shares:
                rate = measure(client, logging[share], 1, seconds, folder / "strings")["requests_per_s"]
                logged[share].append(1e6 / rate)
    params = {"samples": SAMPLES, "slots": SLOTS, "dense": DENSE}
    records = [
        Record.of(
            f"features.against_{peer}", params, "us", list(zip(times["strings"][1:], times[peer][1:], strict=True))
        )
        for peer in ("integers", "catcolumn")
    ]
    return records + [
        Record.of(
            "features.logged",
            {**params, "share": share},
            "us",
            list(zip(logged[share][1:], times["strings"][1:], strict=True)),
        )
        for share in shares
    ]


def floats_in(answer):
    """The probabilities of an answer, as bytes."""
    return answer[-4 * SAMPLES :]


def write_model(repository, name, feature):
    """Write a model of one table, and its features."""
    model = TinyModel(tables={"t": SLOTS}, dense_dim=DENSE, dim=DIM, rows=ROWS, max_batchsize=1024)
    version = model.write(repository, name)
    (version / "manifest.json").unlink()
    features = [
        {"name": f"c{slot}", "slot": f"t[{slot}]", **feature, **({"shares": "c0"} if slot else {})}
        for slot in range(SLOTS)
    ]
    features += [{"name": f"i{column}", "kind": "dense"} for column in range(DENSE)]
    (version / "features.json").write_text(json.dumps({"format": 1, "features": features}))


if __name__ == "__main__":
    main()
