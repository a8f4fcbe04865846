"""Rows that a slower tier held are copied into the faster ones, beside the lookups, and never a stale one."""

import logging
import threading

import numpy as np
import pytest

from serving.errors import StoreError
from serving.parameter_server import TierSettings, promotion, tier_table
from serving.storage import MemoryStore
from tests.serving.small_server import KEYS, ROWS, DictStore, DurableDictStore, held_by, keep, model_of, serve

WAIT_S = 60
NEW = np.full((1, 3), 7.0, dtype=np.float32)


class GatedStore(DictStore):
    """A store whose inserts wait at a gate, once it is shut."""

    def __init__(self, name="gated"):
        super().__init__(name)
        self.gate, self.arrived, self.inserted = threading.Event(), threading.Event(), []
        self.gate.set()

    def insert(self, table, keys, rows):
        self.arrived.set()
        assert self.gate.wait(WAIT_S)
        self.inserted.append(keys.tolist())
        super().insert(table, keys, rows)

    def shut(self):
        self.gate.clear()
        self.arrived.clear()
        self.inserted.clear()


@pytest.fixture
def gated(config):
    """A server whose fast tier is empty and takes promotions one by one, as its gate lets them."""
    with serve(config, GatedStore(), DictStore("slow"), promote=True) as server:
        keep(server.stores[0], [])
        server.stores[0].shut()
        yield server
        server.stores[0].gate.set()


def counters(server, depth=0):
    return server.counters()["m.t"].tiers[depth]


@pytest.mark.parametrize("promote", [False, True])
def test_found_rows_are_copied_into_faster_tiers_only_when_asked_for(config, promote):
    with serve(config, MemoryStore(), DictStore("middle"), DictStore("slow"), promote=promote) as server:
        for store in server.stores[:2]:
            keep(store, [])

        server.lookup("m.t", np.array([3, 777]))
        assert server.wait_for_promotions(WAIT_S)

        expected = {3: ROWS[2].tolist()} if promote else {}
        assert [held_by(store) for store in server.stores[:2]] == [expected] * 2
        assert [counters(server, depth).promoted_rows for depth in range(3)] == [int(promote)] * 2 + [0]


def test_rows_of_pooled_lookups_are_promoted_and_then_pooled_by_the_fast_tier(config):
    with serve(config, MemoryStore(), DictStore("slow"), promote=True) as server:
        keep(server.stores[0], [1])
        arguments = "m.t", np.array([1, 2, 3]), np.array([0, 3]), "sum"

        first = server.lookup_pooled(*arguments)[0]
        assert server.wait_for_promotions(WAIT_S)
        server.stores[1].calls.clear()
        second = server.lookup_pooled(*arguments)[0]

        assert first.tobytes() == second.tobytes()
        assert server.stores[1].calls["fetch"] == 0


def test_a_default_is_never_stored(config):
    with serve(model_of(config.tables[0].file.parent, 9.0), MemoryStore(), DictStore(), promote=True) as server:
        keep(server.stores[0], [])

        server.lookup_pooled("m.t", np.array([777, 1]), np.array([0, 2]), "sum")
        server.lookup("m.t", np.array([777, -5, 2]))

        assert server.wait_for_promotions(WAIT_S)
        assert held_by(server.stores[0]).keys() == {1, 2}
        assert held_by(server.stores[1]).keys() == set(KEYS)


def test_a_cache_that_outlives_the_process_takes_promoted_rows_only_where_the_last_tier_is_written(config):
    class ReadOnly(DurableDictStore):
        writes = False

    for slow, expected in (ReadOnly("slow"), set()), (DurableDictStore("slow"), {1, 2}):
        memory, shared = MemoryStore(), DurableDictStore("shared")
        with serve(config, memory, shared, slow, promote=True) as server:
            keep(memory, [])
            keep(shared, [])
            server.lookup("m.t", np.array([1, 2]))
            assert server.wait_for_promotions()

            assert held_by(memory).keys() == {1, 2}
            assert held_by(shared).keys() == expected


def test_a_lookup_does_not_wait_for_its_promotion(gated):
    rows, _ = gated.lookup("m.t", np.array([1]))

    assert gated.stores[0].arrived.wait(WAIT_S)
    assert rows.tobytes() == ROWS[:1].tobytes()
    assert not gated.wait_for_promotions(0)


