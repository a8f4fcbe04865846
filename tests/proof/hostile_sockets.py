"""Hostile requests to a real server, over HTTP and gRPC."""

import json
import socket
import time
from collections import Counter

import grpc

from tests.e2e.conftest import serving
from tests.proof.decoders import MODEL, REQUESTS, corpus_of
from tests.proof.hostile import MIB, resident_bytes
from tests.proof.mutations import change_bytes, change_json

#: Paths and methods; the model's routes get hostile bodies of their own form.
ROUTES = (
    ("POST", "/predict/tiny", "samples"),
    ("POST", "/v2/models/tiny/infer", "infer-binary"),
    ("POST", "/v2/models/tiny/infer", "infer-json"),
    ("POST", "/v2/models/tiny/versions/1/infer", "infer-json"),
    ("POST", "/v2/repository/index", None),
    ("POST", "/v2/repository/models/tiny/load", None),
    ("POST", "/v2/logging", None),
    ("POST", "/v2/trace/setting", None),
    ("POST", "/v2/systemsharedmemory/region/r/register", None),
    ("POST", "/v2/systemsharedmemory/region/r/unregister", None),
    ("GET", "/v2/models/tiny", None),
    ("GET", "/v2/models/tiny/stats", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/openapi.json", None),
)
CONTROL = {
    "ready": True,
    "parameters": {"config": "{}", "unload_dependents": False},
    "log_info": True,
    "log_verbose_level": 0,
    "trace_level": ["OFF"],
    "key": "/none",
    "offset": 0,
    "byte_size": 8,
}
METHODS = ("ModelInfer", "ModelReady", "ModelMetadata", "RepositoryIndex", "LogSettings", "SystemSharedMemoryRegister")
#: Of a hundred inputs, how many go over gRPC, and how many are changed in their HTTP head.
GRPC_OF_100, HEADS_OF_100 = 15, 15
#: Memory after the first inputs, when everything was used once, and at the end.
WARM_INPUTS, MOST_GROWTH = 2000, 32 * MIB
DEADLINE_S = 60


class Attack:
    """One server and the requests that it gets."""

    def __init__(self, folder, rng):
        """Write the server's model into ``folder``."""
        self._folder, self._rng = folder, rng
        self._corpora = {name: corpus_of(name) for name in REQUESTS}
        self._socket = None
        MODEL.write(folder / "models", "tiny")

    def run(self, inputs):
        """Send ``inputs`` requests; return the figures."""
        codes, faults, warm, began_s = Counter(), [], None, time.monotonic()
        options = ("--grpc-port", "0", "--max-body-bytes", "100000", "--log-level", "error")
        with serving(self._folder / "models", self._folder / "stderr", *options) as served:
            address = served.printed.split("listening for gRPC on ")[1].split()[0]
            with grpc.insecure_channel(address) as channel:
                for number in range(inputs):
                    if number == min(WARM_INPUTS, inputs // 2):
                        warm = resident_bytes(served.process.pid)
                    over_grpc = self._rng.randrange(100) < GRPC_OF_100
                    code, sent = self._call(channel) if over_grpc else self._request(served)
                    codes[code] += 1
                    if code in (500, "UNKNOWN", "INTERNAL", "silence"):
                        faults.append({"code": code, "input": repr(sent[:2000])})
                        if len(faults) > 20:
                            break
                if self._socket is not None:
                    self._socket.close()
                growth = resident_bytes(served.process.pid) - warm
                status, _, _ = served.ask("/v2/health/ready")
            log = served.log.read_text(encoding="utf-8")
        if growth > MOST_GROWTH and inputs >= 10 * WARM_INPUTS:
            faults.append({"memory": growth})
        if status != 200 or "Traceback" in log:
            faults.append({"ready": status, "log": log[-3000:]})
        return {
            "inputs": codes.total(),
            "seconds": round(time.monotonic() - began_s),
            "grown_bytes": growth,
            "codes": {str(code): count for code, count in codes.most_common()},
            "faults": faults,
        }

    def _body(self, form):
        rng = self._rng
        if form is None:
            body = change_json(json.dumps(CONTROL).encode(), rng)
            return body, None
        data = REQUESTS[form].change(rng.choice(self._corpora[form]), rng)
        if not form.startswith("infer"):
            return data, None
        length, _, body = data.partition(b"\n")
        return body, length

    def _request(self, served):
        """Send one HTTP request; return its status, ``closed`` or ``silence``, and the bytes that were sent."""
        method, path, form = self._rng.choice(ROUTES)
        body, length = self._body(form) if method == "POST" else (b"", None)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {served.host}:{served.port}\r\nContent-Length: {len(body)}\r\n".encode()
        )
        if length:
            head += b"Inference-Header-Content-Length: %s\r\n" % length[:100].translate(None, b"\r\n")
        is_strange = self._rng.randrange(100) < HEADS_OF_100
        if is_strange:
            head = change_bytes(head, self._rng)
        sent = head + b"\r\n" + body
        connection = self._socket or served.connect()
        self._socket = None
        try:
            connection.sendall(sent)
            if is_strange:  # the server may wait for more: the client says that nothing follows
                connection.shutdown(socket.SHUT_WR)
            code, is_kept = _answer(connection, method)
        except TimeoutError:
            code, is_kept = "silence", False
        except OSError:
            code, is_kept = "closed", False
        if is_kept and not is_strange:
            self._socket = connection
        else:
            connection.close()
        return code, sent

    def _call(self, channel):
        """Call a method of gRPC; return the name of its status, and the message."""
        rng = self._rng
        method = METHODS[0] if rng.random() < 0.7 else rng.choice(METHODS)
        data = REQUESTS["message"].change(rng.choice(self._corpora["message"]), rng)
        if method != METHODS[0]:
            data = rng.randbytes(rng.randrange(60))
        try:
            channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=DEADLINE_S)
        except grpc.RpcError as err:
            return err.code().name, data
        return "OK", data


def _answer(connection, method):
    """Read one answer; return its status, and whether the connection goes on."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        if not piece:
            return "closed", False
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    code = int(lines[0].split()[1])
    fields = dict(line.split(b": ", 1) for line in lines[1:])
    size = int(fields.get(b"content-length", 0)) if method != "HEAD" else 0
    while len(body) < size:
        piece = connection.recv(65536)
        if not piece:
            return code, False
        body += piece
    return code, fields.get(b"connection") != b"close" and len(body) == size
