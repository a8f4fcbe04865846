"""Listening sockets, and how clients name them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serving.errors import ConfigError

_BACKLOG = 2048
#: How long a server with a full backlog may take to accept a connection.
_CONNECT_TIMEOUT_S = 5.0


@contextmanager
def bound(host: str, port: int, purpose: str = "listen") -> Iterator[socket.socket]:
    """Bind a port for a purpose, and close it if the block raises an error; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound, or the block raises an error of the system.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as err:
        raise ConfigError(f"{host}:{port}", "", f"no such address: {err.strerror}") from err
    except UnicodeError as err:
        raise ConfigError(f"{host[:64]}:{port}", "", "no such address: not the name of a host") from err
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        yield listener
    except OSError as err:
        listener.close()
        raise ConfigError(f"{host}:{port}", "", f"cannot {purpose}: {err.strerror or err}") from err


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen, so that a port in use is an error before the server is ready; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    with bound(host, port) as listener:
        listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


@contextmanager
def listening_on_path(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket, and remove its file at the end. The file of a dead server is replaced.

    While this server answers its last requests, its successor may have replaced the file, which then stays.

    Raises:
        ConfigError: another server listens there, the file is not a socket, or the path cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            _remove_dead_socket(path)
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except OSError as err:  # without an errno, the path is too long
            raise ConfigError(f"--uds {path}", "", f"cannot listen: {err.strerror or err}") from err
        listener.setblocking(False)
        file = os.open(path, os.O_PATH)  # while it is open, no other file gets its identity
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(os.fstat(file), path.lstat()):
                    path.unlink()
            os.close(file)


def _remove_dead_socket(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"--uds {path}", "", "exists already, and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_TIMEOUT_S)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise ConfigError(f"--uds {path}", "", "another server listens on it")


def host_of(listener: socket.socket) -> str:
    """Return the address of the host that ``listener`` listens on; "" for a Unix socket."""
    return "" if listener.family == socket.AF_UNIX else str(listener.getsockname()[0])


def url_of(listener: socket.socket, has_tls: bool = False) -> str:
    """Return the URL of ``listener`` for clients, or ``unix:`` and the path of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
