"""How the roles find each other, and how they talk: gRPC calls whose messages are named arrays and JSON.

A message is a JSON document ``[facts, [[name, dtype, shape], ...], place]``. A batch has megabytes of arrays, so they
do not go through gRPC. They are in shared memory at ``place``; see ``shared_arrays``.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import grpc
import numpy as np
from numpy.typing import NDArray

from kernels.errors import HotrowError
from training.errors import SessionError, TrainingError
from training.persia.shared_arrays import RECEIVER, SENDER, aligned

_log = logging.getLogger("hotrow.persia")
_VARIABLE = "HOTROW_PERSIA"
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
#: All roles start at the same time, so a role often waits until another listens.
_RETRIES = [(f"grpc.{name}_reconnect_backoff_ms", ms) for name, ms in (("initial", 50), ("min", 50), ("max", 200))]
_CLIENT = [*_NO_LIMIT, *_RETRIES, ("grpc.enable_http_proxy", 0)]


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


def encode(message: Message) -> bytes:
    """Turn a message into bytes. Its arrays are copied into a shared segment."""
    arrays = list(message.arrays.values())
    kinds = [(name, array.dtype.str, array.shape) for name, array in message.arrays.items()]
    return json.dumps([message.facts, kinds, SENDER.write(arrays) if arrays else None]).encode()


def decode(data: bytes) -> Message:
    """Undo ``encode``, without a copy."""
    facts, kinds, place = json.loads(data)
    if place is None:
        return Message({}, facts)
    arrays: dict[str, NDArray[Any]] = {}
    memory, end = RECEIVER.read(place), aligned(1)
    for name, dtype, shape in kinds:
        begin = end
        array = memory[begin : begin + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
        arrays[name], end = array, begin + aligned(array.nbytes)
    return Message(arrays, facts)


def serve(address: str, methods: Mapping[str, Callable[[Message], Message]], threads: int) -> grpc.Server:
    """Start a server. Its methods are called from several threads.

    Raises:
        SessionError: the address cannot be bound.
    """
    server = grpc.server(ThreadPoolExecutor(threads), options=_NO_LIMIT)
    handlers = {name: grpc.unary_unary_rpc_method_handler(_answering(method)) for name, method in methods.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("hotrow.Persia", handlers)])
    try:
        server.add_insecure_port(address)
    except RuntimeError as err:
        raise SessionError(f"{address}: cannot listen: {err}") from err
    server.start()
    return server


def _answering(method: Callable[[Message], Message]) -> Callable[[bytes, Any], bytes]:
    def answer(data: bytes, context: Any) -> bytes:
        try:
            return encode(method(decode(data)))
        except (HotrowError, ValueError) as err:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(err))
        except Exception as err:  # noqa: BLE001  # the top of a call
            _log.exception("%s failed", method.__name__)
            context.abort(grpc.StatusCode.INTERNAL, f"{type(err).__name__}: {err}")
        raise AssertionError("abort raises an error")

    return answer


class Answer:
    """The answer to a call that may still be running."""

    def __init__(self, role: str, future: Any) -> None:
        """Wait for a future of gRPC."""
        self._role = role
        self._future = future

    def result(self) -> Message:
        """Wait for the answer, and return it.

        Raises:
            RoleError: the role refused, failed or is gone.
        """
        try:
            return decode(self._future.result())
        except grpc.RpcError as err:
            raise RoleError(self._role, err.details()) from err
        except grpc.FutureCancelledError as err:
            raise RoleError(self._role, "the call was cancelled") from err

    @property
    def is_done(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        return bool(self._future.done())

    def then(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from a thread of gRPC when the answer is there."""
        self._future.add_done_callback(lambda _: callback())


class Peer:
    """Another role. A call waits until the role listens."""

    def __init__(self, role: str, address: str) -> None:
        """Name the role, for messages."""
        self._role = role
        self._channel = grpc.insecure_channel(address, options=_CLIENT)

    def start(self, method: str, arrays: Mapping[str, NDArray[Any]] | None = None, **facts: Any) -> Answer:
        """Begin a call."""
        call = self._channel.unary_unary(f"/hotrow.Persia/{method}")
        return Answer(self._role, call.future(encode(Message(arrays or {}, facts)), wait_for_ready=True))

    def call(self, method: str, arrays: Mapping[str, NDArray[Any]] | None = None, **facts: Any) -> Message:
        """Make a call, and return its answer.

        Raises:
            RoleError: the role refused, failed or is gone.
        """
        return self.start(method, arrays, **facts).result()

    def close(self) -> None:
        """End running calls, and disconnect."""
        self._channel.close()


def peers(role: str, addresses: tuple[str, ...]) -> list[Peer]:
    """Return the roles of one kind."""
    return [Peer(f"{role} {number}", address) for number, address in enumerate(addresses)]
