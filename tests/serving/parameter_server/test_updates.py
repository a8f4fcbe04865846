"""Rows that change, and models that come and go, while lookups run."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import read_inference_config
from serving.errors import RequestError, StoreError, StoreFullError, StoreUnreachableError, UnknownModelError
from serving.parameter_server import FirstRows, ParameterServer, TierSettings, models, tier_table
from serving.storage import MemoryStore, RocksDbStore
from tests.serving.small_server import (
    KEYS,
    NEW,
    ROWS,
    DictStore,
    DurableDictStore,
    HookedMemory,
    RefusingMemory,
    errors_of,
    held_by,
    keep,
    model_of,
    serve,
    write_model,
)
from tests.tools.redis_servers import wait_until


def looked_up(server, *keys):
    keys = np.array(keys, dtype=np.int64)
    rows, found = server.lookup("m.t", keys)
    pooled = server.lookup_pooled("m.t", keys, np.arange(keys.size + 1), "sum")[0]
    assert pooled.tolist() == (rows + np.float32(0.0)).tolist()
    return {key: row for key, row, is_found in zip(keys.tolist(), rows.tolist(), found, strict=True) if is_found}


class JournalStore(DictStore):
    """A store that notes what is written to it in a journal shared by all."""

    def __init__(self, name, journal):
        super().__init__(name)
        self.journal = journal

    def insert(self, table, keys, rows):
        self.journal.append((self.name, "insert"))
        super().insert(table, keys, rows)

    def evict(self, table, keys):
        self.journal.append((self.name, "evict"))
        super().evict(table, keys)


def test_an_inserted_row_is_in_every_tier_and_an_evicted_one_in_none(server):
    server.insert("m.t", np.array([1, 777]), NEW.repeat(2, axis=0))
    server.evict("m.t", np.array([2, 888]))

    expected = dict(zip(KEYS, ROWS.tolist(), strict=True)) | {1: [7.0, 8.0, 9.0], 777: [7.0, 8.0, 9.0]}
    del expected[2]
    assert [held_by(store) for store in server.stores] == [expected] * 2
    assert looked_up(server, 1, 2, 777, 888) == {1: [7.0, 8.0, 9.0], 777: [7.0, 8.0, 9.0]}


def test_arrays_that_are_parts_of_others_change_every_tier(config):
    keys, rows = np.arange(1, 9)[::2], np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    with serve(config, MemoryStore(), DictStore("slow")) as server:
        server.insert("m.t", keys, rows)
        assert looked_up(server, *keys) == dict(zip(keys.tolist(), rows.tolist(), strict=True))
        pooled, found = server.lookup_pooled("m.t", keys[::2], np.array([0, 2]), "sum")
        assert (found.all(), pooled.tolist()) == (True, [(rows[0] + rows[2]).tolist()])

        server.evict("m.t", keys)
        assert looked_up(server, *keys) == {}


class RefusingStore(DictStore):
    """A store that can be told to take no changes, though it answers."""

    refuses = False

    def insert(self, table, keys, rows):
        self._refuse(table)
        super().insert(table, keys, rows)

    def evict(self, table, keys):
        self._refuse(table)
        super().evict(table, keys)

    def _refuse(self, table):
        if self.refuses:
            raise StoreError(self.name, table, "takes nothing")


def change(server, verb):
    """Insert or evict key 1; returns what a lookup of it must find afterwards."""
    server.insert("m.t", np.array([1]), NEW) if verb == "insert" else server.evict("m.t", np.array([1]))
    return {1: NEW[0].tolist()} if verb == "insert" else {}


@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_change_succeeds_while_a_cache_refuses_it_and_the_cache_is_bypassed(config, verb):
    fast, middle, slow = RefusingStore("fast"), RefusingStore("middle"), DurableDictStore("slow")
    with serve(config, fast, middle, slow) as server:
        middle.refuses = True
        expected = change(server, verb)
        assert held_by(slow).get(1) == held_by(fast).get(1) == expected.get(1)
        assert held_by(middle)[1] == ROWS[0].tolist()

        fast.tables["m.t"].evict(np.array([1]))
        assert looked_up(server, 1) == expected
        middle.refuses = False
        assert looked_up(server, 1, 2) == expected | {2: ROWS[1].tolist()}
        assert errors_of(server)["middle"] > 0
        assert "middle" not in server.counters()["m.t"].hits


class RefusingDurableStore(RefusingStore, DurableDictStore):
    """A store that outlives the process and can be told to take no changes."""


@pytest.fixture
def looks_often(monkeypatch):
    """A server looks often for caches to fill, and soon again after a failure."""
    monkeypatch.setattr(models, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(tier_table, "FIRST_PAUSE_S", 0.02)


def wait_for_refill(server):
    wait_until(lambda: server.counters()["m.t"].tiers[0].refills == 1, "the cache is filled again")


@pytest.mark.usefixtures("looks_often")
def test_it_is_logged_that_rows_which_would_be_rounded_twice_do_not_come_back_into_a_cache(tmp_path, caplog):
    write_model(tmp_path)
    fast, slow = RefusingMemory(), RocksDbStore(tmp_path / "db", num_threads=1, row_dtype="int8")
    with serve(model_of(tmp_path, row_dtype="int8"), fast, slow) as server:
        fast.refuses = True
        change(server, "insert")
        fast.refuses = False
        wait_for_refill(server)
        assert server.lookup("m.t", np.array(KEYS))[1].all()
        assert fast.tables["m.t"].count() == 0

    reason = "in a faster tier its int8 rows would be rounded twice"
    assert f"m.t is served from rocksdb alone: {reason}" in caplog.messages


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("kind", [RefusingMemory, RefusingStore, RefusingDurableStore])
def test_a_cache_that_missed_a_change_is_filled_again_in_the_background(config, kind, caplog):
    fast, slow = kind(), DurableDictStore("slow")
    with serve(config, fast, slow) as server:
        fast.refuses = True
        change(server, "insert")
        wait_until(lambda: server.counters()["m.t"].tiers[0].errors > 2, "the server tries to fill the cache")
        server.insert("m.t", np.array([2, 777]), NEW.repeat(2, axis=0))
        server.evict("m.t", np.array([3]))
        assert looked_up(server, *KEYS, 777) == held_by(slow)
        assert server.counters()["m.t"].tiers[0].refills == 0
        fast.refuses = False
        wait_for_refill(server)

        assert held_by(fast) == held_by(slow)
        before = server.counters()["m.t"].hits["slow"]
        assert looked_up(server, 1, 2, 777) == dict.fromkeys([1, 2, 777], NEW[0].tolist())
        assert server.counters()["m.t"].hits["slow"] == before
    assert [line.rpartition(": ")[0] for line in caplog.messages if line.startswith("tier ")] == [
        f"tier {fast.name} answers with errors, model 'm': takes nothing (table 'm.t')",
        f"tier {fast.name} answers again, model 'm'",
    ]


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (TierSettings(first_rows=FirstRows(cache_rate=0.5)), {1, 2, 3, 4, 5, 6}),
        (TierSettings(first_rows=FirstRows(cache_rate=0.25, hot_keys=Path("hot"))), {12, 9, 1}),
        (TierSettings(fills_at_start=False), set()),
    ],
    ids=["half of it", "hot keys", "nothing"],
)
def test_ram_that_holds_a_part_of_a_table_is_filled_again_as_at_the_start(
    config, tmp_path, monkeypatch, settings, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hot").mkdir()
    np.save(tmp_path / "hot" / "m.t.npy", np.array([12, 555, 9]))
    fast = RefusingMemory()
    with serve(config, fast, DurableDictStore("slow"), settings={"memory": settings}) as server:
        assert held_by(fast).keys() == expected
        fast.refuses = True
        server.insert("m.t", np.array([1]), NEW)
        fast.refuses = False
        wait_for_refill(server)

        assert held_by(fast).keys() == expected
        assert looked_up(server, *KEYS) == held_by(server.stores[1])


@pytest.mark.usefixtures("looks_often")
def test_ram_whose_hot_keys_cannot_be_read_is_filled_again_later_and_holds_up_no_other_table(config, tmp_path, caplog):
    hot = tmp_path / "hot" / "m.t.npy"
    hot.parent.mkdir()
    np.save(hot, np.array([12]))
    fast = RefusingMemory()
    settings = {"memory": TierSettings(first_rows=FirstRows(hot_keys=hot.parent))}
    with serve(config, fast, DurableDictStore("slow"), settings=settings) as server:
        server.load_model(config.model_copy(update={"name": "n"}))
        hot.write_bytes(b"no array")
        fast.refuses = True
        for table in ("m.t", "n.t"):
            server.insert(table, np.array([1]), NEW)
        fast.refuses = False
        wait_until(lambda: server.counters()["n.t"].tiers[0].refills == 1, "the other table is filled again")
        assert looked_up(server, *KEYS) == held_by(server.stores[1])
        assert server.counters()["m.t"].tiers[0].refills == 0
        np.save(hot, np.array([12]))
        wait_for_refill(server)

        assert held_by(fast) == held_by(server.stores[1])
    assert not [line for line in caplog.messages if line.startswith("hotrow-refill")]


@pytest.mark.usefixtures("looks_often")
def test_an_unexpected_error_of_a_refill_is_logged_and_holds_up_no_table(config, caplog):
    class Broken(RefusingMemory):
        is_broken = True

        def on_insert(self, table, keys, rows):
            super().on_insert(table, keys, rows)
            if self.is_broken and table.spec.name == "m.t":
                raise RuntimeError("a fault")

    fast = Broken()
    fast.is_broken = False
    with serve(config, fast, DurableDictStore("slow")) as server:
        server.load_model(config.model_copy(update={"name": "n"}))
        fast.is_broken = fast.refuses = True
        for table in ("m.t", "n.t"):
            server.insert(table, np.array([1]), NEW)
        fast.refuses = False
        wait_until(lambda: server.counters()["n.t"].tiers[0].refills == 1, "the other table is filled again")
        wait_until(lambda: "RuntimeError: a fault" in caplog.text, "the error is logged")
        assert "tier memory cannot be filled, table 'm.t'" in caplog.text
        fast.is_broken = False
        wait_for_refill(server)

        assert server.counters()["m.t"].tiers[0].state == "serving"


@pytest.mark.usefixtures("looks_often")
def test_a_refill_that_ends_with_its_model_is_no_outage(config, caplog):
    is_walked, go_on = threading.Event(), threading.Event()

    class Walked(DurableDictStore):
        def items(self, table, batch_rows=65536):
            for batch in super().items(table, batch_rows):
                is_walked.set()
                assert go_on.wait(60)
                yield batch

    class Away(HookedMemory):
        is_away = False

        def on_insert(self, table, keys, rows):
            if self.is_away:
                raise StoreUnreachableError(self.name, table.spec.name, "is away")
            super().on_insert(table, keys, rows)

    fast = Away()
    with serve(config, fast, Walked("slow")) as server:
        clock = server._table("m.t").clock
        fast.is_away = True
        server.insert("m.t", np.array([1]), NEW)
        fast.is_away = False
        assert is_walked.wait(60)
        caplog.clear()
        unloading = threading.Thread(target=server.unload_model, args=("m",))
        unloading.start()
        wait_until(lambda: clock.is_gone, "the model is being unloaded")
        go_on.set()
        unloading.join(60)

        assert caplog.messages == []


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("kind", [RefusingMemory, RefusingStore, RefusingDurableStore])
def test_changes_while_a_cache_is_filled_again_are_in_the_cache_afterwards(config, kind):
    is_walked, go_on = threading.Event(), threading.Event()

    class Walked(DurableDictStore):
        def items(self, table, batch_rows=65536):
            for number, batch in enumerate(super().items(table, batch_rows)):
                if number == 6:
                    is_walked.set()
                    assert go_on.wait(60)
                yield batch

    fast, slow = kind(), Walked("slow")
    with serve(config, fast, slow) as server:
        fast.refuses = True
        server.insert("m.t", np.array([1]), NEW)
        fast.refuses = False
        assert is_walked.wait(60)
        for value, key in enumerate([*KEYS, 777]):
            if key % 2:
                server.insert("m.t", np.array([key]), np.full((1, 3), value, np.float32))
            else:
                server.evict("m.t", np.array([key]))
            assert looked_up(server, key) == ({key: [value] * 3} if key % 2 else {})
        go_on.set()
        wait_for_refill(server)

        assert held_by(fast) == held_by(slow)
        assert looked_up(server, *KEYS, 777) == held_by(slow)


def test_a_load_that_fails_leaves_no_cache_bypassed(config):
    fast, middle, slow = RefusingStore("fast"), DurableDictStore("middle"), DurableDictStore("slow")
    with serve(config, middle, slow):
        pass
    with serve(config, slow) as server:
        server.insert("m.t", np.array([1]), NEW)  # which the other tiers miss
    kept = {"middle": TierSettings(fills_at_start=False)}
    fast.refuses = True
    with ParameterServer([fast, middle, slow], settings=kept) as server:
        with pytest.raises(StoreError, match="takes nothing"):
            server.load_model(config)
        fast.refuses = False
        middle.insert("m.t", np.array([1]), NEW)
        slow.write_flags("m.t", current_caches=("middle",))
        server.load_model(config)
        keep(fast, [])

        assert looked_up(server, *KEYS) == held_by(slow)
        assert server.counters()["m.t"].hits.keys() == {"middle"}


@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_change_that_the_last_tier_refuses_fails_and_reaches_no_cache(config, verb):
    fast, slow = DictStore("fast"), RefusingStore("slow")
    with serve(config, fast, slow) as server:
        slow.refuses = True
        with pytest.raises(StoreError, match=r"slow: table 'm\.t': takes nothing"):
            change(server, verb)

        assert held_by(fast) == held_by(slow) == dict(zip(KEYS, ROWS.tolist(), strict=True))


@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_lasting_cache_that_missed_a_change_is_filled_again_at_the_next_load(config, verb):
    fast, slow = RefusingDurableStore("fast"), DurableDictStore("slow")
    with serve(config, fast, slow) as server:
        fast.refuses = True
        expected = change(server, verb)
        assert slow.marker("m.t").current_caches == ()
        fast.refuses = False
        server.unload_model("m")
        assert slow.marker("m.t").current_caches == ()
        server.load_model(config)

        assert held_by(fast) == held_by(slow)
        assert looked_up(server, 1) == expected
        assert "slow" not in server.counters()["m.t"].hits


def test_a_lasting_cache_that_took_every_change_is_not_filled_again(config):
    fast, slow = RefusingDurableStore("fast"), DurableDictStore("slow")
    with serve(config, fast, slow) as server:
        change(server, "insert")
        server.unload_model("m")
        assert slow.marker("m.t").current_caches == ("fast",)
        fast.refuses = True  # a load would insert
        server.load_model(config)

        assert looked_up(server, 1) == {1: NEW[0].tolist()}


@pytest.mark.usefixtures("looks_often")
def test_the_last_tier_takes_rows_of_a_cache_except_keys_that_were_removed_since_the_load(config):
    class Late(DurableDictStore):
        """A cache that cannot be reached when the model is loaded."""

        def marker(self, table):
            raise StoreUnreachableError(self.name, table, "down")

    memory, slow = RefusingMemory(), DurableDictStore("slow")
    with serve(config, memory, Late("fast"), slow) as server:
        truth = server._table("m.t").truth
        server.evict("m.t", np.array([1]))
        memory.refuses = True
        server.insert("m.t", np.array([2]), ROWS[1:2])
        memory.refuses = False
        wait_for_refill(server)  # of RAM: the other cache still waits

        assert truth.insert_absent(np.array([1, 2, 777]), NEW.repeat(3, axis=0)) == 1

        expected = dict(zip(KEYS, ROWS.tolist(), strict=True)) | {777: NEW[0].tolist()}
        del expected[1]
        assert held_by(slow) == expected
        assert slow.tables["m.t"].marker().changed


def test_a_cache_that_keeps_what_it_has_is_bypassed_where_it_may_have_missed_a_change(config):
    fast, slow = RefusingDurableStore("fast"), DurableDictStore("slow")
    with serve(config, fast, slow, settings={"fast": TierSettings(fills_at_start=False)}) as server:
        fast.rows["m.t"] = {1: ROWS[0]}
        fast.refuses = True
        change(server, "insert")
        server.unload_model("m")
        fast.refuses = False
        server.load_model(config)

        assert looked_up(server, 1) == {1: NEW[0].tolist()}


@settings(deadline=None, max_examples=30)
@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["insert", "evict", "fast", "middle"]),
            st.lists(st.sampled_from([*KEYS[:4], 777]), max_size=3),
            st.integers(0, 9),
        ),
        max_size=20,
    )
)
def test_lookups_agree_with_the_last_tier_whichever_cache_refuses_changes(config, operations):
    tiers = {"fast": RefusingStore("fast"), "middle": RefusingStore("middle"), "slow": DurableDictStore("slow")}
    with serve(config, *tiers.values()) as server:
        for verb, keys, value in operations:
            keys = np.array(keys, dtype=np.int64)
            if verb in tiers:
                tiers[verb].refuses = not tiers[verb].refuses
            else:
                if verb == "insert":
                    server.insert("m.t", keys, np.full((keys.size, 3), value, dtype=np.float32))
                else:
                    server.evict("m.t", keys)
            assert looked_up(server, *KEYS, 777) == held_by(tiers["slow"])


def test_the_last_tier_is_written_first(config):
    journal = []
    with serve(config, *(JournalStore(name, journal) for name in ("fast", "middle", "slow"))) as server:
        journal.clear()

        server.insert("m.t", np.array([1]), NEW)
        server.evict("m.t", np.array([1]))

    assert journal == [(name, verb) for verb in ("insert", "evict") for name in ("slow", "middle", "fast")]


POLICIES = [None, "evict_random", "evict_least_used", "evict_oldest"]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "evict", "look up"]),
        st.lists(st.sampled_from([*KEYS, 777, 888]), max_size=5),
        st.integers(0, 9),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=30)
@given(operations=OPERATIONS, capacity_rows=st.sampled_from([1, 4, 12, 14]), policy=st.sampled_from(POLICIES))
def test_lookups_agree_with_a_dict_whatever_is_changed_promoted_or_evicted(config, operations, capacity_rows, policy):
    expected = dict(zip(KEYS, ROWS.tolist(), strict=True))
    memory = MemoryStore(capacity_rows=capacity_rows, overflow_policy=policy)
    stores = memory, DictStore("middle"), DictStore("slow")
    empty = TierSettings(fills_at_start=False)
    with serve(config, *stores, promote=True, settings={"memory": empty}) as server:
        keep(stores[1], KEYS[::2])
        for verb, keys, value in operations:
            if verb == "insert":
                rows = np.full((len(keys), 3), value, dtype=np.float32)
                server.insert("m.t", np.array(keys, dtype=np.int64), rows)
                expected |= dict.fromkeys(keys, [float(value)] * 3)
            elif verb == "evict":
                server.evict("m.t", np.array(keys, dtype=np.int64))
                expected = {key: row for key, row in expected.items() if key not in keys}
            else:
                wanted = {key: expected[key] for key in keys if key in expected}
                assert looked_up(server, *keys) == wanted
        assert looked_up(server, *KEYS, 777, 888) == expected
        assert server.wait_for_promotions(60)
        assert held_by(stores[2]) == expected
        assert memory.tables["m.t"].count() <= capacity_rows
        for store in stores[:2]:
            assert held_by(store).items() <= expected.items()


def test_a_fast_tier_without_room_keeps_no_old_row(config):
    memory = MemoryStore(capacity_rows=4)
    with serve(config, memory, DictStore("slow"), settings={"memory": TierSettings(fills_at_start=False)}) as server:
        memory.tables["m.t"].insert(np.array(KEYS[:4]), ROWS[:4])

        server.insert("m.t", np.array([4, 100, 101, 1]), NEW.repeat(4, axis=0))

        assert held_by(memory).keys() == set(KEYS[:4])
        assert looked_up(server, 1, 4, 100) == dict.fromkeys([1, 4, 100], NEW[0].tolist())
        assert looked_up(server, 2) == {2: ROWS[1].tolist()}


def test_a_full_cache_that_cannot_overwrite_evicts_the_row(config):
    class Frozen(DictStore):
        def insert(self, table, keys, rows):
            if self.calls["insert"]:
                raise StoreFullError(self.name, table, "full")
            super().insert(table, keys, rows)

    with serve(config, Frozen("fast"), DictStore("slow")) as server:
        server.insert("m.t", np.array([1]), NEW)

        assert held_by(server.stores[0]).keys() == set(KEYS[1:])
        assert looked_up(server, 1) == {1: NEW[0].tolist()}


def test_where_the_last_tier_takes_no_rows_no_tier_has_them(config):
    class Refusing(DictStore):
        error = None

        def insert(self, table, keys, rows):
            if self.error:
                raise self.error
            super().insert(table, keys, rows)

    with serve(config, MemoryStore(), Refusing("slow")) as server:
        for error in (StoreFullError("slow", "m.t", "full"), StoreError("slow", "m.t", "no answer")):
            server.stores[1].error = error
            with pytest.raises(type(error), match=error.reason):
                server.insert("m.t", np.array([1]), NEW)

        assert looked_up(server, 1) == {1: ROWS[0].tolist()}


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        (np.array([1, 2]), NEW, r"expected rows of float32\[2, 3\], got float32\[1, 3\]"),
        (np.array([1]), NEW[:, :2], r"expected rows of float32\[1, 3\], got float32\[1, 2\]"),
        (np.array([1]), NEW.astype(np.float64), r"expected rows of float32\[1, 3\], got float64\[1, 3\]"),
        (np.array([[1]]), NEW, r"expected keys of int64\[N\], got int64\[1, 1\]"),
        (np.array([1], dtype=np.int32), NEW, r"expected keys of int64\[N\], got int32\[1\]"),
        ([1], NEW, r"expected keys of int64\[N\], got a list"),
        (np.array([1]), NEW.tolist(), r"expected rows of float32\[1, 3\], got a list"),
        (np.array([2**63 - 1]), NEW, "key 9223372036854775807 at position 0 is reserved"),
        *[
            (np.array([1, 2]), np.float32([NEW[0], row]), r"'m\.t': the row of key 2 has values that are NaN")
            for row in ([0, np.nan, 0], [0, 0, np.inf], [-np.inf, 0, np.inf])
        ],
    ],
)
def test_an_invalid_update_is_refused_before_a_tier_is_written(server, keys, rows, message):
    with pytest.raises(RequestError, match=message):
        server.insert("m.t", keys, rows)
    if "keys" in message or "reserved" in message:
        with pytest.raises(RequestError, match=message):
            server.evict("m.t", keys)

    assert [held_by(store) for store in server.stores] == [dict(zip(KEYS, ROWS.tolist(), strict=True))] * 2


@pytest.mark.parametrize("key", [-1, 2**32])
def test_a_key_beyond_those_of_a_uint32_model_is_refused(config, key):
    with serve(config.model_copy(update={"key_type": "I32"}), MemoryStore()) as server:
        for change in (
            lambda: server.insert("m.t", np.array([key]), NEW),
            lambda: server.evict("m.t", np.array([key])),
        ):
            with pytest.raises(RequestError, match=f"key {key} at position 0 is not 0 to 4294967295"):
                change()
        server.insert("m.t", np.array([2**32 - 1]), NEW)

        assert looked_up(server, 2**32 - 1) == {2**32 - 1: NEW[0].tolist()}


def test_a_row_that_the_row_type_cannot_hold_is_refused_before_a_tier_is_written(config):
    narrow = model_of(config.tables[0].file.parent, row_dtype="bf16")
    with serve(narrow, MemoryStore(), DictStore("slow")) as server:
        with pytest.raises(StoreError, match=r"of key 1: column 1 is 3\.39999995e\+38, which bf16 rows cannot hold"):
            server.insert("m.t", np.array([1]), np.array([[0, 3.4e38, 0]], dtype=np.float32))

        assert held_by(server.stores[1])[1] == ROWS[0].tolist()


@pytest.mark.parametrize("row_dtype", ["bf16", "int8", "uint8"])
def test_a_row_that_is_not_finite_is_refused_alike_whatever_the_row_type_holds(config, row_dtype):
    narrow = model_of(config.tables[0].file.parent, row_dtype=row_dtype)
    with serve(narrow, MemoryStore()) as server, pytest.raises(RequestError, match="the row of key 1 has values"):
        server.insert("m.t", np.array([1]), np.array([[0, np.inf, 0]], dtype=np.float32))


def test_the_largest_floats_are_rows_like_others(server):
    largest = np.full((1, 3), np.finfo(np.float32).max)

    server.insert("m.t", np.array([1]), largest)

    assert looked_up(server, 1) == {1: largest[0].tolist()}


def test_a_table_that_is_not_loaded_cannot_be_changed(server):
    for change in (lambda: server.insert("m.u", np.array([1]), NEW), lambda: server.evict("m.u", np.array([1]))):
        with pytest.raises(UnknownModelError, match=r"no loaded model has a table 'm\.u'; did you mean 'm\.t'\?"):
            change()


def test_an_update_during_the_unloading_fails(config):
    class Unloading(DictStore):
        def evict(self, table, keys):
            unloading.start()
            super().evict(table, keys)

    with serve(config, Unloading()) as server:
        unloading = threading.Thread(target=server.unload_model, args=("m",))
        table = server._table("m.t")
        server.evict("m.t", np.array([1]))
        unloading.join()
        server._table = lambda name: table  # taken just before the unloading

        with pytest.raises(UnknownModelError, match=r"'m\.t' was unloaded"):
            server.insert("m.t", np.array([1]), NEW)


@pytest.mark.parametrize("policy", [None, "evict_random"])
def test_a_reader_meets_no_row_older_than_one_it_has_seen_acknowledged(config, tmp_path, policy):
    """A writer counts a row up through every tier; RAM has room for a third, so that rows are promoted all the time."""
    memory = MemoryStore(capacity_rows=4, overflow_policy=policy)
    durable = RocksDbStore(tmp_path / "db", num_threads=1)
    acknowledged, failures = [0], []

    def read():
        while acknowledged[0] < 60:
            least = acknowledged[0]
            rows, found = server.lookup("m.t", np.array([3, 9]))
            if not found.all() or rows.min() < least or len(set(rows[0].tolist())) > 1:
                failures.append((least, rows.tolist()))
                return

    with serve(config, memory, durable, promote=True) as server:
        keys = np.array([3, 9])
        server.insert("m.t", keys, np.zeros((2, 3), np.float32))
        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for count in range(1, 61):
            memory.tables["m.t"].evict(keys)  # so that RocksDB is asked, and its rows promoted
            server.insert("m.t", keys, np.full((2, 3), count, np.float32))
            acknowledged[0] = count
        for reader in readers:
            reader.join()

    assert failures == []


@pytest.mark.slow
def test_models_come_and_go_while_lookups_run_and_no_answer_is_of_another_model(write_model, tmp_path):
    written = {
        name: write_model(write_model.table(rows=40), write_model.table(dim=6, rows=30), folder=name, seed=seed)
        for seed, name in enumerate(["a", "b", "c"])
    }
    configs = {name: read_inference_config(version.config_file, name) for name, version in written.items()}
    stores = MemoryStore(capacity_rows=100), RocksDbStore(tmp_path / "db", num_threads=1)
    failures, answered, stop = [], {name: 0 for name in written}, threading.Event()

    def read(name):
        tables = [(f"{name}.table{n}", np.array(list(rows)), rows) for n, rows in enumerate(written[name].tables)]
        while not stop.is_set():
            for table, keys, rows in tables:
                try:
                    answer, found = server.lookup(table, keys)
                except UnknownModelError:
                    continue
                if not found.all() or answer.tobytes() != b"".join(row.tobytes() for row in rows.values()):
                    failures.append(table)
                answered[name] += 1

    with serve(configs["a"], *stores, promote=True) as server:
        threads = [threading.Thread(target=read, args=(name,)) for name in written]
        for thread in threads:
            thread.start()
        for turn in range(3):
            server.load_model(configs["b"])
            server.load_model(configs["c"])
            (server.erase_model if turn % 2 else server.unload_model)("b")
            (server.unload_model if turn % 2 else server.erase_model)("c")
        stop.set()
        for thread in threads:
            thread.join()
        assert [config.name for config in server.models()] == ["a"]
        assert not any(f"{name}.table0" in stores[0].tables for name in "bc")

    assert failures == []
    assert min(answered["a"], answered["b"] + answered["c"]) > 0


@pytest.fixture
def two_models(config, tmp_path):
    """Two models of one table each, in RAM in front of RocksDB."""
    stores = HookedMemory(), RocksDbStore(tmp_path / "db", num_threads=1, max_batch_size=100)
    with serve(config, *stores) as server:
        server.load_model(config.model_copy(update={"name": "n"}))
        yield server


def test_one_call_changes_rows_of_several_tables_in_its_order(two_models):
    new = NEW + 1

    two_models.write(
        [
            ("m.t", np.array([1]), NEW),
            ("n.t", np.array([2]), None),
            ("n.t", np.array([3]), NEW),
            ("n.t", np.array([3]), new),
            ("m.t", np.array([4]), None),
        ]
    )

    rows, found = two_models.lookup("m.t", np.array([1, 4]))
    assert (rows[0].tolist(), found.tolist()) == (NEW[0].tolist(), [True, False])
    rows, found = two_models.lookup("n.t", np.array([2, 3]))
    assert (rows[1].tolist(), found.tolist()) == (new[0].tolist(), [False, True])
    two_models.write([])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (("n.unknown", np.array([1]), NEW), UnknownModelError),
        (("n.t", np.array([2**63 - 1]), NEW), RequestError),
        (("n.t", np.array([1]), NEW.astype(np.float64)), RequestError),
        (("n.t", np.array([1.0]), None), RequestError),
    ],
    ids=["unknown table", "reserved key", "other type of rows", "other type of keys"],
)
def test_a_change_that_is_refused_stops_the_others_of_its_call(two_models, bad, error):
    with pytest.raises(error):
        two_models.write([("m.t", np.array([1]), NEW), bad])

    assert looked_up(two_models, 1) == {1: ROWS[0].tolist()}
