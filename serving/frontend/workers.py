"""The workers of one server: processes behind one port that serve the same models from the same tables.

Worker 0 leads: it writes the tables and decides which versions are served. The other workers follow. Each worker
answers the others on a Unix socket in a folder of this user. Calls and answers are JSON lists.

    versions                      the versions that the worker serves, and their digests
    follow, versions              serve these versions; the answer names the models whose tables are not ready for them
    metrics, status               the worker's metrics and status document
    index                         the worker's repository index
    statistics, model, version    the worker's statistics
    adopt, changes                make the changes of clients, see ``Control.adopt``
    changes                       what clients have changed, for a worker that starts
    load, model, parameters       to worker 0: a client's request; ``unload`` is the same
    renew, model                  to worker 0: serve the files that the model's folder has now

A starting worker serves the versions that another worker serves. A lock on the file ``joining`` keeps it from missing a
swap: starting workers share the lock, and a swap holds it exclusively. If the files of these versions were replaced,
the starting worker cannot read them any more: it has all workers swap to the new files.
"""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.errors import HotrowError
from serving.config import ParameterServerConfig, with_shared_ram
from serving.errors import RequestError, UnknownModelError, VersionConflictError, WorkerError, without_frames
from serving.frontend.codes import codes_of
from serving.frontend.worker_place import WorkerPlace, address_of
from serving.metrics import Metrics
from serving.repository import Versions

if TYPE_CHECKING:
    from serving.frontend.front_end import FrontEnd
    from serving.frontend.grpc import GrpcServer

logger = logging.getLogger("hotrow.workers")
_LEADER = 0
#: How long one worker, which may be busy or stopped, may take to answer; swaps and loads have no limit.
_ANSWER_TIMEOUT_S = 2.0
#: The same for a worker that did not answer the last call in time. So a stopped worker delays only one call.
_SILENT_TIMEOUT_S = 0.05
_NOT_RUNNING = "is not running; the server is starting it again"
#: The errors of a client's request, by HTTP status.
_REFUSALS = {404: UnknownModelError, 409: VersionConflictError, 400: RequestError}


class Siblings:
    """The other workers, as one worker sees them. See ``serving.repository.Peers``.

    Attributes:
        leads: whether this is worker 0.
        number: this worker.
        address: the path of this worker's socket.
    """

    def __init__(self, place: WorkerPlace) -> None:
        """Take this worker's place, without calling the other workers."""
        self._place = place
        self.number = place.number
        self.leads = place.number == _LEADER
        self._others = [number for number in range(place.workers) if number != place.number]
        self._folder = Path(place.folder)
        self.address = self._address_of(place.number)
        self._joining: int | None = None
        self._silent: set[int] = set()  # the workers that did not answer their last call in time

    def shared(self, ps: ParameterServerConfig) -> ParameterServerConfig:
        """See ``Peers.shared``: RAM with every row is shared. Only worker 0 writes to RocksDB and rejected messages."""
        ps = with_shared_ram(ps, self._place.tables)
        if not self.leads:
            source = ps.update_source.model_copy(update={"rejected_file": None})
            ps = ps.model_copy(update={"update_source": source})
        if self.leads or ps.persistent_db.type == "disabled":
            return ps
        return ps.model_copy(update={"persistent_db": ps.persistent_db.model_copy(update={"read_only": True})})

    def versions(self) -> Versions | None:
        """See ``Peers.versions``.

        Raises:
            WorkerError: this worker follows, and no other worker is running.
        """
        if self._place.rereads:
            return None
        if not self.leads:  # versions change in worker 0 only
            self._joining = self._lock(fcntl.LOCK_SH)
        for number in self._others:
            with suppress(OSError):
                versions: Versions = self._result(number, "versions")
                return versions
        if not self.leads:
            raise WorkerError(_LEADER, _NOT_RUNNING)
        return None

    def renew(self, model: str) -> Versions | None:
        """See ``Peers.renew``.

        Raises:
            WorkerError: worker 0 is not running, or cannot load the files.
        """
        self.joined()  # otherwise the swap would wait for this worker
        try:
            self._result(_LEADER, "renew", model)
        except OSError as err:
            raise WorkerError(_LEADER, _NOT_RUNNING) from err
        return self.versions()

    def joined(self) -> None:
        """End what ``versions`` began: this worker now follows swaps."""
        if self._joining is not None:
            os.close(self._joining)
            self._joining = None

    def follow(self, versions: Versions) -> set[str]:
        """See ``Peers.follow``. A worker that is not running follows when it starts.

        Raises:
            WorkerError: a worker could not follow; the others still follow.
        """
        with self._swapping():
            return set(chain.from_iterable(self._call_others("follow", versions)))

    def lead(self, act: str, model: str, parameters: dict[str, Any]) -> None:
        """Make worker 0 ``"load"`` or ``"unload"`` a model.

        Raises:
            RequestError: the request is refused; see ``Control``.
            WorkerError: worker 0 is not running, or failed.
        """
        try:
            _, error, code = self._ask(_LEADER, act, model, parameters)
        except OSError as err:
            raise WorkerError(_LEADER, _NOT_RUNNING) from err
        if error:
            raise _REFUSALS[code](error) if code in _REFUSALS else WorkerError(_LEADER, error)

    def adopt(self, changes: Sequence[Sequence[Any]]) -> None:
        """Make ``changes`` in all other workers. A worker that is not running gets them when it starts.

        Raises:
            WorkerError: a worker failed; the others have changed.
        """
        self._call_others("adopt", changes, timeout_s=_ANSWER_TIMEOUT_S)

    def of_all(self, what: str, own: Any, *arguments: Any) -> dict[int, Any]:
        """Return the answers of all workers to a call by number; a silent worker is absent.

        Args:
            what: the call.
            own: this worker's answer.
            arguments: of the call.
        """
        answers = {self.number: own}
        for number in self._others:
            with suppress(OSError, HotrowError):
                answers[number] = self._result(number, what, *arguments, timeout_s=_ANSWER_TIMEOUT_S)
        return dict(sorted(answers.items()))

    def leave(self) -> None:
        """Remove the sockets' folder if the process that made it was killed."""
        if os.getppid() != self._place.starter:
            logger.warning("the supervisor was killed, so its workers have ended")
            shutil.rmtree(self._folder, ignore_errors=True)

    def _call_others(self, *call: Any, timeout_s: float | None = None) -> list[Any]:
        """Call every other worker that is running; raise the first WorkerError once all are called."""
        results: list[Any] = []
        errors: list[WorkerError] = []
        for number in self._others:
            try:
                with suppress(OSError):
                    results.append(self._result(number, *call, timeout_s=timeout_s))
            except WorkerError as err:
                errors.append(without_frames(err))
        if errors:
            raise without_frames(errors[0])
        return results

    def _address_of(self, number: int) -> str:
        return address_of(self._place.folder, number)

    def _result(self, number: int, *call: Any, timeout_s: float | None = None) -> Any:
        """Return the result of a call; WorkerError if it failed, OSError if the worker is not running."""
        result, error, _ = self._ask(number, *call, timeout_s=timeout_s)
        if error:
            raise WorkerError(number, error)
        return result

    def _ask(self, number: int, *call: Any, timeout_s: float | None = None) -> tuple[Any, str, int]:
        """Return a worker's answer: the result, or an error and its HTTP status."""
        if timeout_s is not None and number in self._silent:
            timeout_s = _SILENT_TIMEOUT_S
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            try:
                connection.connect(self._address_of(number))
                connection.sendall(json.dumps(call).encode())
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(partial(connection.recv, 1 << 16), b""))
            except TimeoutError:
                self._silent.add(number)
                raise
        self._silent.discard(number)
        if not answer:
            raise ConnectionResetError(f"worker {number} has ended")
        result, error, code = json.loads(answer)
        return result, error, code

    @contextmanager
    def _swapping(self) -> Iterator[None]:
        descriptor = self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    def _lock(self, kind: int) -> int:
        descriptor = os.open(self._folder / "joining", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, kind)
        return descriptor


