"""Processes are killed in random order, under traffic that an oracle checks.

Two systems run next to each other:

- A server of two workers answers HTTP and gRPC requests for one model, whose rows are in RAM and RocksDB. Versions come
  and go while it serves: a new number, or new files under the same number. Its workers and its supervisor are killed,
  also during loads.
- A writer changes the rows of a table in RocksDB, behind Redis and RAM, while other processes read the table. The
  writer, a reader and Redis are killed.

Every answer must be right: it is that of one version that may answer at that time, and of no mixture. A row is never
older than its last acknowledged change. A request fails only if the process that held its connection was killed, and
then the same request succeeds when it is sent again once.
"""

import contextlib
import http.client
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.model.sparse_file import write_sparse_directory
from tests.e2e.kserve_requests import DATATYPES, request_of
from tests.serving.storage import soak
from tests.tools.redis_servers import RedisServer, free_port, wait_until
from tests.tools.tiny_model import TinyModel

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120
NAME = "tiny"
WORKERS = 2
TIERS = {
    "supportlonglong": True,
    "models": [],
    "volatile_db": {"type": "hash_map", "capacity_rows": 500},
    "persistent_db": {"type": "rocks_db", "path": "rows"},
}
#: A pause after each answer of a client, so that restarts get processor time on a small machine.
REST_S = 0.005
#: A killed connection shows in one of these ways.
CLOSED = (OSError, http.client.HTTPException)


def model_of(seed):
    """The model of a seed; its answers differ from those of every other seed."""
    return TinyModel(seed=seed, rows=2000)


class Server:
    """``hotrow serve`` with the model ``tiny`` in the explicit mode, started again at the same ports after a kill."""

    def __init__(self, folder, tiers, *options):
        self.folder = folder
        self.models = folder / "models"
        self.models.mkdir()
        (self.models / "ps.json").write_text(json.dumps(tiers), encoding="utf-8")
        self._options = options
        self.http_port, self.grpc_port = free_port(), free_port()
        self.is_up = threading.Event()
        self._process = None

    def command(self):
        """The words of the command."""
        command = [sys.executable, "-m", "serving.cli.main", "serve", str(self.models)]
        command += ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port), *self._options]
        return [*command, "--model-control-mode", "explicit", "--load-model", NAME, "--max-queue-wait-ms", "60000"]

    def start(self):
        """Start the process, and wait until it is ready."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        for line in self._process.stdout:
            if line.startswith("listening on http"):
                break
        else:
            raise AssertionError(f"the server did not start: {self.log()[-3000:]}")
        self.is_up.set()

    def log(self):
        """All that the server has logged."""
        return (self.folder / "log").read_text(encoding="utf-8")

    def starts(self, number):
        """How often a worker has become ready."""
        return self.log().count(f"worker {number} is ready: process ")

    def kill_worker(self, number):
        """Kill a worker, and wait until the next one is ready in its place."""
        before = self.starts(number)
        pid = int(re.findall(rf"worker {number} is ready: process (\d+)", self.log())[-1])
        self.is_up.clear()  # first, because the kernel closes the worker's connections before its listening sockets
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the worker has ended", DEADLINE_S)
        self.is_up.set()
        wait_until(lambda: self.starts(number) > before, f"worker {number} is ready again", DEADLINE_S)

    def kill_supervisor(self):
        """Kill the supervisor, wait until its workers have ended, and start the server again."""
        self.is_up.clear()  # first, so that no request is sent again to workers that are about to end
        workers = self._workers()
        self._process.kill()
        self._process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the workers ended", DEADLINE_S)
        self._process.stdout.close()
        self.start()

    def processes(self):
        """The process, and its workers."""
        return [self._process.pid, *map(int, self._workers())]

    def _workers(self):
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return children.read_text(encoding="utf-8").split() if children.exists() else []

    def load(self):
        """Ask the server to load the model; return the status, 0 if there was no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=DEADLINE_S)
        try:
            connection.request("POST", f"/v2/repository/models/{NAME}/load")
            return connection.getresponse().status
        except CLOSED:
            return 0
        finally:
            connection.close()

    def kill(self):
        """Kill what is left of the server."""
        if self._process is not None:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()

    def stop(self):
        """Stop the server as an operator does; return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(DEADLINE_S)
        self._process.stdout.close()
        return code


class Releases:
    """The versions in the server's folder, and the seeds whose answers are right now."""

    def __init__(self, server, rng):
        self._server, self._rng = server, rng
        self._number, self._seed, self.count = 1, 1, 0
        self.seeds = frozenset({1})  # replaced as a whole
        model_of(1).write(server.models, NAME, 1)

    def write_next(self):
        """Release other files: under the next number, or under the same number."""
        folder = self._server.models / NAME
        self._seed += 1
        self.seeds |= {self._seed}
        if self._rng.random() < 0.5:
            self._number += 1
            with TemporaryDirectory(dir=self._server.folder) as new:
                os.rename(model_of(self._seed).write(new, NAME, self._number), folder / str(self._number))
            return
        with TemporaryDirectory(dir=self._server.folder) as other:
            new = model_of(self._seed).write(Path(other) / "new", NAME, self._number)
            os.rename(folder / str(self._number), Path(other) / "old")
            os.rename(new, folder / str(self._number))

    def finish(self):
        """Load until the server says that the newest files answer; from then on only they are right."""
        wait_until(lambda: self._server.load() == 200, "the model is loaded", DEADLINE_S)
        self.seeds = frozenset({self._seed})
        self.count += 1
        for folder in (self._server.models / NAME).iterdir():
            if folder.name.isdigit() and int(folder.name) < self._number:
                shutil.rmtree(folder)