def test_a_key_that_comes_several_times_is_written_once(gated):
    for keys in ([1, 2, 1, 1], [2, 1, 3]):
        gated.lookup("m.t", np.array(keys))
        assert gated.stores[0].arrived.wait(WAIT_S)
    gated.stores[0].gate.set()

    assert gated.wait_for_promotions(WAIT_S)
    assert gated.stores[0].inserted == [[1, 2], [3]]
    assert counters(gated).promoted_rows == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda server: server.insert("m.t", np.array([1]), NEW), {1: [7.0] * 3}, id="updated"),
        pytest.param(lambda server: server.evict("m.t", np.array([1])), {}, id="evicted"),
    ],
)
def test_a_row_that_changed_after_it_was_read_is_not_promoted(config, change, expected):
    class ChangingStore(DictStore):
        """Changes a row just after it was read."""

        def fetch(self, table, keys, out):
            found = super().fetch(table, keys, out)
            if 1 in keys:
                change(server)
            return found

    server = serve(config, DictStore("fast"), ChangingStore("slow"), promote=True)
    with server:
        keep(server.stores[0], [])

        rows, _ = server.lookup("m.t", np.array([1, 2]))

        assert rows.tobytes() == ROWS[:2].tobytes()  # read before the change
        assert server.wait_for_promotions(WAIT_S)
        assert held_by(server.stores[0]) == expected | {2: ROWS[1].tolist()}
        assert counters(server).dropped_promotions == 1
        assert server.lookup("m.t", np.array([1]))[0].tolist() == [expected.get(1, [0.0] * 3)]


def test_an_update_during_a_promotion_comes_after_it(gated):
    gated.lookup("m.t", np.array([1]))
    assert gated.stores[0].arrived.wait(WAIT_S)
    update = threading.Thread(target=gated.insert, args=("m.t", np.array([1]), NEW))
    update.start()
    gated.stores[0].gate.set()
    update.join()

    assert gated.lookup("m.t", np.array([1]))[0].tolist() == NEW.tolist()


def test_rows_of_a_table_that_is_being_written_hold_nothing_up_for_long(config, monkeypatch):
    monkeypatch.setattr(promotion, "LONGEST_WAIT_S", 0.001)
    with serve(config, DictStore("fast"), DictStore("slow"), promote=True) as server:
        keep(server.stores[0], [])
        with server._table("m.t").clock.lock:
            server.lookup("m.t", np.array([1, 1]))
            assert server.wait_for_promotions(WAIT_S)

        assert held_by(server.stores[0]) == {}
        assert counters(server).dropped_promotions == 1
        server.lookup("m.t", np.array([1]))
        assert server.wait_for_promotions(WAIT_S)
        assert held_by(server.stores[0]).keys() == {1}


def test_rows_of_a_model_are_not_promoted_into_the_model_that_replaced_it(config):
    with serve(config, DictStore("fast"), DictStore("slow"), promote=True) as server:
        table = server._table("m.t")
        server.unload_model("m")
        server.load_model(config)
        keep(server.stores[0], KEYS[1:])

        server._promoter.offer(table.caches, np.array([1]), NEW, table.clock.now())
        assert server.wait_for_promotions(WAIT_S)

        assert held_by(server.stores[0]).keys() == set(KEYS[1:])


def test_an_unloading_waits_for_the_running_promotion_and_drops_the_waiting_ones(gated):
    gated.lookup("m.t", np.array([1]))
    assert gated.stores[0].arrived.wait(WAIT_S)
    gated.lookup("m.t", np.array([2]))  # waits behind the first
    unloading = threading.Thread(target=gated.unload_model, args=("m",))
    unloading.start()
    gated.stores[0].gate.set()
    unloading.join()

    assert gated.wait_for_promotions(WAIT_S)
    assert not gated.stores[0].tables


