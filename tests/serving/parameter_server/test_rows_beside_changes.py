"""What a tier is given back is what the table has, however it changes meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

from serving.parameter_server import rows_beside_changes as module
from serving.parameter_server.changes import Changes
from serving.parameter_server.rows_beside_changes import rows_beside_changes

KEYS = np.arange(3000)


def batches(held):
    """All rows as they are when the first is asked for, in batches; a row is one number."""
    now = held.copy()
    keys, rows = np.array(list(now)), np.array(list(now.values()), dtype=np.float32)
    for at in range(0, keys.size, 50):
        yield keys[at : at + 50], rows[at : at + 50, None]


def reader(held):
    def read(keys):
        there = [key for key in keys.tolist() if key in held]
        rows = np.array([held[key] for key in there], dtype=np.float32).reshape(-1, 1)
        return np.array(there, dtype=np.int64), rows

    return read


def write(changes, held, rng, number):
    """One change: insert or evict some keys, one maybe twice."""
    keys = rng.integers(0, 2 * KEYS.size, 20)
    with changes.lock:
        for key in keys.tolist():
            if number % 3:
                held[key] = float(number)
            else:
                held.pop(key, None)
        changes.note(keys)


@pytest.mark.parametrize("most_keys", [7, 65536])
def test_who_takes_the_rows_beside_a_writer_has_what_the_table_has_in_the_end(monkeypatch, most_keys):
    monkeypatch.setattr(module, "MOST_KEYS", most_keys)
    held, taken, changes, stop = dict.fromkeys(KEYS.tolist(), 0.5), {}, Changes(), threading.Event()

    def work():
        rng, number = np.random.default_rng(1), 0
        while not stop.wait(0.0005):
            number += 1
            write(changes, held, rng, number)

    def interrupted():
        rng = np.random.default_rng(2)
        for number, batch in enumerate(batches(held)):
            write(changes, held, rng, number)  # however seldom the thread has its turn
            yield batch

    with ThreadPoolExecutor(1) as writer, ExitStack() as until_taken:
        walk = rows_beside_changes(interrupted(), reader(held), changes, lambda: None, until_taken)
        writer.submit(work)
        until_taken.callback(stop.set)
        for keys, rows in walk:
            if rows is None:
                for key in keys.tolist():
                    taken.pop(key, None)
            else:
                taken |= dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))
        assert taken == held
        assert changes.lock.locked()
    assert not changes.lock.locked()


def test_a_walk_that_is_closed_early_gives_the_lock_back_and_listens_no_more():
    held, changes = dict.fromkeys(KEYS.tolist(), 0.5), Changes()
    with (
        ExitStack() as until_taken,
        closing(rows_beside_changes(batches(held), reader(held), changes, lambda: None, until_taken)) as walk,
    ):
        next(walk)
        assert changes.lock.locked()
        assert changes._listeners

    assert not changes.lock.locked()
    assert not changes._listeners


def test_rows_are_given_only_while_they_are_wanted():
    changes = Changes()

    def check():
        assert changes.lock.locked()
        raise RuntimeError("unloaded")

    for rows in (batches({}), batches({1: 0.5})):
        with pytest.raises(RuntimeError, match="unloaded"), ExitStack() as until_taken:
            list(rows_beside_changes(rows, reader({}), changes, check, until_taken))
        assert not changes.lock.locked()
