"""A server that answers GET /status with documents made by hand, and GET / with the status page."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import serving.frontend.http

PAGE = Path(serving.frontend.http.__file__).with_name("status.html").read_bytes()
BOUNDS_S = [0.001, 0.002, 0.01]


def times(*counts):
    """Durations by bucket: up to 1 ms, 2 ms, 10 ms, and longer."""
    return {"bounds_s": BOUNDS_S, "counts": list(counts), "sum_s": 0.0}


def tier(name, hits, misses, **fields):
    return {
        "name": name,
        "rows": 1000,
        "rows_are_estimated": False,
        "bytes": 2**20,
        "hits": hits,
        "misses": misses,
        "errors": 0,
        "is_up": True,
        "state": "serving",
        "fetch_times": times(hits + misses, 0, 0, 0),
        **fields,
    }


def reader(**fields):
    """A reader of updates, which has read one partition to its end."""
    return {
        "worker": 0,
        "fault": "",
        "lag_messages": 0,
        "lag_s": 0.0,
        "visible_times": times(0, 0, 100, 0),
        "applied": {"upsert": 1200, "delete": 34},
        "skipped": {},
        "rejected": {"row": 2, "checksum": 1},
        "tables": [
            {"name": "user", "step": 4000, "time_ms": 1_700_000_000_000},
            {"name": "item", "step": None, "time_ms": 1_600_000_000_000},
        ],
        "partitions": [{"name": "hotrow.ctr/0", "position": "1237", "lag_messages": 0}],
        **fields,
    }


def status_with(*readers, **fields):
    """``status`` of a version with these readers of updates."""
    document = status(**fields)
    document["models"][0]["versions"][0]["updates"] = list(readers)
    return document


def status(uptime_s=10.0, requests=100, model="ctr", table="user", **fields):
    """The status of a server with one model and one table in two tiers; a request has ten keys, one of them unknown."""
    tiers = [
        tier("memory", 6 * requests, 4 * requests),
        tier("rocksdb", 3 * requests, requests, rows=12345, rows_are_estimated=True, bytes=None),
    ]
    tables = [{"name": table, "slots": 3, "dim": 16, "keys": 10 * requests, "defaulted_keys": requests, "tiers": tiers}]
    named = {"features": ["user"], "outputs": [{"name": "OUTPUT0", "kind": "probability", "width": 2}]}
    version = {"version": "7", "state": "READY", "reason": "", **named, "tables": tables, "updates": []}
    latency = times(requests // 2, requests // 4, requests // 4, 0)
    by_code = {"200": requests - 2, "429": 2}
    served = {"name": model, "requests": by_code, "samples": 64 * requests, "latency": latency, "versions": [version]}
    return {
        "server": "hotrow",
        "version": "1.2.3",
        "time_s": 1.7e9,
        "uptime_s": uptime_s,
        "is_ready": True,
        "state": "ready",
        "memory_bytes": 3 * 2**30,
        "requests_in_flight": 5,
        "unmatched_requests": {},
        "models": [served],
        **fields,
    }


class StatusServer:
    """Answers each GET /status with the next of ``answers``, the last one again and again.

    Attributes:
        url: its address.
        asked: the paths that were asked for.
        authorizations: the headers Authorization that came.
        pages: what is at other paths, by path.
    """

    def __init__(self, answers):
        self.asked, self.authorizations, self.pages = [], [], {"/": PAGE}
        self._answers = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler):  # noqa: N805
                self._answer(handler)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _answer(self, handler):
        self.asked.append(handler.path)
        self.authorizations.append(handler.headers["Authorization"])
        body, code = self.pages.get(handler.path, b""), 200
        if handler.path == "/status":
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        elif not body:
            code = 404
        handler.send_response(code)
        handler.send_header("Content-Type", "application/json" if handler.path == "/status" else "text/html")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def status_server(*answers):
    """Run a StatusServer."""
    with (made := StatusServer(answers)).server as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
