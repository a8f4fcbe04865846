"""What a script in a test finds out about the processes of its run, and does to them."""

import os
import signal
from pathlib import Path

from training.persia.wire import Cluster, Peer, RoleError


def siblings():
    """The processes of the run by name, without the run itself."""
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text(encoding="utf-8").split()
    return {Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip(): int(pid) for pid in children}


def wait_for_servers():
    """Wait until the embedding servers answer."""
    for address in Cluster.from_environment().embedding_servers:
        try:
            Peer("embedding server", address).call("look_up")
        except RoleError:  # it is not configured, so it answers
            continue


def kill(name):
    """Kill a role as the system does when memory is short."""
    os.kill(siblings()[name], signal.SIGKILL)


def pids_of_run(folder):
    """The processes whose environment names a configuration in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:  # it has ended
            continue
        if b"HOTROW_PERSIA" in environment and str(folder).encode() in environment:
            found.append(int(path.parent.name))
    return found
