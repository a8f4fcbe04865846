"""A real `hotrow serve` process on a free port, and requests to it."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from serving.cli.main import main
from tests.tools.tiny_model import TinyModel
from tests.tools.warm import Warm

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120


@dataclass
class Served:
    """A running server: its process, address, log file and first lines of output."""

    process: subprocess.Popen | Warm
    host: str
    port: int
    log: Path
    printed: str

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    def ask(self, path, body=None, headers=None, method=None):
        """Send one request; return the answer's code, headers and bytes, also for errors."""
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.headers, err.read()

    def connect(self):
        """A raw connection, for requests that no client library would send."""
        return socket.create_connection((self.host, self.port), timeout=DEADLINE_S)

    def stop(self, how=signal.SIGTERM):
        """Send a signal and return the exit code."""
        self.process.send_signal(how)
        return self.process.wait(DEADLINE_S)


def started(arguments, errors):
    """Start Python, as a user does."""
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)


def started_warm(arguments, errors):
    """Start Python without its imports."""
    return Warm(*arguments, stderr=errors, cwd=ROOT)


@contextlib.contextmanager
def serving(repository, log, *options, start=started_warm):
    """Start `hotrow serve`, wait until it prints its address, and leave no process behind.

    The server has no host and port if it listens on a Unix socket.
    """
    port = () if "--uds" in options else ("--http-port", "0")
    command = ["-m", "serving.cli.main", "serve", str(repository), *port, *options]
    with log.open("wb") as errors, start(command, errors) as process:
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        try:
            lines = []
            for printed in process.stdout:
                line = json.loads(printed)["message"] + "\n" if printed.startswith("{") else printed  # a JSON log
                lines.append(line)
                if line.startswith("listening on "):
                    break
            else:
                raise AssertionError(f"the server did not start: {lines} {log.read_text()}")
            watchdog.cancel()  # it only limits the start: the tests together may take longer
            address = re.search(r"https?://(.+):(\d+)$", line.strip())
            host, port = (address[1], int(address[2])) if address else ("", 0)
            yield Served(process, host, port, log, "".join(lines))
        finally:
            watchdog.cancel()
            process.kill()


@pytest.fixture(scope="session")
def model():
    return TinyModel()


@pytest.fixture(scope="session")
def repository(tmp_path_factory, model):
    """A repository with two versions of one model (version 1 has other weights) and a uint32 model without dense
    features."""
    path = tmp_path_factory.mktemp("repository")
    TinyModel(seed=7).write(path, "tiny", 1)
    model.write(path, "tiny", 2)
    TinyModel(tables={"only": 2}, dense_dim=0, key_type="I32", rows=50).write(path, "small")
    return path


@pytest.fixture(scope="session")
def served(repository, tmp_path_factory):
    """One server for all tests that leave it running."""
    with serving(repository, tmp_path_factory.mktemp("log") / "stderr", "--max-body-bytes", "200000") as served:
        yield served


@pytest.fixture
def start(tmp_path):
    """Start further servers; all are stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        count = iter(range(100))
        yield lambda repository, *options, **how: stack.enter_context(
            serving(repository, tmp_path / f"stderr{next(count)}", *options, **how)
        )


@pytest.fixture
def start_python(start):
    """Start servers as users do, for tests of their start and end."""
    return partial(start, start=started)


@pytest.fixture
def hotrow_serve(capfd):
    """Run a `hotrow serve` that must end by itself, in this process."""

    def run(*arguments):
        capfd.readouterr()
        try:
            code = main(["serve", *map(str, arguments)])
        except SystemExit as wrong_option:
            code = wrong_option.code
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run
