"""``python -m training.persia run`` starts all roles. Each other command is a role, which only ``run`` starts."""

import argparse
import ctypes
import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kernels.errors import HotrowError
from training.persia.config import read_embedding_config, read_global_config
from training.persia.embedding_server import METHODS, EmbeddingServer
from training.persia.embedding_worker import EmbeddingWorker
from training.persia.run import RunOptions, run
from training.persia.wire import Cluster, Message, Peer, RoleError, Server, peers

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_COULD_NOT_START = 2


def main() -> int:
    """Run a command, and return the exit code."""
    options = vars(_parser().parse_args())
    command = options.pop("command")
    if command in ("data-loader", "nn-worker"):
        _become(command)
        _run_script(options["script"])
        if command == "data-loader":
            with suppress(RoleError):  # the NN worker has ended, and needs no end of the data
                Peer("NN worker", Cluster.from_environment().nn_worker).call("finish")
        return 0
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        if command == "run":
            return run(RunOptions(**options))
        _embedding_role(command, options["number"])
    except HotrowError as err:
        logging.getLogger("hotrow.persia").error("%s", err)
        return _COULD_NOT_START
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.persia", description="Train as Persia does.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("run", help="start all roles on this machine, until the NN worker ends")
    for name in ("embedding-config", "global-config"):
        start.add_argument(f"--{name}", type=Path, required=True, metavar="F", help=f"Persia's {name}.yml")
    for name in ("embedding-workers", "embedding-servers"):
        start.add_argument(f"--{name}", type=_count(1), default=1, metavar="N", help="how many (default: 1)")
    for name in ("data-loader", "nn-worker"):
        start.add_argument(f"--{name}", type=Path, required=True, metavar="F", help="your script")
    start.add_argument("--checkpoint", type=Path, metavar="DIR", help="the folder of checkpoints")
    start.add_argument(
        "--max-restarts",
        type=_count(0),
        default=0,
        metavar="N",
        help="after a role has failed, start all roles again, up to N times (default: 0: the run ends)",
    )
    for name in ("embedding-server", "embedding-worker"):
        commands.add_parser(name, help="a role that run starts").add_argument("number", type=_count(0))
    for name in ("data-loader", "nn-worker"):
        commands.add_parser(name, help="a role that run starts").add_argument("script", type=Path)
    return parser


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse


def _become(command: str, number: int | None = None) -> None:
    """Name this process after its role, and have the system kill it when its starter ends in any way."""
    system = ctypes.CDLL(None)
    system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != Cluster.from_environment().starter:  # it ended before this call
        raise SystemExit(1)
    name = command.replace("embedding", "emb") + ("" if number is None else f"-{number}")
    system.prctl(_PR_SET_NAME, name.encode())


def _embedding_role(command: str, number: int) -> None:
    """Serve until the process is ended."""
    cluster = Cluster.from_environment()
    _become(command, number)
    config = read_embedding_config(cluster.embedding_config)
    addresses = {"embedding-server": cluster.embedding_servers, "embedding-worker": cluster.embedding_workers}[command]
    methods: dict[str, Callable[[Message], Message]]
    if command == "embedding-server":
        server = EmbeddingServer(config, read_global_config(cluster.global_config), number, len(addresses))
        methods = {name: getattr(server, name) for name in METHODS}
    else:
        worker = EmbeddingWorker(config, peers("embedding server", cluster.embedding_servers))
        methods = {name: getattr(worker, name) for name in ("put", "look_up", "update")}
    Server(addresses[number], methods).wait()


def _run_script(script: Path) -> None:
    """Run a script as Python does. Any end except success ends this process."""
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as err:
        if err.code not in (None, 0):
            raise


if __name__ == "__main__":
    sys.exit(main())
