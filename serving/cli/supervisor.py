"""``hotrow serve --workers N``: starts the workers, and starts a worker again when it ends. It loads no model itself.

Every worker is the same command again, with its ``WorkerPlace`` in the environment. All workers accept HTTP connections
on one socket, which this process opened. So waiting connections survive the death of a worker. For gRPC each worker
listens on the same port.

SIGHUP restarts the workers one after the other. Without ``--model-control-mode``, worker 0 then reads the repository
again, and the others follow it.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from serving.cli.shared_folders import sockets_folder, tables_identity
from serving.config import shared_ram_name
from serving.frontend.http.listening import bound
from serving.frontend.worker_place import WorkerPlace, address_of
from serving.storage.shared.folder import SHARED_MEMORY

_log = logging.getLogger("hotrow.workers")
_PR_SET_PDEATHSIG = 1
#: A worker that ends earlier than this again and again waits before it is started: twice as long each time.
_SETTLED_S = 30.0
#: How long after its stop should be over a worker is killed. With the default options, a container engine kills the
#: supervisor later.
_KILL_AFTER_S = 1.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
#: How often a worker is asked, and how long it may take to answer. A worker that is silent twice is replaced: the first
#: time, the supervisor may have been stopped with it.
_ASK_INTERVAL_S, _ANSWER_TIMEOUT_S = 1.0, 5.0


def end_with(starter: int) -> None:
    """Have the system send SIGTERM to this process when its starter ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:  # it ended before this call
        raise SystemExit(0)


class Supervisor:
    """The workers of one ``hotrow serve``. Belongs to the main thread. Close it by leaving its block."""

    def __init__(
        self, options: argparse.Namespace, listener: socket.socket, standard_error: int, answered: Callable[[], None]
    ) -> None:
        """Prepare the workers; they accept connections on ``listener`` and log to ``standard_error``.

        ``answered`` is called once the first worker answers.

        Raises:
            ConfigError: the gRPC port cannot be bound, or there is no shared memory.
        """
        self._rereads = options.model_control_mode == "none"
        self._answered = answered
        self._held = ExitStack()
        with ExitStack() as opened:
            # If an earlier server at this address was killed, its tables are found again instead of staying forever.
            tables = tables_identity(listener)
            opened.callback(shutil.rmtree, SHARED_MEMORY / shared_ram_name(tables), ignore_errors=True)
            folder, lock = opened.enter_context(sockets_folder())
            grpc = None if options.grpc_port is None else _reserved(options.host, options.grpc_port)
            if grpc is not None:
                opened.enter_context(grpc)
            place = WorkerPlace(
                number=0,
                workers=options.workers,
                listener=listener.fileno(),
                grpc_port=None if grpc is None else grpc.getsockname()[1],
                folder=str(folder),
                tables=tables,
                starter=os.getpid(),
                rereads=False,
            )
            self._held = opened.pop_all()
        places = [replace(place, number=number) for number in range(options.workers)]
        stop_s = options.shutdown_delay_s + options.drain_timeout_s
        self._workers = [_Worker(place, standard_error, lock, stop_s) for place in places]
        self._stopped_by: signal.Signals | None = None
        self._is_ready = False
        self._rolling: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        """Return the supervisor."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Release what the workers shared. They have ended."""
        self._held.close()

    def run(self) -> int:
        """Start the workers, and keep them running until SIGTERM or SIGINT.

        Returns:
            the exit code of the process.

        Raises:
            KeyboardInterrupt: after SIGINT, once everything is answered.
        """
        code = asyncio.run(self._run())
        if self._stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        return code

    async def _run(self) -> int:
        loop, serving = asyncio.get_running_loop(), asyncio.ensure_future(self._serve())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number, serving)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        try:
            return await serving
        except asyncio.CancelledError:
            return 0
        finally:
            if self._rolling is not None:
                self._rolling.cancel()
            await asyncio.gather(*(worker.end() for worker in self._workers))

    async def _serve(self) -> int:
        """Start the workers and keep them running, or return the exit code of a worker that does not start at first."""
        first, *others = self._workers
        _log.info("%d workers: each has its own GPU caches, and its own RAM unless it holds every row", len(others) + 1)
        if not await first.start():
            return first.exit_code
        self._answered()
        if not all(await asyncio.gather(*(worker.start() for worker in others))):
            return next(worker.exit_code for worker in others if not worker.is_running)
        self._is_ready = True
        print("".join(first.printed), end="", flush=True)
        await asyncio.gather(*(worker.keep() for worker in self._workers))
        raise AssertionError("a worker is kept until the task is cancelled")

    def _stop(self, number: signal.Signals, serving: "asyncio.Task[int]") -> None:
        if self._stopped_by is None:
            self._stopped_by = number
            serving.cancel()
        else:  # a second signal ends the delay of the stop, or the stop
            for worker in self._workers:
                worker.send(number)

    def _hang_up(self) -> None:
        if self._stopped_by is not None:
            return
        if not self._is_ready or (self._rolling is not None and not self._rolling.done()):
            _log.warning("SIGHUP is ignored, because the workers are being started")
            return
        self._rolling = asyncio.ensure_future(self._restart_all())

    async def _restart_all(self) -> None:
        _log.info("SIGHUP: restarting the workers one after the other")
        for number, worker in enumerate(self._workers):
            if not await worker.restart(rereads=self._rereads and not number):
                _log.error("the restart ends here: worker %d did not start; the others continue unchanged", number)
                return
        _log.info("all workers were restarted")


