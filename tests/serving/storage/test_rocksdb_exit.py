"""Daemon threads that are inside RocksDB when Python ends: the process ends as if they were not there."""

import subprocess
import sys
import threading

import pytest

from serving.storage.rocksdb.exit_gate import ExitGate

# A store of many rows, and what daemon threads may do with it again and again. Ends when each has begun.
PROLOGUE = """
import atexit, sys, threading, time
import numpy as np
from serving.errors import StoreError
from serving.parameter_server.circuit_breaker import CircuitBreaker
from serving.storage import Marker, RocksDbStore, TableSpec

store = RocksDbStore(sys.argv[1], num_threads=1)
store.table(TableSpec("model.table", 4)).open(0)
keys = np.arange(20_000)
store.tables["model.table"].insert(keys, np.ones((keys.size, 4), np.float32))
begun = threading.Semaphore(0)

class Lingering:
    def __del__(self, sleep=time.sleep):
        sleep(0.1)  # without the global lock, which threads may take meanwhile, though Python has begun to end

lingering = Lingering()

def fetch():
    begun.release()
    return store.tables["model.table"].fetch(keys, np.empty((keys.size, 4), np.float32))

def insert():
    begun.release()
    store.tables["model.table"].insert(keys[:10], np.ones((10, 4), np.float32))

def bulk_load():
    begun.release()
    rows = np.ones((keys.size, 4), np.float32)
    store.table(TableSpec("model.table", 4)).load(iter([(keys, rows)]), Marker("digest"), keep=False)

def in_daemon_threads(act, threads):
    def again_and_again():
        while True:
            act()
    for _ in range(threads):
        threading.Thread(target=again_and_again, daemon=True).start()
    for _ in range(3 * threads):
        begun.acquire()
"""

ENDS = {
    "lookups, inserts and loads": """
in_daemon_threads(fetch, 3)
in_daemon_threads(insert, 2)
in_daemon_threads(bulk_load, 1)
""",
    "abandoned lookups with a time budget": """
breaker = CircuitBreaker("rocksdb", 1)
abandoned = 0
for _ in range(4):
    try:
        breaker.call("model.table", fetch, fetch)
    except StoreError:
        abandoned += 1
    breaker._is_open = False
assert abandoned, "every call came within a millisecond"
""",
    "inserts, and the store closed after them": """
in_daemon_threads(insert, 2)
from serving.storage.rocksdb.exit_gate import exit_gate
atexit.unregister(exit_gate.close)
atexit.register(store.close)
atexit.register(exit_gate.close)  # what was registered last is called first
""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_process_ends_well_and_silently_while_daemon_threads_use_a_database(tmp_path, end):
    child = subprocess.run(
        [sys.executable, "-c", PROLOGUE + end, str(tmp_path / "db")], capture_output=True, text=True, timeout=60
    )

    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


class Inside:
    """A thread inside a gate, until it may leave."""

    def __init__(self, gate):
        self.entered, self.let_out, self.seen = threading.Event(), threading.Event(), []
        self.thread = threading.Thread(target=lambda: self.seen.append(gate.call(self._stay, "came out")))
        self.thread.start()
        self.entered.wait()

    def _stay(self, answer):
        self.entered.set()
        self.let_out.wait()
        return answer

    def leave(self):
        self.let_out.set()
        self.thread.join()


def test_closing_waits_for_a_running_call():
    gate = ExitGate()
    inside = Inside(gate)
    letting_out = threading.Timer(0.05, inside.leave)
    letting_out.start()

    assert gate.close(most_wait_s=30)
    assert inside.let_out.is_set()
    letting_out.join()
    assert inside.seen == ["came out"]


def test_closing_does_not_wait_for_ever_for_a_call_that_hangs():
    gate = ExitGate()
    inside = Inside(gate)

    assert not gate.close(most_wait_s=0.01)
    inside.leave()


def test_a_closed_gate_ends_other_threads_and_lets_the_one_that_closed_it_through():
    gate = ExitGate()
    gate.close()
    made, raised = [], []

    def call():
        try:
            gate.call(made.append, "in the other thread")
        except SystemExit as err:
            raised.append(err)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    gate.call(made.append, "in this one")

    assert made == ["in this one"]
    assert len(raised) == 1
    assert gate.close(most_wait_s=0)


def test_a_call_that_fails_has_left_the_gate():
    gate = ExitGate()

    with pytest.raises(ValueError, match="invalid literal"):
        gate.call(int, "no number")

    assert gate.close(most_wait_s=0)


def test_a_forked_child_does_not_wait_for_threads_that_it_has_not_got():
    gate = ExitGate()
    inside = Inside(gate)

    gate.forget_threads()

    assert gate.close(most_wait_s=0)
    inside.leave()
