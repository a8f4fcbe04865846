"""The states of a table in a cache, while writes fail and refills come and go in any order."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from serving.parameter_server import ParameterServer, models
from serving.parameter_server.cache_state import CacheState
from tests.serving.small_server import KEYS, DictStore, RefusingMemory, held_by, rows_of

ARROWS = {
    ("LOADING", "SERVING"),
    ("LOADING", "INVALID"),
    ("SERVING", "INVALID"),
    ("INVALID", "REFILLING"),
    ("REFILLING", "SERVING"),
    ("REFILLING", "INVALID"),
    *((state, "DROPPED") for state in ("LOADING", "SERVING", "INVALID", "REFILLING")),
}


def test_the_states_change_as_the_documentation_says():
    arrows = {(state.name, target.name) for state in CacheState for target in CacheState if state.may_become(target)}

    assert arrows == ARROWS
    assert [state.name for state in CacheState if state.takes_writes] == ["SERVING", "REFILLING"]


def test_the_documentation_draws_the_same_arrows():
    text = (Path(__file__).parents[3] / "docs" / "storage.md").read_text(encoding="utf-8")
    diagram = text.partition("stateDiagram-v2")[2].partition("```")[0]
    lines = [line.partition(":")[0].split() for line in diagram.splitlines() if "-->" in line and "[*]" not in line]

    assert {(begin.upper(), end.upper()) for begin, _, end in lines} == ARROWS


class WatchedTruth(DictStore):
    """A source of truth that calls ``before_walk`` once, when its rows are about to be copied."""

    before_walk = None

    def items(self, table, batch_rows=65536):
        if self.before_walk is not None:
            act, self.before_walk = self.before_walk, None
            act()
        return super().items(table, batch_rows)


class CacheMachine(RuleBasedStateMachine):
    """A server of one cache and its truth; refills run only when a rule says so."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    @initialize()
    def begin(self):
        self.cache, self.truth = RefusingMemory(), WatchedTruth("slow")
        self.server = ParameterServer([self.cache, self.truth])
        self.server.load_model(self.config)

    def teardown(self):
        if hasattr(self, "server"):
            self.server.close()

    @property
    def state(self):
        return self.server.counters()["m.t"].tiers[0].state

    @rule(key=st.sampled_from([*KEYS, 777]), value=st.integers(1, 9), refuses=st.booleans())
    def insert(self, key, value, refuses):
        before, self.cache.refuses = self.state, refuses
        self.server.insert("m.t", np.array([key]), np.full((1, 3), value, np.float32))
        self.cache.refuses = False
        assert self.state == ("invalid" if refuses or before == "invalid" else "serving")

    @rule(key=st.sampled_from(KEYS))
    def evict(self, key):
        before = self.state
        self.server.evict("m.t", np.array([key]))
        assert self.state == before

    @rule(missed=st.booleans())
    def refill(self, missed):
        """Refill the cache; it may miss a write that comes while the rows are copied."""
        seen = []

        def write_meanwhile():
            seen.append(self.state)
            self.cache.refuses = missed
            self.server.insert("m.t", np.array([KEYS[0]]), np.full((1, 3), 5, np.float32))
            self.cache.refuses = False

        [cache] = self.server._table("m.t").caches
        if self.state != "invalid":
            return
        self.truth.before_walk = write_meanwhile
        cache.fill()
        assert seen == ["refilling"]
        assert self.state == ("invalid" if missed else "serving")

    @rule()
    def reload(self):
        self.server.unload_model("m")
        self.server.load_model(self.config)
        assert self.state == "serving"

    @invariant()
    def a_serving_cache_has_every_row_and_answers_are_right(self):
        if not hasattr(self, "server"):
            return
        if self.state == "serving":
            assert held_by(self.cache).items() <= {k: v.tolist() for k, v in self.truth.rows["m.t"].items()}.items()
        assert rows_of(self.server) == {key: row.tolist() for key, row in self.truth.rows["m.t"].items()}


def test_a_serving_cache_took_every_write(tmp_path, monkeypatch, config):
    monkeypatch.setattr(models, "LOOK_INTERVAL_S", 3600.0)
    run_state_machine_as_test(
        lambda: CacheMachine(config), settings=settings(deadline=None, max_examples=15, stateful_step_count=12)
    )


def test_a_table_whose_model_is_unloaded_is_dropped(config):
    with ParameterServer([RefusingMemory(), DictStore("slow")]) as server:
        server.load_model(config)
        [cache] = server._table("m.t").caches
        server.unload_model("m")

        assert cache.state is CacheState.DROPPED
        with pytest.raises(ValueError, match=r"memory, table 'm\.t': DROPPED -> SERVING"):
            cache.begin_service()
