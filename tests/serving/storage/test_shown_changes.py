"""Changes that another process writes: a reader without a lock never finds an older row than before."""

import threading
import time

import numpy as np
import pytest

from serving.storage.rocksdb.shown import ShownChanges

KEYS = np.arange(512)
TIMES_S = 0.5


def rows(value):
    return np.full((KEYS.size, 3), value, np.float32)


def read(shown):
    """Return the rows, the keys that are there, and the keys that the view must answer for."""
    out, found = np.empty((KEYS.size, 3), np.float32), np.zeros(KEYS.size, np.bool_)
    is_left = shown.fetch(KEYS, out, found)
    return out[:, 0], found, is_left


def two_generations():
    shown = ShownChanges(3)
    shown.change(KEYS, rows(1))
    shown.rotate()
    shown.change(KEYS, rows(2))
    return shown


@pytest.fixture
def faults_of():
    """Check in two threads while a change is made again and again; returns whether a check has failed."""

    def run(check, change):
        faults, is_over = [], threading.Event()

        def look():
            while not is_over.is_set():
                if not check():
                    faults.append(True)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + TIMES_S
        while time.monotonic() < end_s:
            change()
        is_over.set()
        for thread in threads:
            thread.join()
        return len(faults)

    return run


def test_a_key_that_is_removed_and_comes_back_never_has_the_row_of_the_view(faults_of):
    shown = two_generations()

    def change():
        shown.change(KEYS, None)
        shown.change(KEYS, rows(3))

    assert not faults_of(lambda: not read(shown)[2].any(), change)


def test_changes_that_are_forgotten_do_not_uncover_older_changes(faults_of):
    tables = [two_generations()]

    def change():
        tables.append(two_generations())
        time.sleep(0.0005)  # readers have begun
        tables[-1].forget(KEYS)

    def check():
        values, _, is_left = read(tables[-1])
        return not (values[~is_left] == 1).any()

    assert not faults_of(check, change)


def test_the_newest_change_of_each_key_is_found():
    shown = two_generations()
    shown.change(KEYS[:1], None)
    values, found, is_left = read(shown)
    assert not is_left.any()
    assert (values[:2].tolist(), found[:2].tolist()) == ([0, 2], [False, True])
    shown.drop_old()
    shown.forget(KEYS[1:])
    values, found, is_left = read(shown)
    assert is_left.tolist() == [False] + [True] * (KEYS.size - 1)
    assert (values[0], found[0], len(shown)) == (0, False, 1)
