"""Predictions while another model of 1 GB loads, and while it is dropped, against the same server at rest.

The limit of the machine is in the same rounds: another process of lowest priority reads the files into new memory.

Requests of 64 samples arrive at a third of the rate that one connection reaches. A latency counts from the time at
which the request was due, so a server that stands still shows in every request that waits. Tiers: RAM, and a cache in
RAM in front of RocksDB.
"""

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.http_client import compile_client, measure, port_in_url, request_of, running
from benchmarks.report import Record, parse_arguments, publish
from tests.tools.tiny_model import TinyModel, flatten

SAMPLES, SHARE_OF_PEAK = 64, 1 / 3
TIERS = {
    "RAM": {"type": "hash_map"},
    "RocksDB": {"type": "hash_map", "capacity_rows": 100_000},
}
#: A process that reads files into memory, as the model's load does.
READ_FILES = """
import os, pathlib, sys
os.nice(19)
rows = [file.read_bytes() for file in pathlib.Path(sys.argv[1]).rglob("*") if file.is_file()]
"""


class Paced:
    """A client that sends a request at equal intervals over one connection; use it as a block.

    Attributes:
        latencies: seconds from the time at which each request was due to its answer, by the time at which it was due.
    """

    def __init__(self, port, request, interval_s):
        self.latencies = {}
        self._fault = ""
        self._request, self._interval_s = request, interval_s
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        due_s = time.monotonic()
        with self._socket:
            while not self._stop.is_set():
                due_s += self._interval_s
                time.sleep(max(0.0, due_s - time.monotonic()))
                self._socket.sendall(self._request)
                answer = b""
                while b"OUTPUT0" not in answer or len(answer) < 4 * SAMPLES:
                    part = self._socket.recv(65536)
                    answer += part
                    if not part or not answer.startswith(b"HTTP/1.1 200 "[: len(answer)]):
                        self._fault = f"the server answered {answer[:500]!r}"
                        return
                self.latencies[due_s] = time.monotonic() - due_s

    def p99_us(self, begin_s, end_s):
        """The 99th percentile of the requests that were due in a span; all requests so far must have succeeded."""
        if self._fault:
            raise SystemExit(self._fault)
        return 1e6 * np.quantile([took for due, took in list(self.latencies.items()) if begin_s <= due < end_s], 0.99)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_exception):
        self._stop.set()
        self._thread.join()


def ask(port, act):
    """Load or unload the large model; return when that began and ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began_s = time.monotonic()
    connection.request("POST", f"/v2/repository/models/large/{act}")
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{act}: {answer.read()!r}")
    connection.close()
    return began_s, time.monotonic()


def read_files(folder):
    """Read the large model's files in another process; return when that began and ended."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", READ_FILES, folder / "models" / "large"], check=True)
    return began_s, time.monotonic()


def compare(client, folder, request_file, tiers, rounds, rest_s):
    """Records of one configuration of tiers."""
    ps = {"supportlonglong": True, "models": [], "volatile_db": TIERS[tiers]}
    if tiers == "RocksDB":
        ps["persistent_db"] = {"type": "rocks_db", "path": str(folder / "rows")}
    (folder / "models" / "ps.json").write_text(json.dumps(ps), encoding="utf-8")
    options = ("--device", "cpu", "--model-control-mode", "explicit", "--load-model", "small")
    pairs = {"read": [], "load": [], "drop": []}
    with running(
        ["serving.cli.main", "serve", str(folder / "models"), "--http-port", "0", *options], port_in_url
    ) as port:
        peak = max(measure(client, port, 1, rest_s, request_file)["requests_per_s"] for _ in range(3))
        with Paced(port, request_file.read_bytes(), 1 / (peak * SHARE_OF_PEAK)) as paced:
            for _ in range(rounds):
                began_s = time.monotonic()
                time.sleep(rest_s)
                reading = read_files(folder)
                loading = ask(port, "load")
                time.sleep(rest_s)
                dropping = ask(port, "unload")
                time.sleep(rest_s / 2)  # memory is given back after the answer, too
                rest = paced.p99_us(began_s, began_s + rest_s)
                pairs["read"].append((paced.p99_us(*reading), rest))
                pairs["load"].append((paced.p99_us(*loading), rest))
                pairs["drop"].append((paced.p99_us(dropping[0], time.monotonic() - 0.1), rest))
    params = {"tiers": tiers, "requests_per_s": round(peak * SHARE_OF_PEAK)}
    return [Record.of(f"swaps.{act}_p99", params, "us", found) for act, found in pairs.items()]


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    rounds, rest_s, rows = (1, 0.5, 50_000) if options.quick else (5, 5.0, 8_000_000)
    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = TinyModel(rows=100_000, dim=16)
        small.write(folder / "models", "small")
        TinyModel(tables={"only": 1}, dense_dim=0, dim=32, rows=rows).write(folder / "models", "large")
        dense, bags = small.sample_requests(SAMPLES, seed=1)
        request_file = folder / "request"
        request_file.write_bytes(request_of(dense, *flatten(bags), name="small"))
        client = compile_client(folder)
        for tiers in TIERS:
            records += compare(client, folder, request_file, tiers, rounds, rest_s)
    publish(records, options.json)


if __name__ == "__main__":
    main()
