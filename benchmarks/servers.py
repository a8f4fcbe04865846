"""Requests per second and latency of `hotrow serve`, over HTTP and gRPC, against a real Triton and bare servers.

Request: 64 samples of 13 dense features and 26 keys as binary tensors. Model: logistic regression, one table of
100,000 rows of 16 floats, all in memory. The clients are compiled and in their own process: ``http_client.cpp`` for
HTTP, Triton's `perf_analyzer` for gRPC, with one call per request (unary) or one message of a stream (streaming). The
servers take turns, round by round.

- ``bare``: the limit of Python. uvicorn or grpc.aio read the same request and return the same bytes, without a model.
- ``triton``: the same model in Triton's Python backend, with as many instances as Hotrow has workers. It needs
  ``--triton PYTHON``, the interpreter of the environment that ``benchmarks.triton_server`` describes, and so does gRPC.
- ``mosec``: the same model in mosec, which gets no ROWINDEX and checks nothing. ``make bench`` installs it.
"""

import contextlib
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks import triton_server
from benchmarks.http_client import answer_of, compile_client, measure, port_in_url, request_of, running
from benchmarks.perf_analyzer import PerfAnalyzer, write_inputs
from benchmarks.report import Record, parse_arguments, publish
from tests.tools.tiny_model import TinyModel, flatten

SAMPLES, SLOTS, DENSE = 64, 26, 13
WORKERS, CONCURRENCY = (1, 2), (1, 4, 8, 16)
MEASURES = {"requests_per_s": "1/s", "p50": "us", "p99": "us"}
START_S = 30
MODEL = TinyModel(tables={"ad": SLOTS}, dense_dim=DENSE, dim=16, rows=100_000)


def arrays_of_request():
    """The tensors of a request, with one key per slot."""
    dense, _ = MODEL.sample_requests(SAMPLES)
    keys, row_ptrs = flatten(np.random.default_rng(1).integers(0, MODEL.rows, (SAMPLES, SLOTS, 1)).tolist())
    return {"DES": dense, "CATCOLUMN": keys, "ROWINDEX": row_ptrs}


