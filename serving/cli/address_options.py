"""The options that say where a server listens. `hotrow serve` listens there, and `hotrow ready` asks there."""

import argparse
from pathlib import Path

from serving.cli.numbers import whole_number

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
#: What ``add_address_options`` adds.
ADDRESS_OPTIONS = ("host", "http_port", "uds", "ssl_certfile", "ssl_keyfile")


def add_address_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; a host or a port that is not given is None."""
    parser.add_argument("--host", help=f"address to listen on (default: {DEFAULT_HOST})")
    parser.add_argument(
        "--http-port",
        "--port",
        type=whole_number(0, 65535),
        metavar="N",
        help=f"port to listen on; 0 takes a free port (default: {DEFAULT_PORT})",
    )
    parser.add_argument(
        "--uds", type=Path, metavar="PATH", help="answer HTTP on this Unix socket instead of --host and --http-port"
    )
    parser.add_argument(
        "--ssl-certfile", type=Path, metavar="FILE", help="TLS for HTTP and gRPC, with this certificate (PEM)"
    )
    parser.add_argument(
        "--ssl-keyfile", type=Path, metavar="FILE", help="private key (PEM), if it is not in the certificate's file"
    )
