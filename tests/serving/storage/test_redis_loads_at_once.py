"""Processes load one table into the Redis that they share: the same files or others, at once or one after the other."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import TableSpec
from serving.storage.redis.commands import Partition, RedisNodeError
from serving.storage.redis.records import SWAP, unlink
from serving.storage.store import replaced
from tests.serving.small_server import KEYS as SERVED_KEYS
from tests.serving.small_server import NEW, rows_of, serve, write_model
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, fetch, open_store

CHANGED, EVICTED = KEYS[3:4], KEYS[5:6]
PARTITIONS = 16


@pytest.fixture(params=["server", "cluster"])
def redis(request):
    """Empty; has a ``client``, too."""
    return request.getfixturevalue(f"redis_{request.param}")


@pytest.fixture
def opened(redis):
    """Open a store."""
    return lambda **options: open_store(getattr(redis, "nodes", [redis])[0], **options)


def load(store, rows=ROWS, digest="digest", *, spec=SPEC, unless_loaded=True):
    store.bulk_load(spec, iter([(KEYS, rows)]), digest, unless_loaded=unless_loaded)


def change(store):
    store.mark_changed(SPEC.name)
    store.insert(SPEC.name, CHANGED, -ROWS[CHANGED])
    assert store.evict(SPEC.name, EVICTED) == 1


def assert_has_changes(*stores):
    for store in stores:
        rows = np.empty((KEYS.size, 4), dtype=np.float32)
        found = store.fetch(SPEC.name, KEYS, rows)
        assert KEYS[~found].tolist() == EVICTED.tolist()
        assert (rows[CHANGED] == -ROWS[CHANGED]).all()
        assert store.count(SPEC.name) == KEYS.size - 1
        assert store.loaded_from(SPEC.name) == "digest+changed"


def gathered(redis):
    """Names of the rows that loads have gathered, and have not put in the place of others."""
    with redis.client() as client:
        return list(client.scan_iter("*.hotrow.loading.*"))


def before_swap(store, act):
    """Have ``act`` done once the next load of ``store`` has gathered its rows, before it puts them in place."""
    run, acts = store._nodes.run, [act]

    def running(commands):
        if acts and any(SWAP.encode() in command.payload for command in commands):
            acts.pop()()
        return run(commands)

    store._nodes.run = running


class SteppedLoad:
    """A load that waits once it has gathered its rows, and once more when half of the partitions have theirs."""

    def __init__(self, pool, store, rows, digest):
        self._may_go, self._has_come = threading.Semaphore(0), threading.Semaphore(0)
        self._run, store._nodes.run = store._nodes.run, self._running
        self._end = pool.submit(load, store, rows, digest)
        assert self._has_come.acquire(timeout=30)

    def half(self):
        self._may_go.release()
        assert self._has_come.acquire(timeout=30)

    def end(self):
        self._may_go.release(2)
        self._end.result(timeout=30)

    def _running(self, commands):
        if not commands or SWAP.encode() not in commands[0].payload:
            return self._run(commands)
        replies, errors = [], []
        for half in (commands[: PARTITIONS // 2], commands[PARTITIONS // 2 :]):
            self._has_come.release()
            assert self._may_go.acquire(timeout=30)
            try:
                replies += self._run(half)
            except RedisNodeError as err:
                errors.append(err)
        if errors:
            raise errors[0]
        return replies


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize("before", ["nothing", "other files", "part of the rows", "a changed table that has lost some"])
def test_what_changes_after_a_load_outlasts_another_of_the_same_files_that_ends_later(redis, opened, before):
    first, second, third = opened(), opened(), opened()
    if before != "nothing":
        load(first, ROWS + 9, "old" if before == "other files" else "digest")
    if "changed" in before:
        change(first)
    if "part" in before or "lost" in before:
        first._nodes.run([unlink(Partition(SPEC.name, 7))])
    before_swap(second, lambda: (load(first), change(first)))

    load(second, ROWS + 9)
    third.open_table(SPEC, 0)

    assert_has_changes(first, second, third)
    assert gathered(redis) == []


def test_what_changes_between_the_swaps_of_another_load_of_the_same_files_stays(redis, opened, pool):
    first, second = opened(), opened()
    stepped = SteppedLoad(pool, second, ROWS, "digest")
    stepped.half()

    load(first)
    change(first)
    stepped.end()

    assert_has_changes(first, second)
    assert gathered(redis) == []


def test_a_load_of_files_that_were_loaded_and_changed_meanwhile_asks_for_no_row(opened):
    first, second = opened(), opened()
    load(first)
    change(first)

    def rows():
        pytest.fail("asked for rows")
        yield

    second.bulk_load(SPEC, rows(), "digest", unless_loaded=True)

    assert_has_changes(first, second)


@pytest.mark.parametrize("digest", ["digest+changed", replaced("digest")], ids=["changed", "replaced"])
def test_rows_of_a_slower_tier_that_has_changed_replace_those_of_the_files_that_came_meanwhile(redis, opened, digest):
    first, second = opened(), opened()
    before_swap(second, lambda: load(first, ROWS + 9))

    load(second, ROWS, digest)

    for store in (first, second):
        fetch(store)
    assert second.loaded_from(SPEC.name) == digest


def test_who_is_to_replace_a_table_whatever_it_has_does(redis, opened):
    first, second = opened(), opened()
    before_swap(second, lambda: load(first, ROWS + 9, "digest+changed"))

    load(second, ROWS, "digest+changed", unless_loaded=False)

    for store in (first, second):
        fetch(store)
    assert gathered(redis) == []


def test_who_knows_of_changes_that_are_gone_does_not_keep_what_another_brought_meanwhile(redis, opened):
    changed, other = opened(), opened()
    load(changed, ROWS + 9)
    changed.insert(SPEC.name, KEYS, ROWS)
    changed.note_change(SPEC.name, KEYS)
    changed._nodes.run([unlink(Partition(SPEC.name, place)) for place in range(PARTITIONS)])
    before_swap(changed, lambda: load(other, ROWS + 9))

    load(changed)

    for store in (changed, other):
        fetch(store)
    assert gathered(redis) == []


def test_rows_that_were_there_when_a_load_began_are_replaced_whatever_clock_their_load_went_by(redis, opened):
    fast, right = opened(), opened()
    load(fast, ROWS + 9, "old")
    with redis.client() as client:
        for record in (Partition(SPEC.name, place).record for place in range(PARTITIONS)):
            client.set(record, client.get(record).replace(b"old ", b"old ff"))
    before_swap(right, lambda: change(fast))

    load(right, digest="new")

    fetch(right)
    assert right.count(SPEC.name) == KEYS.size


@pytest.mark.parametrize(
    ("digest", "row_dtype"),
    [("new", "fp32"), ("digest", "fp16"), (replaced("digest"), "fp32")],
    ids=["files", "form", "changes"],
)
def test_of_loads_of_other_rows_that_which_began_later_stays_when_it_ends_first(redis, opened, digest, row_dtype):
    earlier, later = opened(), opened(row_dtype=row_dtype)
    spec = TableSpec(SPEC.name, SPEC.dim, row_dtype=row_dtype)
    before_swap(earlier, lambda: load(later, ROWS, digest, spec=spec))

    with pytest.raises(StoreError, match="another process, which began later, has loaded it meanwhile: "):
        load(earlier, ROWS + 9, replaced("digest"))

    fetch(later)
    assert later.loaded_from(SPEC.name) == digest
    assert gathered(redis) == []


def test_of_loads_of_other_rows_that_which_began_later_stays_when_it_ends_last(redis, opened, pool):
    earlier, later = opened(), opened()
    one = SteppedLoad(pool, earlier, ROWS + 9, "old")
    other = SteppedLoad(pool, later, ROWS, "new")

    one.end()
    change(earlier)
    other.end()

    fetch(later)
    assert later.count(SPEC.name) == KEYS.size
    assert gathered(redis) == []


@pytest.mark.parametrize("is_first", ["earlier", "later"])
def test_of_loads_whose_swaps_overlap_none_leaves_a_half(redis, opened, pool, is_first):
    earlier, later = opened(), opened()
    one = SteppedLoad(pool, earlier, ROWS + 9, "old")
    other = SteppedLoad(pool, later, ROWS, "new")
    (one if is_first == "earlier" else other).half()

    if is_first == "earlier":
        other.end()
    with pytest.raises(StoreError, match=r"began later, has loaded it meanwhile: new "):
        one.end()
    if is_first == "later":
        other.end()

    fetch(later)
    assert later.count(SPEC.name) == KEYS.size
    assert gathered(redis) == []


def test_a_load_that_kept_the_rows_of_another_keeps_them_from_a_third_that_began_between(redis, opened, pool):
    first, between, last = opened(), opened(), opened()
    one = SteppedLoad(pool, first, ROWS, "digest")
    two = SteppedLoad(pool, between, ROWS + 9, "old")
    three = SteppedLoad(pool, last, ROWS, "digest")

    one.end()
    change(first)
    three.end()
    with pytest.raises(StoreError, match=r"began later, has loaded it meanwhile: digest\+changed "):
        two.end()

    assert_has_changes(first, last)
    assert gathered(redis) == []


@pytest.mark.parametrize("is_at_once", [True, False], ids=["at once", "one after the other"])
def test_servers_that_load_one_model_keep_what_the_first_has_changed(redis_server, tmp_path, is_at_once):
    config = write_model(tmp_path)
    first, second = open_store(redis_server), open_store(redis_server)

    def serve_and_change():
        server = serve(config, first)
        server.insert("m.t", np.array([3]), NEW)
        server.evict("m.t", np.array([4]))
        return server

    if is_at_once:
        before_swap(second, serve_and_change)
    else:
        serve_and_change()

    rows = rows_of(serve(config, second), SERVED_KEYS)

    assert rows[3] == NEW[0].tolist()
    assert sorted(rows) == [key for key in SERVED_KEYS if key != 4]