class Clients:
    """Sends the request over every protocol."""

    def __init__(self, folder, triton):
        arrays = arrays_of_request()
        self.request = request_of(*arrays.values())
        self._folder = folder
        self._http = compile_client(folder)
        (folder / "request").write_bytes(self.request)
        body = arrays["DES"].tobytes() + arrays["CATCOLUMN"].tobytes()
        self.mosec_request = (
            b"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        (folder / "mosec_request").write_bytes(self.mosec_request)
        self.protocols = ["http"]
        if triton:
            (folder / "links").mkdir()
            self._grpc = PerfAnalyzer(triton, folder / "links")
            self.protocols += ["unary", "streaming"]
            batch_of_one = {name: array if name == "DES" else array[None] for name, array in arrays.items()}
            write_inputs(folder / "inputs.json", batch_of_one)
            # An exported config.pbtxt gives every tensor one dimension, and makes each request a batch of one.
            write_inputs(folder / "triton.json", {name: array.reshape(-1) for name, array in arrays.items()})

    def measure(self, protocol, peer, port, concurrency, seconds):
        """Requests per second and latencies of one server."""
        if protocol == "http":
            request = self._folder / ("mosec_request" if peer == "mosec" else "request")
            return measure(self._http, port, concurrency, seconds, request)
        inputs = self._folder / ("triton.json" if peer == "triton" else "inputs.json")
        return self._grpc.measure("bench", f"127.0.0.1:{port}", protocol, inputs, concurrency, seconds)


@contextlib.contextmanager
def serving(folder, workers, clients, triton):
    """Start all servers; yield their ports by protocol and name."""
    options = ["--workers", str(workers), "--max-queue-wait-ms", "60000"]
    command = ["serving.cli.main", "serve", str(folder / "repository"), "--http-port", "0", *options]
    with contextlib.ExitStack() as stack:
        if not triton:
            ports = {"http": {"ours": stack.enter_context(running(command, port_in_url))}}
        else:
            grpc_port, http_port = stack.enter_context(running([*command, "--grpc-port", "0"], two_ports()))
            models = folder / f"triton{workers}" / "models"
            MODEL.write(models, "bench")
            triton_server.prepare(models, "bench", instances=workers)
            peer = stack.enter_context(triton_server.running(triton, [models], models.parent))
            grpc = {"ours": grpc_port, "triton": peer.grpc}
            if workers == 1:
                bare = ["benchmarks.bare_grpc", "bench", str(grpc_port)]
                grpc["bare"] = stack.enter_context(running(bare, int))
            ports = {"http": {"ours": http_port, "triton": peer.http}, "unary": grpc, "streaming": grpc}
        if find_spec("mosec"):
            ports["http"]["mosec"] = stack.enter_context(running_mosec(folder / f"mosec{workers}", workers, clients))
        if workers == 1:
            (folder / "answer").write_bytes(answer_of(ports["http"]["ours"], clients.request))
            bare = ["benchmarks.bare_asgi", str(folder / "answer")]
            ports["http"]["bare"] = stack.enter_context(running(bare, int))
        yield ports


@contextlib.contextmanager
def running_mosec(folder, workers, clients):
    """Serve the model with mosec; yield the port once it answers as the model does."""
    folder.mkdir()
    weight, bias = MODEL.weights()
    arrays = {"keys": np.arange(MODEL.rows), "vectors": MODEL.vectors("ad"), "weight": weight, "bias": bias}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    with running(["benchmarks.mosec_server", str(folder), str(workers)], int) as port:
        end = time.monotonic() + START_S
        while True:
            try:
                answer = answer_of(port, clients.mosec_request)
                break
            except (OSError, SystemExit):  # its worker is starting
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        dense, bags = arrays_of_request()["DES"], arrays_of_request()["CATCOLUMN"].reshape(SAMPLES, SLOTS, 1)
        expected = MODEL.probabilities(dense, bags.tolist())
        np.testing.assert_allclose(np.frombuffer(answer, np.float32)[:, None], expected, atol=1e-5)
        yield port


def two_ports():
    """Return a function that finds the ports of gRPC and HTTP in the output of `hotrow serve`, for ``running``."""
    found = []

    def ports_of(line):
        if line.startswith("listening "):
            found.append(int(line.rsplit(":", 1)[1]))
        return tuple(found) if len(found) == 2 else None

    return ports_of


def compare(clients, protocol, ports, workers, rounds, seconds):
    """Records of every measure at every concurrency against every peer."""
    records = []
    for name, port in ports.items():
        clients.measure(protocol, name, port, 1, seconds / 2)  # warm up
    for concurrency in CONCURRENCY:
        turns = [
            {name: clients.measure(protocol, name, port, concurrency, seconds) for name, port in ports.items()}
            for _ in range(rounds)
        ]
        params = {"protocol": protocol, "workers": workers, "concurrency": concurrency}
        params |= {"samples": SAMPLES, "slots": SLOTS, "dense": DENSE}
        records += [
            Record.of(
                f"servers.{measured}",
                {**params, "peer": peer},
                unit,
                [(turn["ours"][measured], turn[peer][measured]) for turn in turns],
            )
            for peer in ports
            if peer != "ours"
            for measured, unit in MEASURES.items()
        ]
    return records


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__, triton={"metavar": "PYTHON", "help": "also measure this Triton, and gRPC"})
    rounds, seconds = (1, 0.1) if options.quick else (3, 2.0)
    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        MODEL.write(folder / "repository", "bench")
        clients = Clients(folder, options.triton)
        for workers in WORKERS if options.triton else WORKERS[:1]:
            with serving(folder, workers, clients, options.triton) as ports:
                for protocol in clients.protocols:
                    records += compare(clients, protocol, ports[protocol], workers, rounds, seconds)
    publish(records, options.json)


if __name__ == "__main__":
    main()