def test_the_oldest_waiting_rows_are_dropped_and_counted_when_the_queue_is_full(gated, monkeypatch):
    monkeypatch.setattr(promotion, "MOST_WAITING_BYTES", 3 * ROWS[0].nbytes)
    gated.lookup("m.t", np.array([1]))
    assert gated.stores[0].arrived.wait(WAIT_S)

    for keys in ([2, 3], [4], [5], [6]):
        gated.lookup("m.t", np.array(keys))
    gated.stores[0].gate.set()

    assert gated.wait_for_promotions(WAIT_S)
    assert gated.stores[0].inserted == [[1], [6], [5], [4]]
    assert counters(gated).dropped_promotions == 2


def test_rows_of_one_lookup_that_are_more_than_may_wait_are_dropped_and_counted(gated, monkeypatch):
    monkeypatch.setattr(promotion, "MOST_WAITING_BYTES", 2 * ROWS[0].nbytes)
    gated.stores[0].gate.set()

    gated.lookup("m.t", np.array([1, 2, 3, 4, 5]))

    assert gated.wait_for_promotions(WAIT_S)
    assert gated.stores[0].inserted == [[1, 2]]
    assert counters(gated).dropped_promotions == 3


def test_promotion_goes_on_while_more_rows_are_offered_and_updated_than_it_has_time_for(config, monkeypatch):
    is_stored = threading.Semaphore(0)
    turns, waiting, promote = threading.Semaphore(0), threading.Semaphore(0), promotion.Promoter._promote_newest

    def promote_in_turn(promoter):
        waiting.release()
        assert turns.acquire(timeout=WAIT_S)
        promote(promoter)
        is_stored.release()

    monkeypatch.setattr(promotion.Promoter, "_promote_newest", promote_in_turn)
    monkeypatch.setattr(promotion, "MOST_WAITING_BYTES", 8 * ROWS[0].nbytes)
    with serve(config, DictStore("fast"), DictStore("slow"), promote=True) as server:
        keep(server.stores[0], [])
        for _ in range(20):
            for key in KEYS[:3]:
                server.lookup("m.t", np.array([key]))
            assert waiting.acquire(timeout=WAIT_S)
            turns.release()  # one of the three that were just offered, or one that was offered before
            assert is_stored.acquire(timeout=WAIT_S)
            server.insert("m.t", np.array(KEYS), ROWS)
            keep(server.stores[0], [])  # as RAM that evicts: each key is offered again
        promoted_rows = counters(server).promoted_rows
        turns.release(100)  # so that it can end

    assert promoted_rows == 20


def test_closing_waits_for_the_running_promotion_and_drops_the_waiting_ones(config):
    with serve(config, GatedStore(), DictStore("slow"), promote=True) as server:
        fast = server.stores[0]
        keep(fast, [])
        fast.shut()
        for key in (1, 2):
            server.lookup("m.t", np.array([key]))
            assert fast.arrived.wait(WAIT_S)
        closing = threading.Thread(target=server.close)
        closing.start()
        while not server._promoter._worker._is_closed:
            pass
        assert fast.calls["close"] == 0
        fast.gate.set()
        closing.join()

    assert fast.inserted == [[1]]
    assert fast.calls["close"] > 0


def test_a_fast_tier_takes_promoted_rows_as_long_as_it_has_room(config):
    memory = MemoryStore(capacity_rows=5)
    settings = {"memory": TierSettings(fills_at_start=False)}
    with serve(config, memory, DictStore("slow"), promote=True, settings=settings) as server:
        memory.tables["m.t"].insert(np.array(KEYS[:3]), ROWS[:3])

        assert server.lookup("m.t", np.array(KEYS))[0].tobytes() == ROWS.tobytes()
        assert server.wait_for_promotions(WAIT_S)
        assert memory.tables["m.t"].count() == 5
        assert (counters(server).promoted_rows, counters(server).dropped_promotions) == (2, 7)
        assert server.lookup("m.t", np.array(KEYS))[0].tobytes() == ROWS.tobytes()
        assert server.wait_for_promotions(WAIT_S)

        assert memory.tables["m.t"].count() == 5
        assert counters(server).dropped_promotions == 14
        assert counters(server).tier == "memory"
        assert counters(server).errors == 0


