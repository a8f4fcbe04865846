"""HTTP requests per second and latency of `hotrow serve`, against the limit of a Python HTTP server.

Request: 64 samples of 13 dense features and 26 keys as KServe binary tensors. Model: logistic regression, one table
of 100,000 rows of 16 floats, all in memory. Limit: ``benchmarks.bare_asgi``, uvicorn reading the same body and
returning the same bytes. Client: ``http_client.cpp`` in its own process. The servers take turns, round by round.

``--triton PYTHON`` also measures a real Triton with the same model in two instances of its Python backend. PYTHON is
the interpreter of the environment that ``benchmarks.triton_server`` describes.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import triton_server
from benchmarks.report import Record, parse_arguments, publish
from benchmarks.tiny_model import TinyModel, flatten

SAMPLES, SLOTS, DENSE = 64, 26, 13
CONCURRENCY = (1, 8)
MEASURES = {"requests_per_s": "1/s", "p50": "us", "p99": "us"}


def compile_client(folder):
    """Build the client and return its path."""
    binary = folder / "http_client"
    source = Path(__file__).with_name("http_client.cpp")
    subprocess.run(["c++", "-std=c++17", "-O2", "-o", binary, source], check=True)
    return binary


def infer_request(model, name="bench", dense_name="DES"):
    """The raw bytes of one HTTP request: 64 samples, one key per slot, binary tensors in and out."""
    dense, _ = model.sample_requests(SAMPLES)
    keys, row_ptrs = flatten(np.random.default_rng(1).integers(0, model.rows, (SAMPLES, SLOTS, 1)).tolist())
    return request_of(dense, keys, row_ptrs, name, dense_name)


def request_of(dense, keys, row_ptrs, name="bench", dense_name="DES"):
    """The raw bytes of one HTTP request with these arrays as binary tensors."""
    tensors = [
        (dense_name, "FP32", dense.reshape(1, -1)),
        ("CATCOLUMN", "INT64", keys[None]),
        ("ROWINDEX", "INT32", row_ptrs[None]),
    ]
    inputs = [
        {
            "name": tensor,
            "datatype": datatype,
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for tensor, datatype, array in tensors
    ]
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    body = head + b"".join(array.tobytes() for _, _, array in tensors)
    return (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def answer_of(port, request):
    """The body of the answer to one request."""
    import socket

    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request.replace(b"Host:", b"Connection: close\r\nHost:", 1))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"the server answered {answer[:300]!r}")
    return body


@contextlib.contextmanager
def running(command, port_of_line):
    """Start a server, yield the port that ``port_of_line`` finds in its output, and stop the server at the end."""
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield next(port for port in map(port_of_line, process.stdout) if port)
        finally:
            process.terminate()


def port_in_url(line):
    """The port in `listening on http://127.0.0.1:1234`."""
    return int(line.rsplit(":", 1)[1]) if line.startswith("listening on ") else None


def measure(client, port, concurrency, seconds, request_file, pause_ms=0):
    """One run of the client, whose connections wait for ``pause_ms`` after a refusal."""
    command = [client, str(port), str(concurrency), str(seconds), request_file, str(pause_ms)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if result["failures"] or (result["refused"] and not pause_ms):
        raise SystemExit(f"{result['failures']} requests failed, {result['refused']} were refused")
    return {
        "requests_per_s": result["requests"] / result["seconds"],
        "p50": result["p50_us"],
        "p99": result["p99_us"],
        "refused_per_s": result["refused"] / result["seconds"],
        "refused_p99": result["refused_p99_us"],
    }


def compare(client, ours, peers, request_file, rounds, seconds):
    """Records of every measure at every concurrency against every peer; ``peers`` has ports by name."""
    records = []
    for concurrency in CONCURRENCY:
        turns = [
            {name: measure(client, port, concurrency, seconds, request_file) for name, port in peers.items()}
            | {"ours": measure(client, ours, concurrency, seconds, request_file)}
            for _ in range(rounds)
        ]
        params = {"concurrency": concurrency, "samples": SAMPLES, "slots": SLOTS, "dense": DENSE}
        records += [
            Record.of(
                f"http_server.{measured}",
                {**params, "peer": peer},
                unit,
                [(turn["ours"][measured], turn[peer][measured]) for turn in turns],
            )
            for peer in peers
            for measured, unit in MEASURES.items()
        ]
    return records


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__, triton={"metavar": "PYTHON", "help": "also measure this Triton"})
    rounds, seconds = (1, 0.1) if options.quick else (7, 2.0)
    model = TinyModel(tables={"ad": SLOTS}, dense_dim=DENSE, dim=16, rows=100_000)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        repository = folder / "repository"
        model.write(repository, "bench")
        client = compile_client(folder)
        (folder / "request").write_bytes(infer_request(model))
        ours = stack.enter_context(
            running(["serving.cli.main", "serve", str(repository), "--http-port", "0"], port_in_url)
        )
        (folder / "answer").write_bytes(answer_of(ours, infer_request(model)))
        peers = {"bare": stack.enter_context(running(["benchmarks.bare_asgi", str(folder / "answer")], int))}
        if options.triton:
            for_triton = folder / "for_triton"
            model.write(for_triton, "bench")
            triton_server.prepare(for_triton, "bench")
            ports = stack.enter_context(triton_server.running(options.triton, [for_triton], folder))
            peers["triton"] = ports.http
        for port in (ours, *peers.values()):
            measure(client, port, 1, seconds / 2, folder / "request")  # warm up
        publish(compare(client, ours, peers, folder / "request", rounds, seconds), options.json)


if __name__ == "__main__":
    main()
