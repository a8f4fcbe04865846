"""``run``: starts all roles on this machine, and ends or restarts them together.

A role fails if a signal ends it. An embedding role also fails if it ends on its own. Then all roles end. If restarts
are left, all roles start again, and the NN worker continues from the last checkpoint. No role outlives this process:
the system kills the roles when this process ends, for any reason.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kernels.system_cores import usable_cores
from serving.errors import ConfigError
from training.persia.checkpoint import checkpoints_in, remove_unfinished
from training.persia.config import read_embedding_config, read_global_config
from training.persia.wire import Cluster

_log = logging.getLogger("hotrow.persia")
_HOST = "127.0.0.1"
_STOPS = {signal.SIGTERM, signal.SIGINT}
#: Roles that do not end after SIGTERM are killed.
_END_S = 5.0
#: Variables of the roles, unless they are set. PyTorch's idle threads leave the cores to the other roles. The C library
#: keeps the memory of messages; otherwise the system would clear new pages for each of them.
_DEFAULTS = {
    "FORWARD_QUEUE_SIZE": "16",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ``run`` starts.

    Attributes:
        embedding_config: path of ``embedding_config.yml``.
        global_config: path of ``global_config.yml``.
        embedding_workers: how many.
        embedding_servers: how many.
        data_loader: the user's script.
        nn_worker: the user's script.
        checkpoint: the folder of checkpoints; None: there are none.
        max_restarts: how often the roles start again after one has failed.
    """

    embedding_config: Path
    global_config: Path
    embedding_workers: int
    embedding_servers: int
    data_loader: Path
    nn_worker: Path
    checkpoint: Path | None
    max_restarts: int


class _Role:
    """One process, in a process group of its own, so Ctrl-C does not reach it."""

    def __init__(self, command: str, argument: str, environment: dict[str, str]) -> None:
        self.name = f"{command} {argument}" if command.startswith("embedding") else command
        self.command = command
        arguments = [sys.executable, "-m", "training.persia", command, argument]
        self._process = subprocess.Popen(arguments, env=environment, process_group=0)

    @property
    def code(self) -> int | None:
        """The exit code; None: it runs. A negative code is a signal."""
        return self._process.poll()

    @property
    def has_failed(self) -> bool:
        code = self.code
        return code is not None and (code < 0 or self.command.startswith("embedding"))

    def ending(self) -> str:
        code = self.code
        assert code is not None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}"

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process, and to processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self) -> None:
        self._process.wait()


class _Signals:
    """Signals that this process gets, of its children too, as something to wait for.

    Attributes:
        stop: a signal that came and ends this process; 0: none.
    """

    def __init__(self, reader: int) -> None:
        self.stop = 0
        self._reader = reader

    def wait(self, timeout_s: float | None = None) -> set[int]:
        """Return the signals that came since the last call, at least one unless the time is over."""
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        came = set(os.read(self._reader, 1024)) if ready else set()
        self.stop = max(came & _STOPS, default=self.stop)
        return came


@contextmanager
def _signals() -> Iterator[_Signals]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier_writer = signal.set_wakeup_fd(writer)
    earlier = {number: signal.signal(number, lambda *_: None) for number in (*_STOPS, signal.SIGCHLD)}
    try:
        yield _Signals(reader)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_writer)
        os.close(reader)
        os.close(writer)


def run(options: RunOptions) -> int:
    """Run all roles until the NN worker ends. Belongs to the main thread.

    Returns:
        the exit code of the NN worker; 1 if another role failed; 128 + n if signal n ended the NN worker or this
        process.

    Raises:
        ConfigError: a file is missing or wrong, or a port is in use.
        OutputError: the folder of checkpoints cannot be made.
    """
    read_embedding_config(options.embedding_config)
    read_global_config(options.global_config)
    for name, script in (("--data-loader", options.data_loader), ("--nn-worker", options.nn_worker)):
        if not script.is_file():
            raise ConfigError(name, "", f"expected a Python script, got {script}, which is no file")
    if options.checkpoint is not None:
        remove_unfinished(options.checkpoint)
    with ExitStack() as held, _signals() as signals:
        cluster = _cluster(options, held)
        for left in range(options.max_restarts, -1, -1):
            code = _attempt(options, cluster, signals, left)
            if code is not None or signals.stop:
                return 128 + signals.stop if code is None else code
    raise AssertionError("the last attempt has an exit code")