class WorkerServer:
    """Answers the other workers, and stops at SIGHUP. See ``serving.frontend.http.server.Neighbour``."""

    def __init__(self, siblings: Siblings, front: "FrontEnd", grpc_servers: Sequence["GrpcServer"]) -> None:
        """Answer for ``front``. At SIGHUP, the clients of ``grpc_servers`` go to the other workers before the stop."""
        self._grpc_servers = grpc_servers
        self._siblings = siblings
        self._repository, self._control = front.repository, front.control
        self._work: dict[str, Callable[..., Any]] = {
            "follow": self._repository.follow,
            "renew": self._repository.renew,
            "metrics": Metrics(front.metrics, front.readings).record,
            "status": front.status.document,
        }
        self._quick_work: dict[str, Callable[..., Any]] = {
            "versions": self._repository.served,
            "index": self._control.own_index,
            "statistics": self._control.own_statistics,
            "adopt": self._control.adopt,
            "changes": self._control.changes,
        }
        # The event loop's threads may all wait for a load, which waits until this worker follows. So it has its own.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="hotrow-worker")
        self._server: asyncio.Server | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer from now on."""
        self._server = await asyncio.start_unix_server(self._serve, self._siblings.address)
        # Asked now, because changes from now on arrive here by themselves.
        changes = await asyncio.to_thread(self._siblings.of_all, "changes", [])
        self._control.adopt(chain.from_iterable(changes.values()))
        self._siblings.joined()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)

    async def stop(self, _timeout_s: float) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)  # a call may hang, for example in a load
        self._siblings.leave()

    def _hang_up(self) -> None:
        self._leaving = asyncio.ensure_future(self._hand_over())

    async def _hand_over(self) -> None:
        await asyncio.gather(*(server.hand_over() for server in self._grpc_servers))
        for _ in range(2):  # the second signal ends the delay of the stop, because the other workers go on
            signal.raise_signal(signal.SIGTERM)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: tuple[Any, str, int]
        try:
            call, *arguments = json.loads(await reader.read())
            answer = await self._answer(call, arguments), "", 200
        except HotrowError as err:
            answer = None, str(err), codes_of(err)[0]
        except Exception:  # the top of a call: the traceback goes to the log
            logger.exception("a call of another worker failed")
            answer = None, "internal error; see the server's log", 500
        with suppress(ConnectionError):  # the other worker has ended
            writer.write(json.dumps(answer).encode())
            await writer.drain()
        writer.close()

    async def _answer(self, call: str, arguments: list[Any]) -> Any:
        if call in self._quick_work:
            return self._quick_work[call](*arguments)
        if call in ("load", "unload"):
            return await getattr(self._control, call)(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._work[call], *arguments)
