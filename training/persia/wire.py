"""How the roles find each other, and how they talk: calls over sockets, whose messages are named arrays and JSON.

A message is 4 bytes with the length of a JSON document, and the document ``[subject, facts, [[name, dtype, shape],
...], place]``. The subject is a method, or what an error says. A batch has megabytes of arrays, so they do not go
through the socket. They are in shared memory at ``place``; see ``shared_arrays``.

A call has a connection for itself until its answer is there. Then the next call uses the connection.
"""

import json
import logging
import math
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Lock, Thread
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kernels.errors import HotrowError
from training.errors import SessionError, TrainingError
from training.persia.shared_arrays import RECEIVER, SENDER, aligned

_log = logging.getLogger("hotrow.persia")
_VARIABLE = "HOTROW_PERSIA"
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 64 << 20
#: All roles start at the same time, so a role often waits until another listens.
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Cluster:
    """The roles of one run. All are on this machine, and talk over its loopback addresses.

    Attributes:
        starter: the process that started the roles.
        embedding_config: path of the file.
        global_config: path of the file.
        embedding_servers: addresses, "host:port".
        embedding_workers: addresses.
        nn_worker: its address.
        checkpoint: the folder of checkpoints; None: there is none.
    """

    starter: int
    embedding_config: str
    global_config: str
    embedding_servers: tuple[str, ...]
    embedding_workers: tuple[str, ...]
    nn_worker: str
    checkpoint: str | None

    def environment(self) -> dict[str, str]:
        """Return the variable from which a role reads this."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self:
        """Undo ``environment``.

        Raises:
            SessionError: this process is not a role of a run.
        """
        text = os.environ.get(_VARIABLE)
        if text is None:
            raise SessionError("this script is a role of Persia: start it with python -m training.persia run")
        members: dict[str, Any] = {
            name: tuple(item) if isinstance(item, list) else item for name, item in json.loads(text).items()
        }
        return cls(**members)


class RoleError(TrainingError):
    """Another role could not do what it was asked."""

    def __init__(self, role: str, reason: str) -> None:
        """Name the role, and say what happened."""
        super().__init__(f"{role}: {reason}")
        self.role = role
        self.reason = reason


class Message(NamedTuple):
    """What roles send each other.

    Attributes:
        arrays: by name.
        facts: a JSON object.
    """

    arrays: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any]


NOTHING = Message({}, {})


def encode(message: Message, subject: str | None = None) -> bytes:
    """Turn a message into bytes. Its arrays are copied into a shared segment."""
    arrays = list(message.arrays.values())
    kinds = [(name, array.dtype.str, array.shape) for name, array in message.arrays.items()]
    return json.dumps([subject, message.facts, kinds, SENDER.write(arrays) if arrays else None]).encode()


def decode(data: bytes) -> tuple[Message, str | None]:
    """Undo ``encode``, without a copy."""
    subject, facts, kinds, place = json.loads(data)
    arrays: dict[str, NDArray[Any]] = {}
    if place is not None:
        memory, end = RECEIVER.read(place), aligned(1)
        for name, dtype, shape in kinds:
            begin = end
            array = memory[begin : begin + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            arrays[name], end = array, begin + aligned(array.nbytes)
    return Message(arrays, facts), subject


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    """Wait for what ``_send`` sends.

    Raises:
        OSError: the connection has ended.
    """
    [size] = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if size > _MOST_BYTES:
        raise OSError(f"expected a message of at most {_MOST_BYTES:,} bytes, got {size:,}")
    return _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data), socket.MSG_WAITALL)
        if not part:
            raise OSError("the connection has ended")
        data += part
    return data


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


Methods = Mapping[str, Callable[[Message], Message]]


class Server:
    """Answers the calls of other roles. Each connection has a thread."""

    def __init__(self, address: str, methods: Methods) -> None:
        """Begin to listen.

        Raises:
            SessionError: the address cannot be bound.
        """
        self._methods = methods
        self._lock = Lock()
        self._connections: set[socket.socket] = set()
        try:
            self._listener = socket.create_server(_host_and_port(address), backlog=128, reuse_port=True)
        except OSError as err:
            raise SessionError(f"{address}: cannot listen: {err}") from err
        self._thread = Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the server."""
        self._thread.join()

    def stop(self) -> None:
        """End the server and its connections. Calls that run end on their own."""
        _end(self._listener)
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                _end(connection)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # it was stopped
                    return
                with self._lock:
                    self._connections.add(connection)
                Thread(target=self._serve, args=(connection,), name="calls", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                _send(connection, self._answer(_receive(connection)))
        with self._lock:
            self._connections.discard(connection)

    def _answer(self, data: bytes) -> bytes:
        """Return an answer. Its subject is an error."""
        try:
            message, name = decode(data)
            method = self._methods.get(name or "")
            if method is None:
                raise SessionError(f"expected one of the methods {', '.join(self._methods)}, got {name}")
            return encode(method(message))
        except (HotrowError, ValueError) as err:
            return encode(NOTHING, str(err))
        except Exception as err:  # noqa: BLE001  # the top of a call
            _log.exception("%s failed", name)
            return encode(NOTHING, f"{type(err).__name__}: {err}")


def _end(connection: socket.socket) -> None:
    """End what another thread waits for."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _close(connections: set[socket.socket]) -> None:
    for connection in connections:
        connection.close()


class Answer:
    """The answer to a call that may still be running."""

    def __init__(self, peer: "Peer", connection: socket.socket | None, error: RoleError | None = None) -> None:
        """Wait at a connection; or know that there is an error."""
        self._peer = peer
        self._connection = connection
        self._message = NOTHING
        self._error = error
        self._lock = Lock()

    def result(self) -> Message:
        """Wait for the answer, and return it.

        Raises:
            RoleError: the role refused, failed or is gone.
        """
        with self._lock:
            if self._connection is not None:
                self._message, self._error = self._peer.answer(self._connection)
                self._connection = None
        if self._error is not None:
            raise self._error
        return self._message

    def wait(self) -> None:
        """Wait for the answer, without looking at it."""
        with suppress(RoleError):
            self.result()

    @property
    def is_done(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        if not self._lock.acquire(blocking=False):  # another thread waits
            return False
        try:
            if self._connection is None:
                return True
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            return bool(poll.poll(0))
        finally:
            self._lock.release()


class Peer:
    """Another role. A call waits until the role listens."""

    def __init__(self, role: str, address: str) -> None:
        """Name the role, for messages."""
        self._role = role
        self._address = _host_and_port(address)
        self._lock = Lock()
        self._connections: set[socket.socket] = set()
        self._idle: list[socket.socket] = []
        self._is_closed = False
        weakref.finalize(self, _close, self._connections)

    def start(self, method: str, arrays: Mapping[str, NDArray[Any]] | None = None, **facts: Any) -> Answer:
        """Begin a call."""
        try:
            connection = self._take()
        except RoleError as err:
            return Answer(self, None, err)
        try:
            _send(connection, encode(Message(arrays or {}, facts), method))
        except OSError as err:
            return Answer(self, None, self._gone(connection, err))
        return Answer(self, connection)

    def call(self, method: str, arrays: Mapping[str, NDArray[Any]] | None = None, **facts: Any) -> Message:
        """Make a call, and return its answer.

        Raises:
            RoleError: the role refused, failed or is gone.
        """
        return self.start(method, arrays, **facts).result()

    def answer(self, connection: socket.socket) -> tuple[Message, RoleError | None]:
        """Wait for the answer to a call."""
        try:
            message, error = decode(_receive(connection))
        except OSError as err:
            return NOTHING, self._gone(connection, err)
        with self._lock:
            self._idle.append(connection)
        return message, None if error is None else RoleError(self._role, error)

    def close(self) -> None:
        """End running calls, and disconnect."""
        with self._lock:
            self._is_closed = True
            for connection in self._connections:
                _end(connection)

    def _take(self) -> socket.socket:
        """Return a connection that no call uses."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise RoleError(self._role, "the call was cancelled")
                if self._idle:
                    return self._idle.pop()
            try:
                connection = socket.create_connection(self._address)
            except ConnectionRefusedError:
                time.sleep(_RETRY_S)
                continue
            except OSError as err:
                raise RoleError(self._role, str(err)) from err
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
                if self._is_closed:
                    _end(connection)
            return connection

    def _gone(self, connection: socket.socket, err: OSError) -> RoleError:
        connection.close()
        with self._lock:
            self._connections.discard(connection)
            reason = "the call was cancelled" if self._is_closed else str(err)
        return RoleError(self._role, reason)


def peers(role: str, addresses: tuple[str, ...]) -> list[Peer]:
    """Return the roles of one kind."""
    return [Peer(f"{role} {number}", address) for number, address in enumerate(addresses)]
