"""``hotrow serve``: a model repository over HTTP."""

import argparse
import gc
import logging
import os
from pathlib import Path
from typing import Any

from serving.frontend.body import Limits


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve", help="serve a model repository over HTTP", description="Serve every model of a repository over HTTP."
    )
    limits = Limits()
    parser.add_argument(
        "repository", type=Path, metavar="REPO", help="folder of <model>/<version>/, ps.json beside the models"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--http-port", type=_port, default=8000, metavar="N", help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="requests run at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "onnx", "numpy"),
        default="auto",
        help="runs the dense network (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=_positive,
        default=limits.max_body_bytes,
        metavar="N",
        help="largest request body (default: %(default)s)",
    )
    parser.add_argument(
        "--max-inflight",
        type=_positive,
        default=limits.max_inflight,
        metavar="N",
        help="most requests in hand (default: %(default)s)",
    )
    parser.set_defaults(run=serve, error_code=2)


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. An error before that is a HotrowError."""
    # Imported here, so that the other commands need not wait for the web framework.
    from serving.frontend.http import Settings, create_app
    from serving.frontend.server import listen, run, url_of
    from serving.frontend.version import server_version
    from serving.repository import ModelRepository

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    listener = listen(options.host, options.http_port)
    with listener, ModelRepository(options.repository, engine=options.engine) as repository:
        repository.load()
        print(f"hotrow {server_version()}")
        for line in repository.describe():
            print(line)
        limits = Limits(max_body_bytes=options.max_body_bytes, max_inflight=options.max_inflight)
        app = create_app(repository, Settings(threads=options.threads, limits=limits))
        # What is loaded now stays; freezing it keeps the collector from walking it again in the middle of requests.
        gc.collect()
        gc.freeze()
        run(app, listener, ready=lambda: print(f"listening on {url_of(listener)}", flush=True))
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port lies between 0 and 65535")
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