class _Worker:
    """One worker process after another in the same place.

    Attributes:
        printed: what the process printed until it was ready.
    """

    def __init__(self, place: WorkerPlace, standard_error: int, lock: int, stop_s: float) -> None:
        self._place = place
        self._stop_s = stop_s
        self._lock = lock  # of the sockets' folder, which each process keeps
        self._standard_error = standard_error
        self._launch: asyncio.Future[Process] | None = None
        self._process: Process | None = None
        self._changing = asyncio.Lock()  # held while the process is replaced
        self.printed: list[str] = []

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int:
        """The exit code of the ended process; 2, could not start, if a signal ended it."""
        code = None if self._process is None else self._process.returncode
        return code if code is not None and code > 0 else 2

    async def start(self, rereads: bool = False) -> bool:
        """Start a process, and wait; return True once it is ready, False if it ended."""
        place = replace(self._place, rereads=rereads)
        # The same interpreter, options and arguments, in its own process group: Ctrl-C does not reach it directly.
        launch = asyncio.create_subprocess_exec(
            sys.executable,
            *sys.orig_argv[1:],
            env=place.environment(),
            pass_fds=[place.listener, self._lock],
            stdout=PIPE,
            stderr=self._standard_error,
            process_group=0,
            limit=sys.maxsize,  # a line names all tables of a model
        )
        self._launch = asyncio.ensure_future(launch)
        self.printed = []
        try:
            self._process = await asyncio.shield(self._launch)
        except OSError as err:  # too little memory, or too many processes
            self._launch = None
            _log.error("worker %d cannot be started: %s", place.number, err.strerror or err)
            return False
        if self._process.stdout is not None:
            async for line in self._process.stdout:
                self.printed.append(line.decode())
                if line.startswith(b"listening on "):
                    _log.info("worker %d is ready: process %d", place.number, self._process.pid)
                    return True
        if await self._process.wait() < 0:  # otherwise the worker itself has said why
            _log.error("worker %d %s before it was ready", place.number, self._ending())
        return False

    async def keep(self) -> None:
        """Start the process again whenever it ends."""
        pause_s = 0.0
        while True:
            began_s, process = time.monotonic(), self._process
            if process is not None:
                asking = asyncio.ensure_future(self._kill_once_silent(process))
                try:
                    await process.wait()
                finally:
                    asking.cancel()
            async with self._changing:
                if self.is_running:
                    continue  # it was restarted
                lived_long = time.monotonic() - began_s > _SETTLED_S
                pause_s = _FIRST_PAUSE_S if lived_long else min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                _log.warning("worker %d %s; it starts again in %g s", self._place.number, self._ending(), pause_s)
                await asyncio.sleep(pause_s)
                await self.start()

    async def _kill_once_silent(self, process: Process) -> None:
        """Kill a process that is stopped or hangs, because gRPC clients would still be connected to it."""
        silences = 0
        while silences < 2:
            await asyncio.sleep(_ASK_INTERVAL_S)
            silences = silences + 1 if await self._is_silent() else 0
        _log.error("worker %d does not answer", self._place.number)
        process.kill()

    async def _is_silent(self) -> bool:
        """Whether the process takes a call of another worker and does not answer it."""
        writer = None
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(address_of(self._place.folder, self._place.number))
                writer.write(b'["versions"]')
                writer.write_eof()
                await reader.read()
        except TimeoutError:
            return True
        except OSError:  # it is starting or stopping
            return False
        finally:
            if writer is not None:
                writer.close()
        return False

    async def restart(self, rereads: bool) -> bool:
        """End the process and start another; return whether it is ready."""
        async with self._changing:
            await self.end(signal.SIGHUP)
            return await self.start(rereads)

    async def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the process once it has answered everything and, at SIGHUP, its gRPC clients have left."""
        if self._launch is not None:
            process = await self._launch
            self.send(how)
            self.send(signal.SIGCONT)  # a stopped process would not hear
            try:
                await asyncio.wait_for(process.wait(), self._stop_s + _KILL_AFTER_S if how == signal.SIGTERM else None)
            except TimeoutError:  # it does not even end itself
                self.send(signal.SIGKILL)
                await process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _ending(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _reserved(host: str, port: int) -> socket.socket:
    """Bind a port, which workers may then listen on together; nothing listens on this socket.

    Raises:
        ConfigError: the address cannot be bound, for example because another server listens on it.
    """
    with bound(host, port, "listen for gRPC") as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # after the bind, which must fail if it is taken
    return reserved
