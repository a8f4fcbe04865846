"""Outboxes of several members of one group. Threads stand for the processes; each opens the others' files by path."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from training.shared_memory import open_outboxes

SIZE = 3


def open_all(change=lambda name: name):
    """Return what each member opens. ``change`` is what the other members get to see of member 1's name."""
    barrier, given_values = threading.Barrier(SIZE), [None] * SIZE

    def open_of(rank):
        def gather(value):
            given_values[rank] = change(value) if rank == 1 and isinstance(value, tuple) else value
            barrier.wait()
            values = list(given_values)
            barrier.wait()
            return values

        return open_outboxes(rank, SIZE, gather)

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(open_of, range(SIZE)))


PARTS = st.lists(st.lists(arrays(np.float32, st.integers(0, 60)), min_size=2, max_size=2), min_size=SIZE, max_size=SIZE)


@settings(deadline=None, max_examples=30)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_every_member_reads_what_was_written_for_it(messages):
    outboxes = open_all()
    for number, message in enumerate(messages):  # the outbox grows
        writer = number % SIZE
        outboxes[writer][writer].write(message)
        for rank in range(SIZE):
            numbers, sizes = outboxes[rank][writer].read(rank, np.dtype(np.float32))

            np.testing.assert_array_equal(numbers, np.concatenate(message[rank]))
            np.testing.assert_array_equal(sizes, [part.size for part in message[rank]])


@pytest.mark.parametrize(
    "change",
    [
        lambda name: ("/proc/1/fd/no-such-file", name[1]),
        lambda name: (name[0], bytes(16)),  # a file of this machine that happens to have the path
        lambda name: (os.devnull, name[1]),
        lambda name: None,
    ],
    ids=["no file", "another outbox", "no outbox", "no memory"],
)
def test_no_member_uses_memory_unless_all_can(change):
    assert open_all(change) == [[], [], []]


def test_without_files_in_memory_there_are_no_outboxes():
    with mock.patch.object(os, "memfd_create", side_effect=OSError(38, "not implemented")):
        assert open_all() == [[], [], []]
