"""The batcher against a server that answers every request alone, and a server with ten times the load it can take.

Model: DCN with a deep network of 1024-1024 (``benchmarks.families``), two tables of 100,000 rows in memory. The servers
take turns, round by round; the client is ``http_client.cpp``.

- ``batching``: 16 connections. Peer: ``--max-batch-size 1``. Neither server refuses a request.
- ``overload``: as many connections as offer ten times the requests per second that the server answers; a refused
  connection waits before it asks again. Peer: the same server with two connections, which it never refuses.
  ``--max-queue-wait-ms`` is half of the unloaded p99.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.families import FAMILIES
from benchmarks.http_client import compile_client, measure, port_in_url, request_of, running
from benchmarks.predict import arrays_of, draw_request, write_model
from benchmarks.report import Record, parse_arguments, publish

CONNECTIONS, UNLOADED_CONNECTIONS, OVERLOAD = 16, 2, 10
PAUSE_MS = 100
SETTLES_S = 1.0  # until the server has noticed that hundreds of clients have gone
MEASURES = {"requests_per_s": "1/s", "p50": "us", "p99": "us"}
FAMILY = "dcn"


def serve(repository, *options):
    command = ["serving.cli.main", "serve", str(repository), "--http-port", "0", "--device", "cpu", *options]
    return running(command, port_in_url)


def compare(client, repository, request, samples, rounds, seconds):
    """Records of both servers at 16 connections, and the merging server's figures without load and at its limit."""
    patient = ("--max-queue-wait-ms", "60000")
    with serve(repository, *patient) as ours, serve(repository, *patient, "--max-batch-size", "1") as alone:
        for port in (ours, alone):
            measure(client, port, 1, seconds / 2, request)  # warm up
        turns = [
            [measure(client, port, CONNECTIONS, seconds, request) for port in (ours, alone)] for _ in range(rounds)
        ]
        unloaded = measure(client, ours, UNLOADED_CONNECTIONS, seconds, request)
    params = {"model": FAMILY, "samples": samples, "connections": CONNECTIONS}
    records = [
        Record.of(f"batching.{name}", params, unit, [(ours[name], alone[name]) for ours, alone in turns])
        for name, unit in MEASURES.items()
    ]
    return records, unloaded, median(ours["requests_per_s"] for ours, _ in turns)


def overload(client, repository, request, samples, rounds, seconds, unloaded, capacity):
    """Records of accepted requests under ten times the load, against the same server without load."""
    wait_ms = max(1, round(unloaded["p99"] / 2000))
    connections = max(CONNECTIONS, round(OVERLOAD * capacity * PAUSE_MS / 1000))
    turns = []
    with serve(repository, "--max-queue-wait-ms", str(wait_ms)) as port:
        measure(client, port, UNLOADED_CONNECTIONS, seconds / 2, request, PAUSE_MS)
        for _ in range(rounds):
            loaded = measure(client, port, connections, seconds, request, PAUSE_MS)
            time.sleep(SETTLES_S)
            turns.append((loaded, measure(client, port, UNLOADED_CONNECTIONS, seconds, request, PAUSE_MS)))
    params = {"model": FAMILY, "samples": samples, "connections": connections, "max_queue_wait_ms": wait_ms}
    records = [
        Record.of(f"batching.overload_{name}", params, unit, [(loaded[name], alone[name]) for loaded, alone in turns])
        for name, unit in MEASURES.items()
    ]
    refused = [(loaded["refused_p99"], alone["p99"]) for loaded, alone in turns]
    offered = [(loaded["requests_per_s"] + loaded["refused_per_s"], loaded["requests_per_s"]) for loaded, _ in turns]
    records.append(Record.of("batching.overload_refused_p99", params, "us", refused))
    records.append(Record.of("batching.overload_offered", params, "1/s", offered))
    return records


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    rounds, seconds, rows = (1, 0.3, 1000) if options.quick else (7, 3.0, 100_000)
    family = FAMILIES[FAMILY]
    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models" / "bench" / "1").mkdir(parents=True)
        write_model(folder / "models" / "bench" / "1", family, rows)
        client, request = compile_client(folder), folder / "request"
        for samples in (16,) if options.quick else (1, 16, 64, 256):
            dense, keys, row_ptrs = arrays_of(draw_request(rows, samples, seed=1), family)
            request.write_bytes(request_of(dense, keys.astype(np.int64), row_ptrs.astype(np.int32)))
            both = client, folder / "models", request, samples, rounds, seconds
            found, unloaded, capacity = compare(*both)
            records += found
            if samples >= 64 or options.quick:
                records += overload(*both, unloaded, capacity)
    publish(records, options.json)


if __name__ == "__main__":
    main()