class HttpClient:
    """Asks over one kept connection."""

    def __init__(self, server, arrays):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
        inputs = [
            {
                "name": name,
                "datatype": DATATYPES[array.dtype.name],
                "shape": array.shape,
                "data": array.ravel().tolist(),
            }
            for name, array in arrays.items()
        ]
        self._body = json.dumps({"inputs": inputs})

    def ask(self):
        """Return the predictions; AssertionError if the server refuses."""
        self._connection.request("POST", f"/v2/models/{NAME}/infer", self._body)
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status == 200, (answer.status, text)
        return np.array(json.loads(text)["outputs"][0]["data"], np.float32)

    def close(self):
        self._connection.close()


class GrpcClient:
    """Asks over one channel."""

    def __init__(self, server, arrays):
        options = [("grpc.use_local_subchannel_pool", 1)]  # a new client has a new connection
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options)
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelInfer
        self._request = service_pb2.ModelInferRequest(model_name=NAME)
        for name, array in arrays.items():
            self._request.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
            self._request.raw_input_contents.append(array.tobytes())

    def ask(self):
        """Return the predictions; AssertionError if the server refuses, ConnectionError if it is unavailable."""
        try:
            answer = self._infer(self._request, timeout=DEADLINE_S)
        except grpc.RpcError as err:
            if err.code() == grpc.StatusCode.UNAVAILABLE:
                raise ConnectionError(err.details()) from None
            raise AssertionError(f"{err.code()}: {err.details()}") from None
        return np.frombuffer(answer.raw_output_contents[0], np.float32)

    def close(self):
        self._channel.close()


class Traffic:
    """Clients that ask and check the answers, from the block's begin to its end.

    Attributes:
        answered: how many requests were answered, by client.
        repeated: how many of them were sent again, because a kill had closed their connection.
        faults: what must not happen.
    """

    def __init__(self, server, releases):
        self._server, self._releases = server, releases
        self.answered, self.repeated, self.faults = Counter(), Counter(), []
        self._killed_until_s = -1.0  # when the latest kill was mended
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in (HttpClient, GrpcClient)]
        # The same request for every version: its answer tells the versions apart.
        self._arrays, _ = request_of(model_of(0), 5)
        self._expected = {}

    @contextlib.contextmanager
    def allowed_to_close(self):
        """Connections may end from the block's begin to its end."""
        self._killed_until_s = math.inf
        yield
        self._killed_until_s = time.monotonic()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception):
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def goes_on(self, requests=5):
        """Wait until every client has got so many more answers."""
        for client in (HttpClient, GrpcClient):
            enough = self.answered[client] + requests
            wait_until(lambda: self.answered[client] >= enough or self.faults, "answers", DEADLINE_S)  # noqa: B023

    def _run(self, kind):
        client, answered_s = None, time.monotonic()
        while not self._stop.wait(REST_S):
            client = client or kind(self._server, self._arrays)
            try:
                self._ask(client)
            except CLOSED as err:
                client.close()
                if self._killed_until_s < answered_s:
                    self._fault(kind, f"no process was killed, but the connection ended: {err!r}")
                client = self._ask_again(kind)
            except AssertionError as err:
                self._fault(kind, str(err))
            answered_s = time.monotonic()
            self.answered[kind] += 1
        if client is not None:
            client.close()

    def _ask_again(self, kind):
        self.repeated[kind] += 1
        wait_until(self._server.is_up.is_set, "the server is up", DEADLINE_S)
        client = kind(self._server, self._arrays)
        try:
            self._ask(client)
        except (*CLOSED, AssertionError) as err:
            client.close()
            self._fault(kind, f"a request failed that was sent again: {err!r}")
            return None
        return client

    def _ask(self, client):
        right = self._releases.seeds
        answer = client.ask()
        right |= self._releases.seeds
        for seed in right:
            if np.allclose(answer.reshape(-1, 1), self._answer_of(seed), atol=2e-6):
                return
        shown = answer.ravel()[:3].tolist()
        raise AssertionError(f"expected the answer of one of the seeds {sorted(right)}, got {shown}...")

    def _answer_of(self, seed):
        if seed not in self._expected:
            self._expected[seed] = request_of(TinyModel(seed=seed, rows=2000), 5)[1]
        return self._expected[seed]

    def _fault(self, kind, what):
        self.faults.append(f"{kind.__name__}: {what}")