def _cluster(options: RunOptions, held: ExitStack) -> Cluster:
    """Find a port for each role, and hold it."""

    def addresses(count: int, port: str = "0") -> tuple[str, ...]:
        return tuple(_reserved(port, held) for _ in range(count))

    return Cluster(
        os.getpid(),
        os.path.abspath(options.embedding_config),
        os.path.abspath(options.global_config),
        addresses(options.embedding_servers),
        addresses(options.embedding_workers),
        addresses(1, os.environ.get("TRAINER_PORT", "0"))[0],
        None if options.checkpoint is None else os.path.abspath(options.checkpoint),
    )


def _reserved(port: str, held: ExitStack) -> str:
    """Bind a port that a role may then listen on; nothing listens on this socket.

    Raises:
        ConfigError: the port is in use, or is none.
    """
    holder = held.enter_context(socket.socket())
    try:
        holder.bind((_HOST, int(port)))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # after the bind, which must fail if it is taken
    except (OSError, OverflowError, ValueError) as err:
        raise ConfigError("TRAINER_PORT", "", f"cannot listen on {_HOST}:{port}: {err}") from err
    return f"{_HOST}:{holder.getsockname()[1]}"


def _attempt(options: RunOptions, cluster: Cluster, signals: _Signals, restarts_left: int) -> int | None:
    """Start all roles, and return the exit code of the run; None: start again."""
    roles: list[_Role] = []
    try:
        _start(options, cluster, roles)
        *_, nn_worker, data_loader = roles
        while True:
            # A script fails after the role that it needs. So a script's end is read first.
            nn_worker_code, data_loader_code = nn_worker.code, data_loader.code
            failed = next((role for role in roles if role.has_failed), None)
            if failed is not None:
                return _after(failed, cluster, restarts_left)
            if nn_worker_code is not None:
                return nn_worker_code
            if data_loader_code:
                _log.error("%s; the run ends", data_loader.ending())
                return 1
            signals.wait()
            if signals.stop:
                return 128 + signals.stop
    finally:
        _end(roles, signals)
        if options.checkpoint is not None:
            remove_unfinished(options.checkpoint)


def _start(options: RunOptions, cluster: Cluster, roles: list[_Role]) -> None:
    environment = {**_DEFAULTS, **os.environ, **cluster.environment()}
    environment["TRAINER_PORT"] = cluster.nn_worker.rpartition(":")[2]
    # a lookup that waits for a core that another role uses is slower than a lookup in one thread
    threads = max(1, usable_cores() // (options.embedding_servers + options.embedding_workers + 1))
    of_embedding = {"HOTROW_LOOKUP_THREADS": str(threads), **environment}
    arguments = [("embedding-server", str(number)) for number in range(options.embedding_servers)]
    arguments += [("embedding-worker", str(number)) for number in range(options.embedding_workers)]
    arguments += [("nn-worker", str(options.nn_worker)), ("data-loader", str(options.data_loader))]
    for command, argument in arguments:
        roles.append(_Role(command, argument, of_embedding if command.startswith("embedding") else environment))


def _after(failed: _Role, cluster: Cluster, restarts_left: int) -> int | None:
    """Say what follows from the end of a role; return the exit code of the run, or None: start again."""
    newest = None if cluster.checkpoint is None else checkpoints_in(cluster.checkpoint).newest()
    last = "there is no checkpoint" if newest is None else f"the last checkpoint is {newest}"
    if restarts_left:
        _log.error("%s; %s; all roles start again, restarts left: %d", failed.ending(), last, restarts_left - 1)
        return None
    _log.error("%s; the run ends; %s", failed.ending(), last)
    code = failed.code
    return 128 - code if failed.command == "nn-worker" and code is not None else 1


def _end(roles: Sequence[_Role], signals: _Signals) -> None:
    """End all roles. A second signal makes it short."""
    for role in roles:
        role.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while any(role.code is None for role in roles) and (left_s := deadline - time.monotonic()) > 0:
        if signals.wait(left_s) & _STOPS:
            break
    for role in roles:
        role.signal_group(signal.SIGKILL)
        role.wait()
