"""What the benchmarks of servers share: the client ``http_client.cpp``, its requests, and servers in processes."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32"}


def compile_client(folder):
    """Build the client and return its path."""
    binary = folder / "http_client"
    source = Path(__file__).with_name("http_client.cpp")
    subprocess.run(["c++", "-std=c++17", "-O2", "-o", binary, source], check=True)
    return binary


def request_of(dense, keys, row_ptrs, name="bench", dense_name="DES"):
    """The raw bytes of one HTTP request with these arrays as binary tensors."""
    return request_with(name, {dense_name: dense.reshape(1, -1), "CATCOLUMN": keys[None], "ROWINDEX": row_ptrs[None]})


def request_with(model, tensors):
    """The raw bytes of one HTTP request with binary tensors: an array of numbers, or a list of texts, for each name."""
    inputs, contents = [], []
    for name, values in tensors.items():
        if isinstance(values, list):
            texts = [text.encode() for text in values]
            datatype, shape = "BYTES", [len(texts)]
            content = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        else:
            datatype, shape, content = DATATYPES[values.dtype.name], list(values.shape), values.tobytes()
        parameters = {"binary_data_size": len(content)}
        inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": parameters})
        contents.append(content)
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    body = head + b"".join(contents)
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def answer_of(port, request):
    """The body of the answer to one request."""
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
            port = next((port for port in map(port_of_line, process.stdout) if port), None)
            if port is None:
                raise SystemExit(f"{' '.join(map(str, command))} did not start")
            yield port
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
