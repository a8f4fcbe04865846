"""Several members of one group. Threads stand for the processes; each opens the others' files by path."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from training.neighbours import open_neighbours

SIZE = 3


def together(work):
    """Return what each member makes of its rank and of a way to gather values."""
    barrier, given_values = threading.Barrier(SIZE), [None] * SIZE

    def work_of(rank):
        def gather(value):
            given_values[rank] = value
            barrier.wait()
            values = list(given_values)
            barrier.wait()
            return values

        return work(rank, gather)

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(work_of, range(SIZE)))


def open_all(change=lambda names: names):
    """Return what each member opens. ``change`` is what the other members get to see of member 1's names."""
    return together(
        lambda rank, gather: open_neighbours(
            rank, SIZE, lambda value: gather(change(value) if rank == 1 and isinstance(value, tuple) else value)
        )
    )


@settings(deadline=None, max_examples=30)
@given(
    arrays(
        np.int64, st.tuples(st.integers(1, 4), st.just(SIZE), st.just(SIZE), st.just(2)), elements=st.integers(0, 60)
    )
)
def test_every_member_reads_what_was_written_for_it(sizes):
    numbers = np.random.default_rng(0)
    exchanges = [
        [[[numbers.random(size, np.float32) for size in parts] for parts in of_member] for of_member in of_exchange]
        for of_exchange in sizes
    ]

    def exchange(rank, gather):
        neighbours = open_neighbours(rank, SIZE, gather)
        for messages in exchanges:  # the outboxes grow
            neighbours.write(messages[rank])
            neighbours.send(b"arrays")
            came, late = neighbours.receive(60)
            assert came == [b"arrays"] * SIZE
            assert not late
            for source, parts in enumerate(neighbours.read()):
                for part, expected in zip(parts, messages[source][rank], strict=True):
                    np.testing.assert_array_equal(part, expected)
        gather(None)  # nobody ends before all have read

    together(exchange)


def test_members_that_have_not_arrived_are_named_and_may_be_late():
    first, second, third = open_all()
    first.send(b"a")
    third.send(b"b")

    assert first.receive(0) == ([b"a", b"b"], [1])

    second.send(b"c")

    assert first.receive(0) == ([b"a", b"b", b"c"], [])


def test_a_member_that_has_ended_is_an_error_at_once():
    neighbours = open_all()
    neighbours[0].send(b"a")
    del neighbours[1]

    with pytest.raises(OSError, match="process 1 has closed its pipe"):
        neighbours[0].receive(60)


def test_what_a_member_sent_before_it_ended_is_received():
    neighbours = open_all()
    for one in neighbours:
        one.send(b"a")
    del neighbours[1:], one

    assert neighbours[0].receive(60) == ([b"a"] * SIZE, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda names: ([("/proc/1/fd/no-such-file", token) for _, token in names[0]], names[1]),
        lambda names: ([(path, bytes(16)) for path, _ in names[0]], names[1]),  # a file that happens to have the path
        lambda names: ([(os.devnull, token) for _, token in names[0]], names[1]),
        lambda names: (names[0], {other: "/proc/1/fd/no-such-file" for other in names[1]}),
        lambda names: ([], names[1]),
    ],
    ids=["no file", "another outbox", "no outbox", "no pipe", "no memory"],
)
def test_no_member_uses_memory_unless_all_can(change):
    open_files = len(os.listdir("/proc/self/fd"))

    assert open_all(change) == [None] * SIZE
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_without_files_in_memory_there_are_no_neighbours():
    with mock.patch.object(os, "memfd_create", side_effect=OSError(38, "not implemented")):
        assert open_all() == [None] * SIZE