class Role:
    """A process of ``tests.serving.storage.soak``, started again after a kill.

    Attributes:
        is_right: whether it has never ended by itself, which an answer that is wrong makes it do.
    """

    def __init__(self, name, folder, port):
        self._command = [sys.executable, "-m", "tests.serving.storage.soak", name, str(folder), str(port)]
        self._errors = folder / "errors"
        self.is_right = True
        self.start()

    def start(self):
        """Start the process, and wait until it works."""
        pipe = subprocess.PIPE
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=errors, text=True, cwd=ROOT)
        assert self._process.stdout.readline() == "open\n", "a process of the storage did not start"

    def kill(self):
        """Kill the process."""
        self.is_right = self.is_right and self._process.poll() is None  # else it ended because an answer was wrong
        self._process.kill()
        self._process.communicate()

    def end(self):
        """End the process, which compares all rows with the oracle."""
        self._process.communicate("end\n", timeout=DEADLINE_S)
        self.is_right = self.is_right and self._process.returncode == 0


class Storage:
    """A writer, a reader and Redis; see ``tests.serving.storage.soak``."""

    def __init__(self, folder, redis):
        self.folder, self.redis = folder, redis
        keys = np.arange(soak.FILE_ROWS)
        write_sparse_directory(folder / "t", keys, soak.rows_of(keys, np.zeros_like(keys)))
        soak.Oracle.make(folder)
        self.writer = Role("serve", folder, redis.port)
        self.reader = Role("follow", folder, redis.port)

    def kill(self, what):
        """Kill one part and start it again."""
        part = {"writer": self.writer, "reader": self.reader, "Redis": self.redis}[what]
        part.kill()
        part.start()

    def changes(self):
        """How many changes were acknowledged."""
        return int(soak.Oracle(self.folder).acknowledged.sum())

    def end(self):
        """Compare all rows with the oracle; return what was wrong."""
        for role in (self.writer, self.reader):
            role.end()
        if self.writer.is_right and self.reader.is_right:
            return []
        return [(self.folder / "errors").read_text(encoding="utf-8")[-3000:]]

    def stop(self):
        """Kill what is left of the processes."""
        for part in (self.writer, self.reader, self.redis):
            part.kill()


def kill_one(rng, server, releases, storage, traffic):
    """Kill a process at random, wait until everything works again, and return what was killed."""
    what = rng.choices(
        ["worker", "supervisor", "load", "swap", "writer", "reader", "Redis"], [30, 10, 10, 10, 15, 5, 20]
    )[0]
    if what in ("writer", "reader", "Redis"):
        storage.kill(what)
        return what
    if what == "supervisor":
        with traffic.allowed_to_close():
            server.kill_supervisor()
    elif what == "worker":
        with traffic.allowed_to_close():
            server.kill_worker(rng.randrange(WORKERS))
    else:  # a worker, while other files are loaded; in half of them while they are written, too
        if what == "load":
            releases.write_next()
        loading = threading.Thread(target=lambda: (what == "swap" and releases.write_next(), server.load()))
        loading.start()
        time.sleep(rng.random() * 0.3)
        with traffic.allowed_to_close():
            server.kill_worker(rng.randrange(WORKERS))
        loading.join()
        releases.finish()
    traffic.goes_on()
    return what


def run(kills, seed, folder, redis_folder):
    """Kill ``kills`` processes; return the figures, whose ``faults`` must be empty."""
    rng = random.Random(seed)
    server = Server(folder, TIERS, "--workers", str(WORKERS))
    releases = Releases(server, rng)
    redis = RedisServer(redis_folder, "--appendonly", "yes", "--appendfsync", "always")
    done, began_s = Counter(), time.monotonic()
    with contextlib.ExitStack() as running:
        (folder / "storage").mkdir()
        storage = Storage(folder / "storage", redis)
        running.callback(storage.stop)
        running.callback(server.kill)
        server.start()
        with Traffic(server, releases) as traffic:
            traffic.goes_on()
            while done.total() < kills and not traffic.faults:
                done[kill_one(rng, server, releases, storage, traffic)] += 1
        faults = traffic.faults + storage.end()
        code = server.stop()
    return {
        "seed": seed,
        "kills": dict(done),
        "seconds": round(time.monotonic() - began_s),
        "answered": {kind.__name__: count for kind, count in traffic.answered.items()},
        "sent_again": {kind.__name__: count for kind, count in traffic.repeated.items()},
        "acknowledged_changes": storage.changes(),
        "exit_code": code,
        "tracebacks": server.log().count("Traceback"),
        "faults": faults,
    }
