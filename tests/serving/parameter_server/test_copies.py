"""Rows that somebody keeps outside the tiers: none may stay behind what the tiers have."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import StoreError, UnknownModelError
from serving.parameter_server.copies import Copies as ServerCopies
from serving.storage import MemoryStore
from tests.serving.lookup.cached import Sketch
from tests.serving.lookup.cached import write_model as model_of_tables
from tests.serving.small_server import (
    KEYS,
    NEW,
    ROWS,
    UNKNOWN,
    DictStore,
    DurableDictStore,
    errors_of,
    keep,
    model_of,
    serve,
    write_model,
)


class Copies(dict):
    """What is kept: {key: row}, dropped when a key changes."""

    def __init__(self, server):
        super().__init__()
        self.changed = []
        self.table = server.copies("m.t", self.on_change)

    def on_change(self, keys):
        self.changed.append(keys.tolist())
        for key in keys.tolist():
            self.pop(key, None)

    def read(self, *keys):
        return self.table.read([np.array(keys)])

    def store(self, read):
        (keys,), (rows,) = read.keys, read.rows
        with self.table.storing([read]) as unchanged:
            storable = unchanged & read.found
            for key, row in zip(keys[storable].tolist(), rows[storable].tolist(), strict=True):
                self[key] = row


def test_rows_are_read_as_the_tiers_have_them(server):
    read = Copies(server).read(*KEYS, *UNKNOWN)

    assert read.rows[0].tolist() == [*ROWS.tolist(), [0.0] * 3, [0.0] * 3]
    assert read.found.tolist() == [True] * len(KEYS) + [False] * len(UNKNOWN)


def test_only_rows_that_were_found_may_be_kept(server):
    copies = Copies(server)

    copies.store(copies.read(3, *UNKNOWN))

    assert copies == {3: ROWS[2].tolist()}


@pytest.mark.parametrize("change", ["insert", "evict"])
def test_a_copy_is_gone_before_a_change_is_acknowledged(server, change):
    copies = Copies(server)
    copies.store(copies.read(3, 4))

    server.insert("m.t", np.array([3]), NEW) if change == "insert" else server.evict("m.t", np.array([3]))

    assert copies == {4: ROWS[3].tolist()}
    assert copies.changed == [[3]]


@pytest.mark.parametrize("change", ["insert", "evict"])
def test_a_row_that_changed_after_it_was_read_is_not_kept(server, change):
    copies = Copies(server)
    read = copies.read(3, 4)

    server.insert("m.t", np.array([3]), NEW) if change == "insert" else server.evict("m.t", np.array([3]))
    copies.store(read)

    assert copies == {4: ROWS[3].tolist()}


def test_a_row_that_changes_while_it_is_read_is_not_kept(config):
    class ChangingStore(DictStore):
        def fetch(self, table, keys, out):
            found = super().fetch(table, keys, out)
            server.insert(table, np.array([3]), NEW)
            return found

    with serve(config, ChangingStore()) as server:
        copies = Copies(server)
        copies.store(copies.read(3, 4))

    assert copies == {4: ROWS[3].tolist()}


def test_every_holder_is_notified_even_if_another_fails(server):
    def fail(keys):
        raise StoreError("gpu", "m.t", "broken")

    first, _, last = Copies(server), server.copies("m.t", fail), Copies(server)

    with pytest.raises(StoreError, match="broken"):
        server.evict("m.t", np.array([5]))

    assert first.changed == last.changed == [[5]]


def test_a_change_that_a_tier_did_not_take_is_reported_too(server, monkeypatch):
    def refuse(table, keys, rows):
        raise StoreError("slow", table, "no answer")

    copies = Copies(server)
    monkeypatch.setattr(server.stores[1], "insert", refuse)

    with pytest.raises(StoreError, match="no answer"):
        server.insert("m.t", np.array([3]), NEW)

    assert copies.changed == [[3]]


class Watched(DictStore):
    """A store that calls ``pause`` before it takes rows, and after."""

    def pause(self):
        pass

    def insert(self, table, keys, rows):
        self.pause()
        super().insert(table, keys, rows)
        self.pause()


def test_rows_are_kept_while_others_are_being_written(config):
    slow = Watched("slow")
    with serve(config, DictStore(), slow) as server:
        copies = Copies(server)
        slow.pause = lambda: copies.store(copies.read(3, 4))
        server.insert("m.t", np.array([5]), NEW)

    assert copies == {3: ROWS[2].tolist(), 4: ROWS[3].tolist()}


def test_rows_are_kept_while_a_holder_is_notified_of_other_keys(server):
    def keep_meanwhile(keys):
        keeper.start()
        keeper.join(60)

    copies = Copies(server)
    keeper = threading.Thread(target=lambda: copies.store(copies.read(3)), daemon=True)
    server.copies("m.t", keep_meanwhile)

    server.insert("m.t", np.array([5]), NEW)

    assert not keeper.is_alive()
    assert copies == {3: ROWS[2].tolist()}


FEW_KEYS = st.lists(st.integers(1, 4), min_size=1, unique=True)
ACTS = st.lists(st.tuples(st.just("read"), FEW_KEYS) | st.tuples(st.just("store"), st.integers(0, 3)), max_size=3)
CHANGES = st.tuples(st.sampled_from(["insert", "evict"]), FEW_KEYS)


@settings(deadline=None)
@given(changes=st.lists(CHANGES, min_size=1, max_size=4), acts=st.lists(ACTS, max_size=20))
def test_no_copy_is_older_than_the_last_acknowledged_change(config, changes, acts):
    fast, slow = Watched("fast"), Watched("slow")
    rows = dict(zip(KEYS, ROWS.tolist(), strict=True))
    reads, acts = [], iter(acts)

    def act():
        for what, how in next(acts, []):
            if what == "read":
                reads.append(copies.read(*how))
            elif reads:
                copies.store(reads[how % len(reads)])

    with serve(config, fast, slow) as server:
        copies = Copies(server)
        fast.pause = slow.pause = act
        for number, (what, keys) in enumerate(changes):
            act()
            new = np.full((len(keys), 3), number, dtype=np.float32)
            if what == "insert":
                server.insert("m.t", np.array(keys), new)
                rows |= dict(zip(keys, new.tolist(), strict=True))
            else:
                server.evict("m.t", np.array(keys))
                rows = {key: row for key, row in rows.items() if key not in keys}
            act()
            assert copies.items() <= rows.items()


def test_alongside_a_writer_at_full_speed_rows_are_kept_and_none_is_old(server):
    copies, ends, faults = Copies(server), threading.Event(), []

    def keep_all():
        while not ends.is_set():
            copies.store(copies.read(*KEYS))

    keepers = [threading.Thread(target=keep_all) for _ in range(2)]
    for keeper in keepers:
        keeper.start()
    for number in range(100_000):
        server.insert("m.t", np.array([3]), np.full((1, 3), number, dtype=np.float32))
        if copies.get(3, [number] * 3) != [number] * 3:
            faults.append((number, copies.get(3)))
        if number > 300 and len(copies) >= len(KEYS) - 1:
            break
    ends.set()
    for keeper in keepers:
        keeper.join()

    assert not faults
    assert copies.keys() >= {*KEYS} - {3}


def test_a_closed_holder_is_not_notified(server):
    copies = Copies(server)

    copies.table.close()
    copies.table.close()
    server.evict("m.t", np.array([3]))

    assert copies.changed == []


def test_starting_and_ending_to_keep_copies_does_not_wait_for_a_writer(server):
    def begin_and_end():
        Copies(server).table.close()

    keeper = threading.Thread(target=begin_and_end, daemon=True)
    with server._table("m.t").clock.lock:
        keeper.start()
        keeper.join(60)

    assert not keeper.is_alive()


def test_copies_of_an_unloaded_table_are_neither_read_nor_kept(server, config):
    copies = Copies(server)
    read = copies.table.read([np.array([3])])

    server.unload_model("m")
    server.load_model(config)
    copies.store(read)

    assert copies == {}
    with pytest.raises(UnknownModelError, match=r"'m\.t' was unloaded"):
        copies.table.read([np.array([3])])


@pytest.fixture
def two_tables(tmp_path):
    """A server of a model with two tables, in a fast tier with some of the rows and a slow tier with all of them."""
    config = model_of_tables(tmp_path, [Sketch(3), Sketch(5, default_value=0.5)])
    with serve(config, MemoryStore(capacity_rows=70), DurableDictStore()) as server:
        yield server


def all_copies(server):
    tables = [server.copies(name, lambda keys: None) for name in ("m.t0", "m.t1")]
    return ServerCopies([table for holder in tables for table in holder.tables]), tables


@pytest.mark.parametrize("keys", [([0, 3], [6]), ([], [3, 9]), ([], []), ([1], [0]), ([177, 0, 1], [6, 2, 177])])
def test_one_read_of_all_tables_is_a_read_of_each(two_tables, keys):
    copies, tables = all_copies(two_tables)
    keys = [np.array(of_table, dtype=np.int64) for of_table in keys]
    each = [table.read([of_table]) for table, of_table in zip(tables, keys, strict=True)]
    counted = two_tables.counters()

    read = copies.read(keys)

    assert [rows.tobytes() for rows in read.rows] == [of_table.rows[0].tobytes() for of_table in each]
    assert read.found.tolist() == np.concatenate([of_table.found for of_table in each]).tolist()
    for (name, after), before, of_table in zip(two_tables.counters().items(), counted.values(), keys, strict=True):
        assert after.hits == {tier: 2 * hits for tier, hits in before.hits.items()}, name
        assert after.tiers[0].asked_keys == 2 * of_table.size
        assert (after.keys, after.defaulted_keys) == (0, 0)  # the holder of the copies counts requests


def test_rows_of_tables_that_change_are_left_out_and_others_are_stored(two_tables):
    copies, _ = all_copies(two_tables)
    keys = [np.array([0, 3]), np.array([0, 3, 6])]
    reads = [copies.read(keys)]
    with copies.storing(reads) as unchanged:
        assert unchanged.tolist() == [True] * 5

    two_tables.evict("m.t1", np.array([3]))
    reads.append(copies.read(keys))

    with copies.storing(reads) as unchanged:
        assert unchanged.tolist() == [True] * 2 + [True, False, True] + [True] * 5
    two_tables.unload_model("m")
    with copies.storing(reads) as unchanged:
        assert not unchanged.any()
    with pytest.raises(UnknownModelError, match=r"'m\.t0' was unloaded"):
        copies.read(keys)


def test_one_read_of_all_tables_survives_an_outage_of_the_first_tier(tmp_path):
    config = model_of_tables(tmp_path, [Sketch(3), Sketch(5)])
    first = DictStore("first")
    with serve(config, first, DurableDictStore()) as server:
        copies, _ = all_copies(server)
        keys = [np.array([0, 3]), np.array([6])]
        expected = copies.read(keys)
        first.is_down = True

        read = copies.read(keys)

        assert [rows.tobytes() for rows in read.rows] == [rows.tobytes() for rows in expected.rows]
        assert read.found.all()
        assert all(errors_of(server, name) == {"first": 1} for name in server.counters())


def test_there_are_no_copies_of_a_table_that_nobody_has(server):
    with pytest.raises(UnknownModelError, match="no loaded model has a table"):
        server.copies("m.x", lambda keys: None)


def test_a_request_is_counted_and_promoted_and_a_refresh_is_not(server):
    copies = Copies(server)
    keep(server.stores[0], [])

    copies.table.read([np.array([3])], is_request=False)
    assert server.wait_for_promotions(30)
    assert server.counters()["m.t"].hits == {}
    assert server.stores[0].tables["m.t"].count() == 0

    copies.table.read([np.array([3])])
    assert server.wait_for_promotions(30)
    assert server.counters()["m.t"].hits == {"slow": 1}
    assert server.stores[0].tables["m.t"].count() == 1


def test_an_outage_is_reported(config):
    with serve(config, DictStore()) as server:
        copies = Copies(server)
        server.stores[0].is_down = True

        with pytest.raises(StoreError, match="no answer"):
            copies.table.read([np.array([3])], is_request=False)


def test_unknown_rows_have_the_tables_default_value(tmp_path):
    write_model(tmp_path)
    with serve(model_of(tmp_path, default_value=0.5), MemoryStore()) as server:
        read = Copies(server).table.read([np.array([777])], is_request=False)

    assert read.rows[0].tolist() == [[0.5] * 3]
