"""The place of one worker among the workers of a server."""

import json
import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class WorkerPlace:
    """What a worker learns from the process that starts it.

    Attributes:
        number: which worker it is.
        workers: how many there are.
        listener: the descriptor of the socket that all workers accept HTTP connections on.
        grpc_port: the port that they share for gRPC; None: no gRPC.
        folder: the folder of their own sockets.
        tables: identity of the shared RAM, see ``with_shared_ram``.
        starter: the process that starts them.
        rereads: serve the versions that the repository has, not those of the other workers.
    """

    number: int
    workers: int
    listener: int
    grpc_port: int | None
    folder: str
    tables: str
    starter: int
    rereads: bool

    VARIABLE = "HOTROW_WORKER"

    @classmethod
    def of_this_process(cls) -> "WorkerPlace | None":
        """Return the place of this process; None if it is not a worker."""
        text = os.environ.get(cls.VARIABLE)
        return cls(**json.loads(text)) if text else None

    def environment(self) -> dict[str, str]:
        """The environment of a process in this place."""
        return {**os.environ, self.VARIABLE: json.dumps(asdict(self))}


def address_of(folder: str, number: int) -> str:
    """Return the path of a worker's socket."""
    return f"{folder}/worker{number}"
