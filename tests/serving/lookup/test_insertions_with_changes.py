"""Rows that are inserted behind answers never outlive a change of them, whenever another thread makes it."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serving.batch import Batch, TableKeys
from tests.serving.lookup.cached import Sketch, cached, served, with_cache, write_model
from tests.serving.small_server import DictStore
from tests.state_machines import run_on

TABLES = (Sketch(4, rows=12, slots=1, default_value=-1.0), Sketch(7, rows=12, slots=1, default_value=-2.0))
KEYS = st.lists(st.integers(0, 45), min_size=1, max_size=12)  # the tables have 0, 3, 6, ... 33
CHANGES = st.lists(st.tuples(st.sampled_from(["insert", "evict"]), st.integers(0, 1), KEYS), max_size=2)


class HookedStore(DictStore):
    """A store that calls ``after_read`` once, when it has read rows."""

    def __init__(self):
        super().__init__()
        self.after_read = None

    def fetch(self, table, keys, out):
        found = super().fetch(table, keys, out)
        hook, self.after_read = self.after_read, None
        if hook is not None:
            hook()
        return found


class RequestsWithChanges(RuleBasedStateMachine):
    """A dict per table has the rows; a request may get the rows before or after the changes that run next to it."""

    device = None
    config = None

    @initialize(
        kind=st.sampled_from(["dynamic", "static", "uvm"]),
        size_ratio=st.sampled_from([0.1, 1.0]),
        fills_at_start=st.booleans(),
        line_keys=st.sampled_from([7, 15]),
    )
    def open(self, **cache):
        config = with_cache(self.config, **cache)
        self.store, self.opened = HookedStore(), ExitStack()
        self.server = self.opened.enter_context(served(config, self.store))
        self.lookup = self.opened.enter_context(cached(self.server, config, self.device))
        self.version = 0
        self.rows = [{key: row.tolist() for key, row in self.store.rows[f"m.t{t}"].items()} for t in range(2)]

    def change(self, changes):
        """Make changes from another thread, and wait for it."""

        def run():
            for kind, t, keys in changes:
                keys = np.unique(keys)
                self.version += 1
                rows = np.full((keys.size, TABLES[t].dim), self.version, dtype=np.float32)
                if kind == "evict":
                    self.server.evict(f"m.t{t}", keys)
                    self.rows[t] = {key: row for key, row in self.rows[t].items() if key not in keys}
                else:
                    self.server.insert(f"m.t{t}", keys, rows)
                    self.rows[t] |= dict(zip(keys.tolist(), rows.tolist(), strict=True))

        writer = threading.Thread(target=run)
        writer.start()
        writer.join()

    @rule(keys=st.tuples(KEYS, KEYS), while_reading=CHANGES, after_answer=CHANGES)
    def request(self, keys, while_reading, after_answer):
        before = [dict(of_table) for of_table in self.rows]
        if while_reading:
            self.store.after_read = lambda: self.change(while_reading)
        with self.lookup.request(batch_of(keys), is_whole=True) as request:
            answers = request.rows()
            self.store.after_read = None
            during = [dict(of_table) for of_table in self.rows]
            self.change(after_answer)
        for t, of_table in enumerate(keys):
            for key, row in zip(of_table, answers[t].reshape(-1, TABLES[t].dim).tolist(), strict=False):
                assert row in [self.answer(held[t], t, key) for held in (before, during)]

    @rule(changes=CHANGES)
    def changes(self, changes):
        self.change(changes)

    @rule()
    def refresh(self):
        self.lookup.refresh()

    @invariant()
    def every_answer_is_what_the_tiers_have(self):
        if not hasattr(self, "rows"):
            return
        keys = list(range(46))
        for begin in range(0, 46, 16):
            part = keys[begin : begin + 16]
            answer = self.lookup.lookup_pooled(batch_of((part, part)))
            unknown = 0
            for t in range(2):
                expected = [self.answer(self.rows[t], t, key) for key in part]
                assert answer.embeddings[t].reshape(-1, TABLES[t].dim).tolist() == expected
                unknown += sum(key not in self.rows[t] for key in part)
            assert answer.defaulted_keys == unknown

    def answer(self, held, t, key):
        return held.get(key, [TABLES[t].default_value] * TABLES[t].dim)

    def teardown(self):
        if hasattr(self, "opened"):
            self.opened.close()


def batch_of(keys):
    """A request of a sample per key; the shorter table has empty bags at its end."""
    samples = max(map(len, keys))
    tables = []
    for of_table in keys:
        row_ptrs = np.minimum(np.arange(samples + 1), len(of_table)).astype(np.int32)
        tables.append(TableKeys(np.array(of_table, dtype=np.int64), row_ptrs))
    return Batch(np.zeros((samples, 0), dtype=np.float32), tuple(tables))


@pytest.mark.slow
def test_no_answer_is_stale_or_a_default_of_a_key_that_a_tier_holds(device, tmp_path):
    run_on(RequestsWithChanges, 5, steps=12, device=device, config=write_model(tmp_path, TABLES))


@pytest.mark.kernels
def test_nor_in_drawn_orders_of_threads(runner, tmp_path):
    with runner.scheduled(seed=5, os_threads=2):
        run_on(RequestsWithChanges, 4, steps=12, device=runner, config=write_model(tmp_path, TABLES))
