"""Whatever tiers a ps.json names, a parameter server answers as a dict would, and not a bit differs between them."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kernels.host import round_rows
from serving.config import read_ps_config
from serving.errors import RequestError, UnknownModelError
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.parameter_server.opening import open_stores, tier_settings
from serving.storage import MemoryStore
from serving.storage.store import LastingStore
from tests.serving.small_server import model_of
from tests.serving.storage.tiers import QUICK_FOLDER, TIERS

TABLE, DIM = "m.t", 3
ROW_DTYPES = ["fp32", "fp16", "bf16", "int8", "uint8"]
# Neighbours in value and in raw bytes, and the ends of the range.
KEYS = {"I32": [0, 1, 2, 255, 256, 257, 65536, 2**31, 2**32 - 1]}
KEYS["I64"] = [*KEYS["I32"], -1, -256, 2**62, 2**63 - 3, -(2**63) + 2]
# One that no binary fraction is, and some whose sums and means can be nothing.
WEIGHTS = [1.0, 0.1, -0.5, 0.5, 0.0]


def row_of(value):
    """Floats that no narrow type keeps as they are, and whose float32 sums depend on the order of addition."""
    return np.array([value / 3, 1000.0 / value, -value * 7.0], dtype=np.float32)


def pooled_by_hand(bags, rows, default, combiner):
    """Add rows one after the other in float32; a bag is a list of keys, each with its weight."""
    out = np.zeros((len(bags), DIM), dtype=np.float32)
    for place, bag in enumerate(bags):
        weights = [np.float32(weight) for _, weight in bag]
        for (key, _), weight in zip(bag, weights, strict=True):
            out[place] += weight * rows.get(key, default)
        divisor = {
            "sum": np.float32(1),
            "mean": sum(weights, np.float32(0)),
            "sqrtn": np.sqrt(sum((weight * weight for weight in weights), np.float32(0))),
        }[combiner]
        out[place] = out[place] / divisor if divisor else 0
    return out


class TiersMachine(RuleBasedStateMachine):
    """Rows inserted and removed, models unloaded and loaded, processes ended and started again, beside a dict."""

    def __init__(self, clauses, wrap=lambda stores: stores):
        super().__init__()
        self.clauses, self.wrap = clauses, wrap
        self.server, self.folder = None, None

    @initialize(data=st.data(), key_type=st.sampled_from(["I64", "I32"]), default=st.sampled_from([0.0, 0.25]))
    def begin(self, data, key_type, default):
        self.keys = st.sampled_from(KEYS[key_type])
        self.row_dtype = data.draw(st.sampled_from(ROW_DTYPES))
        self.promote = data.draw(st.booleans())
        self.default = np.full(DIM, default, dtype=np.float32)
        self.folder = TemporaryDirectory(dir=QUICK_FOLDER)
        folder = Path(self.folder.name)
        self.file = data.draw(st.dictionaries(self.keys, st.integers(1, 99).map(row_of), min_size=1))
        write_sparse_directory(folder / "t", np.array(list(self.file)), np.array(list(self.file.values())))
        self.config = model_of(folder, default, row_dtype=self.row_dtype).model_copy(update={"key_type": key_type})
        document = {"supportlonglong": key_type == "I64", "models": [], **self.clauses}
        if "persistent_db" in document and data.draw(st.booleans()):  # else it keeps float32
            document["persistent_db"] = document["persistent_db"] | {"row_dtype": self.row_dtype}
        (folder / "ps.json").write_text(json.dumps(document))
        self.tiers = read_ps_config(folder / "ps.json")
        self.rows = {}
        self.start()
        self.server.erase_model("m")  # a Redis has what earlier examples left
        self.load()

    def start(self):
        stores = self.wrap(open_stores(self.tiers))
        self.server = ParameterServer(stores, self.promote, tier_settings(self.tiers))
        self.load()

    def load(self):
        self.server.load_model(self.config)
        truth = self.server.stores[-1]
        if not isinstance(truth, LastingStore) or not truth.tables[TABLE].marker().changed:
            self.rows = dict(self.file)

    def teardown(self):
        if self.server is not None:
            self.server.close()
        if self.folder is not None:
            self.folder.cleanup()

    def rounded(self):
        """The dict as a table of the row type gives it back."""
        rounded = {}
        for key, row in self.rows.items():
            rounded[key] = np.empty_like(row)
            round_rows(row[None], self.row_dtype, rounded[key][None])
        return rounded

    @rule(data=st.data())
    def insert(self, data):
        pairs = data.draw(st.lists(st.tuples(self.keys, st.integers(1, 99)), max_size=6))
        rows = np.array([row_of(value) for _, value in pairs], dtype=np.float32).reshape(-1, DIM)
        self.server.insert(TABLE, np.array([key for key, _ in pairs], dtype=np.int64), rows)
        self.rows |= {key: row_of(value) for key, value in pairs}

    @rule(data=st.data())
    def evict(self, data):
        keys = data.draw(st.lists(self.keys, max_size=4))
        self.server.evict(TABLE, np.array(keys, dtype=np.int64))
        for key in keys:
            self.rows.pop(key, None)

    @rule(data=st.data())
    def lookup(self, data):
        keys = data.draw(st.lists(self.keys, max_size=12))

        rows, found = self.server.lookup(TABLE, np.array(keys, dtype=np.int64))

        expected = self.rounded()
        assert found.tolist() == [key in self.rows for key in keys]
        assert rows.tobytes() == b"".join(expected.get(key, self.default).tobytes() for key in keys)

    @rule(data=st.data(), combiner=st.sampled_from(["sum", "mean", "sqrtn"]), weighs=st.booleans())
    def lookup_pooled(self, data, combiner, weighs):
        weight = st.sampled_from(WEIGHTS) if weighs else st.just(1)
        bags = data.draw(st.lists(st.lists(st.tuples(self.keys, weight), max_size=5), max_size=5))
        keys = [key for bag in bags for key, _ in bag]
        weights = np.array([weight for bag in bags for _, weight in bag], np.float32) if weighs else None
        row_ptrs = np.cumsum([0, *map(len, bags)]).astype(data.draw(st.sampled_from([np.int32, np.int64])))

        pooled, found = self.server.lookup_pooled(TABLE, np.array(keys, dtype=np.int64), row_ptrs, combiner, weights)

        assert found.tolist() == [key in self.rows for key in keys]
        assert pooled.tobytes() == pooled_by_hand(bags, self.rounded(), self.default, combiner).tobytes()

    @rule()
    def let_promotions_end(self):
        assert self.server.wait_for_promotions(timeout_s=60)

    @rule(erase=st.booleans())
    def unload_and_load(self, erase):
        forget = self.server.erase_model if erase else self.server.unload_model
        forget("m")
        with pytest.raises(UnknownModelError):
            self.server.lookup(TABLE, np.array([0]))
        self.load()

    @rule()
    def restart(self):
        self.server.close()
        self.start()

    @rule(key=st.sampled_from([2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1]))
    def refuse_a_key_that_no_table_has(self, key):
        for call in (
            lambda: self.server.lookup(TABLE, np.array([key])),
            lambda: self.server.evict(TABLE, np.array([key])),
            lambda: self.server.insert(TABLE, np.array([key]), row_of(1)[None]),
        ):
            with pytest.raises(RequestError, match=r"reserved|uint32"):
                call()

    @rule()
    def every_key_is_as_in_the_dict(self):
        keys = np.array(KEYS[self.config.key_type])
        rows, found = self.server.lookup(TABLE, keys)
        expected = self.rounded()
        assert dict(zip(keys[found].tolist(), rows[found].tolist(), strict=True)) == {
            key: row.tolist() for key, row in expected.items()
        }


# A failing example is shown as it is: to shrink it opens databases for minutes, and it has fifteen steps at the most.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


def run(machine, examples, steps=15):
    run_state_machine_as_test(
        machine,
        settings=settings(deadline=None, max_examples=examples, stateful_step_count=steps, phases=PHASES),
    )


@pytest.mark.parametrize("tiers", TIERS)
def test_tiers_answer_as_a_dict(tiers, request):
    clauses = TIERS[tiers](request)

    # Each step of Redis and of a database takes long; the test of many examples below has all of them.
    run(lambda: TiersMachine(clauses), examples=3 if "redis" in tiers else 4 if "persistent_db" in clauses else 8)


def three_tiers(tiers, request):
    """The tiers of that name, with RAM for a few rows before them."""
    clauses = TIERS[tiers](request)
    return lambda: TiersMachine(clauses, lambda stores: [MemoryStore(capacity_rows=3), *stores])


def test_three_tiers_answer_as_a_dict(request):
    run(three_tiers("redis, rocksdb", request), examples=4)


# Of many examples some meet what takes five events in one order: a model is loaded, a row changed, evicted from RAM,
# promoted, and the process ended. 150 of up to 40 steps are some 4,500 lookups and changes and 600 restarts.
MANY = {"examples": 150, "steps": 40}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tiers", TIERS)
def test_tiers_answer_as_a_dict_over_many_examples(tiers, request):
    clauses = TIERS[tiers](request)

    run(lambda: TiersMachine(clauses), **MANY)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tiers", [name for name in TIERS if name.startswith("redis") and "rocksdb" in name])
def test_three_tiers_answer_as_a_dict_over_many_examples(tiers, request):
    run(three_tiers(tiers, request), **MANY)