def test_a_table_that_was_full_is_offered_rows_again_after_a_while(config, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(tier_table, "now_s", lambda: clock[0])
    memory = MemoryStore(capacity_rows=5)
    settings = {"memory": TierSettings(fills_at_start=False)}
    with serve(config, memory, DictStore("slow"), promote=True, settings=settings) as server:
        memory.tables["m.t"].insert(np.array(KEYS[:5]), ROWS[:5])
        promoted = []
        for key, second in ((6, 0.0), (7, tier_table.FULL_PAUSE_S / 2), (8, tier_table.FULL_PAUSE_S)):
            clock[0] = second
            server.lookup("m.t", np.array([key]))
            assert server.wait_for_promotions(WAIT_S)
            memory.tables["m.t"].evict(np.array([1]))
            promoted.append(held_by(memory).keys() - set(KEYS[:5]))

    assert promoted == [set(), set(), {8}]


def test_a_fast_tier_that_takes_no_rows_is_counted_and_the_next_promotions_go_on(config):
    class Refusing(DictStore):
        error = StoreError("fast", "m.t", "no")

        def insert(self, table, keys, rows):
            if 1 in keys and self.calls["insert"]:
                raise self.error
            super().insert(table, keys, rows)

    with serve(config, Refusing("fast"), DictStore("slow"), promote=True) as server:
        keep(server.stores[0], [])

        for error in (server.stores[0].error, ZeroDivisionError()):
            server.stores[0].error = error
            assert server.lookup("m.t", np.array([1]))[1].all()
            assert server.wait_for_promotions(WAIT_S)
        server.lookup("m.t", np.array([2]))
        assert server.wait_for_promotions(WAIT_S)

        assert held_by(server.stores[0]).keys() == {2}
        assert (counters(server).errors, counters(server).dropped_promotions) == (1, 1)


def test_a_tier_that_answers_and_takes_no_rows_is_logged_once_until_it_takes_some(config, caplog):
    class Full(DictStore):
        is_full = False

        def insert(self, table, keys, rows):
            if self.is_full:
                raise StoreError(self.name, table, "out of memory")
            super().insert(table, keys, rows)

    with serve(config, Full("fast"), DictStore("slow"), promote=True) as server, caplog.at_level(logging.WARNING):
        keep(server.stores[0], [])
        for server.stores[0].is_full in (True, True, False, False):
            assert server.lookup("m.t", np.array([1]))[1].all()
            assert server.wait_for_promotions(WAIT_S)

    told = [record.getMessage() for record in caplog.records if record.name == tier_table.logger.name]
    assert [text.partition(":")[0] for text in told] == [
        "tier fast takes no promoted rows, table 'm.t'",
        "tier fast takes promoted rows again, table 'm.t'",
    ]
    assert "out of memory" in told[0]


def test_a_promotion_of_rows_that_are_there_by_now_does_not_tell_that_a_tier_takes_rows_again(config, caplog):
    class Refusing(DictStore):
        refuses, overlooks = False, False

        def insert(self, table, keys, rows):
            if self.refuses and keys.size:
                raise StoreError(self.name, table, "read only")
            super().insert(table, keys, rows)

        def fetch(self, table, keys, out):
            found = super().fetch(table, keys, out) & (not self.overlooks)
            self.overlooks = False
            return found

    with serve(config, Refusing("fast"), DictStore("slow"), promote=True) as server, caplog.at_level(logging.WARNING):
        fast = server.stores[0]
        keep(fast, [2])
        fast.refuses = True
        for key in (1, 2, 1):
            fast.overlooks = True  # the lookup, not the promotion after it
            assert server.lookup("m.t", np.array([key]))[1].all()
            assert server.wait_for_promotions(WAIT_S)

    told = [record.getMessage() for record in caplog.records if record.name == tier_table.logger.name]
    assert told == ["tier fast takes no promoted rows, table 'm.t': read only"]


def test_nothing_is_promoted_into_a_tier_that_did_not_answer(config):
    with serve(config, DictStore("fast"), DictStore("slow"), promote=True) as server:
        server.stores[0].is_down = True
        server.stores[0].calls.clear()

        server.lookup("m.t", np.array([1]))

        assert server.wait_for_promotions(WAIT_S)
        assert server.stores[0].calls["insert"] == 0


def test_a_server_without_promotions_has_nothing_to_wait_for(config):
    with serve(config, DictStore()) as server:
        assert server.wait_for_promotions(0)
