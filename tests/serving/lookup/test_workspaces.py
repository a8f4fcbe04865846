"""Workspaces are lent to one request at a time, and a request waits for one."""

import threading
import weakref

import pytest

from kernels.errors import DeviceFaultError
from serving.lookup.workspaces import Workspaces


class FakeStream:
    def __init__(self):
        self.waits = 0
        self.is_faulty = False

    def synchronize(self):
        self.waits += 1
        if self.is_faulty:
            raise DeviceFaultError("a kernel failed")


class FakeWorkspace:
    def __init__(self, max_keys):
        self.max_keys, self.stream = max_keys, FakeStream()


@pytest.fixture
def made():
    return []


@pytest.fixture
def workspaces(made):
    def make(max_keys):
        made.append(FakeWorkspace(max_keys))
        return made[-1]

    return Workspaces(make, most_workspaces=2, max_keys=10)


def test_a_returned_workspace_is_lent_again(workspaces, made):
    with workspaces.lend(10) as first:
        pass
    with workspaces.lend(1) as again:
        pass

    assert first is again
    assert len(made) == 1


def test_two_requests_at_a_time_have_two_workspaces(workspaces):
    with workspaces.lend(1) as one, workspaces.lend(1) as other:
        assert one is not other


def test_a_third_request_waits_until_a_workspace_is_returned(workspaces):
    answered = threading.Event()
    lent = []

    def request():
        with workspaces.lend(1) as work:
            lent.append(work)
        answered.set()

    with workspaces.lend(1):
        with workspaces.lend(1) as second:
            waiting = threading.Thread(target=request)
            waiting.start()
            assert not answered.wait(0.05)
        assert answered.wait(30)
    waiting.join()

    assert lent == [second]


def test_a_workspace_is_idle_before_a_larger_workspace_takes_its_memory(workspaces):
    with workspaces.lend(1) as small:
        pass

    with workspaces.lend(35):
        assert small.stream.waits == 1


def test_a_batch_of_more_keys_replaces_a_workspace_by_a_larger_workspace(workspaces, made):
    with workspaces.lend(1):
        pass
    with workspaces.lend(35) as large:
        pass
    with workspaces.lend(1) as next_one, workspaces.lend(1) as another:
        pass

    assert large.max_keys == 40
    assert next_one is large
    assert another.max_keys == 40
    assert [work.max_keys for work in made] == [10, 40, 40]


def test_a_workspace_whose_request_failed_is_waited_for_and_lent_again(workspaces, made):
    with pytest.raises(ZeroDivisionError), workspaces.lend(1) as work:
        raise ZeroDivisionError

    assert work.stream.waits == 1
    with workspaces.lend(1) as again:
        assert again is work
    assert len(made) == 1


def test_a_workspace_whose_work_failed_is_waited_for_and_not_lent_again(workspaces):
    with workspaces.lend(1) as broken:
        pass
    broken.stream.is_faulty = True
    with pytest.raises(ZeroDivisionError), workspaces.lend(1):
        raise ZeroDivisionError

    assert broken.stream.waits == 1
    with workspaces.lend(1) as one, workspaces.lend(1) as other:
        assert broken not in (one, other)


def test_a_workspace_that_cannot_be_made_leaves_its_place_free():
    def make(max_keys):
        if failures:
            raise failures.pop()
        return FakeWorkspace(max_keys)

    failures = [MemoryError("no room")]
    workspaces = Workspaces(make, most_workspaces=1, max_keys=1)

    with pytest.raises(MemoryError), workspaces.lend(1):
        pass
    with workspaces.lend(1) as work:
        assert work.max_keys == 1


def test_a_batch_too_large_for_any_workspace_does_not_change_the_size_for_later_batches():
    def make(max_keys):
        if max_keys > 10:
            raise MemoryError("no room")
        return FakeWorkspace(max_keys)

    workspaces = Workspaces(make, most_workspaces=1, max_keys=10)

    with pytest.raises(MemoryError), workspaces.lend(1000):
        pass
    with workspaces.lend(1) as work:
        assert work.max_keys == 10


def test_closing_drops_all_workspaces(workspaces, made):
    with workspaces.lend(1) as work:
        pass
    dropped = weakref.ref(work)
    del work
    made.clear()

    workspaces.close()

    assert dropped() is None
