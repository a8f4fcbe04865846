import logging
import threading
import time
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import round_rows
from serving.errors import RequestError, StoreError, StoreTimeoutError, StoreUnreachableError, UnknownModelError
from serving.parameter_server import ParameterServer, tier_table
from serving.parameter_server.counters import FETCH_BUCKETS_S, RequestCounts, TableCounting
from serving.parameter_server.health import ModelHealth
from serving.parameter_server.table import ModelVersions, Table, VersionClock
from serving.parameter_server.table_files import TableSource
from serving.parameter_server.tier_table import TierTable
from serving.storage import MemoryStore
from serving.storage.store import TableSpec
from tests.serving.small_server import (
    KEYS,
    ROWS,
    UNKNOWN,
    DictStore,
    DurableDictStore,
    HookedMemory,
    errors_of,
    keep,
    model_of,
    serve,
)


class MiddleStore(MemoryStore):
    """A second tier in RAM."""

    name = "middle"


def rows_as(row_dtype):
    rows = ROWS.copy()
    round_rows(rows, row_dtype, rows)
    return rows


def pooled_by_hand(bags, weights, known, default_value, combiner, rows=ROWS):
    """Add rows one after the other in float32, the way the answer is defined; ``weights`` by bag."""
    out = np.zeros((len(bags), 3), dtype=np.float32)
    for place, (bag, of_keys) in enumerate(zip(bags, weights, strict=True)):
        divisors = {"sum": np.float32(1), "mean": np.float32(0), "sqrtn": np.float32(0)}
        for key, weight in zip(bag, of_keys, strict=True):
            out[place] += weight * (rows[KEYS.index(key)] if key in known else np.float32(default_value))
            divisors["mean"] += weight
            divisors["sqrtn"] += weight * weight
        divisors["sqrtn"] = np.sqrt(divisors["sqrtn"])
        out[place] = out[place] / divisors[combiner] if divisors[combiner] else 0
    return out


def flatten(bags):
    return np.array([key for bag in bags for key in bag], dtype=np.int64), np.cumsum(
        [0, *map(len, bags)], dtype=np.int32
    )


@pytest.mark.parametrize("fastest", [MemoryStore, DictStore])
def test_weighted_sums_are_those_of_embedding_bag_in_float64(config, fastest):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(8)
    numbers, row_ptrs = rng.integers(0, len(KEYS), 60), np.arange(0, 61, 5)
    weights = rng.standard_normal(60, dtype=np.float32)

    answer, found = serve(config, fastest()).lookup_pooled("m.t", np.array(KEYS)[numbers], row_ptrs, "sum", weights)

    expected = torch.nn.functional.embedding_bag(
        torch.from_numpy(numbers), torch.from_numpy(ROWS.astype(np.float64)), torch.from_numpy(row_ptrs[:-1]),
        mode="sum", per_sample_weights=torch.from_numpy(weights.astype(np.float64)),
    )  # fmt: skip
    assert found.all()
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5)  # five products and sums in float32


@pytest.mark.parametrize(
    "weights",
    [np.ones(1, np.float32), np.ones(3, np.float32), np.ones((2, 1), np.float32), np.ones(2), np.ones(2, int), [1, 1]],
    ids=["too few", "too many", "two dimensions", "float64", "int64", "a list"],
)
def test_weights_that_are_not_one_float32_per_key_are_refused(config, weights):
    with pytest.raises(RequestError, match=r"table 'm\.t': expected weights of float32\[2\], got "):
        serve(config, MemoryStore()).lookup_pooled("m.t", np.array(KEYS[:2]), np.array([0, 2]), "sum", weights)


@pytest.mark.parametrize(
    ("row_ptrs", "came"),
    [([0, 2], "a list"), (np.empty(0, np.int32), r"int32\[0\]"), (np.array([[0, 2]]), r"int64\[1, 2\]")],
)
def test_what_cannot_be_offsets_of_bags_is_refused(config, row_ptrs, came):
    with pytest.raises(RequestError, match=rf"table 'm\.t': expected row_ptrs of int32\[R \+ 1\].*, got {came}"):
        serve(config, MemoryStore()).lookup_pooled("m.t", np.array(KEYS[:2]), row_ptrs, "sum")


BAGS = st.lists(st.lists(st.sampled_from(KEYS + UNKNOWN), max_size=6), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(
    bags=BAGS,
    tier_of_key=st.lists(st.integers(0, 3), min_size=len(KEYS), max_size=len(KEYS)),
    default_value=st.sampled_from([0.0, 0.25]),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    seed=st.none() | st.integers(0, 2**32),
    fastest=st.sampled_from([MemoryStore, DictStore]),
    row_dtype=st.sampled_from(["fp32", "bf16", "int8", "uint8"]),
)
def test_no_bit_of_an_answer_depends_on_which_tier_holds_a_row(
    config, bags, tier_of_key, default_value, combiner, seed, fastest, row_dtype
):
    config = model_of(config.tables[0].file.parent, default_value, row_dtype=row_dtype)
    known = [key for key, tier in zip(KEYS, tier_of_key, strict=True) if tier < 3]
    keys, row_ptrs = flatten(bags)
    weights = None if seed is None else np.random.default_rng(seed).integers(-2, 3, keys.size).astype(np.float32) / 2
    whole = serve(config, MemoryStore())
    keep(whole.stores[0], known)
    expected, expected_found = whole.lookup_pooled("m.t", keys, row_ptrs, combiner, weights)
    split = serve(config, fastest(), MiddleStore(), DictStore("slow"))
    for depth, store in enumerate(split.stores):
        keep(store, [key for key, tier in zip(KEYS, tier_of_key, strict=True) if tier == depth])

    answer, found = split.lookup_pooled("m.t", keys, row_ptrs, combiner, weights)

    assert answer.tobytes() == expected.tobytes()
    ones = np.ones(keys.size, dtype=np.float32)
    by_bag = np.split(ones if weights is None else weights, row_ptrs[1:-1])
    by_hand = pooled_by_hand(bags, by_bag, known, default_value, combiner, rows_as(row_dtype))
    np.testing.assert_array_equal(answer, by_hand)
    assert found.tolist() == expected_found.tolist() == [key in known for key in keys.tolist()]


@settings(deadline=None, max_examples=30)
@given(keys=st.lists(st.sampled_from(KEYS + UNKNOWN), max_size=12), fast=st.sets(st.sampled_from(KEYS)))
def test_rows_come_from_whichever_tier_has_them_and_unknown_keys_are_the_default(config, keys, fast):
    server = serve(model_of(config.tables[0].file.parent, -1.5), MemoryStore(), DictStore())
    keep(server.stores[0], fast)

    rows, found = server.lookup("m.t", np.array(keys, dtype=np.int64))

    assert found.tolist() == [key in KEYS for key in keys]
    expected = [ROWS[KEYS.index(key)] if key in KEYS else np.full(3, -1.5, np.float32) for key in keys]
    assert rows.tobytes() == b"".join(row.tobytes() for row in expected)


def test_answers_stay_the_same_while_rows_leave_and_enter_the_fast_tier(config):
    server = serve(config, MemoryStore(), DictStore())
    bags = [[1, 2, 3], [4, 777], [], [5, 6, 7, 8]]
    keys, row_ptrs = flatten(bags)
    expected = pooled_by_hand(bags, [np.ones(len(bag), np.float32) for bag in bags], KEYS, 0.0, "sum")
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            server.stores[0].tables["m.t"].evict(np.array([2, 4, 7]))
            server.stores[0].tables["m.t"].insert(np.array([7, 4, 2]), ROWS[[6, 3, 1]])

    churner = threading.Thread(target=churn)
    churner.start()
    for _ in range(300):
        np.testing.assert_array_equal(server.lookup_pooled("m.t", keys, row_ptrs, "sum")[0], expected)
    stop.set()
    churner.join()


def looked_up(server):
    """All rows, after which everything is where it is promoted to."""
    rows = server.lookup("m.t", np.array(KEYS))[0].tobytes()
    assert server.wait_for_promotions(60)
    return rows


@pytest.mark.parametrize("row_dtype", ["bf16", "int8", "uint8"])
def test_a_promoted_row_of_a_narrow_table_is_rounded_once(config, row_dtype):
    config = model_of(config.tables[0].file.parent, row_dtype=row_dtype)
    server = serve(config, MemoryStore(), MiddleStore(), DictStore("slow"), promote=True)
    for store in server.stores[:2]:
        keep(store, [])

    answers = [looked_up(server)]
    server.stores[0].tables["m.t"].evict(np.array(KEYS[::2]))
    answers += [looked_up(server) for _ in range(2)]

    assert answers == [rows_as(row_dtype).tobytes()] * 3
    assert server.stores[1].tables["m.t"].count() == len(KEYS)


def test_a_slower_tiers_row_that_the_row_type_cannot_hold_is_an_error_that_names_its_key(config):
    server = serve(model_of(config.tables[0].file.parent, row_dtype="int8"), MemoryStore(), DictStore("slow"))
    keep(server.stores[0], KEYS[:5])
    server.stores[1].rows["m.t"][KEYS[7]] = np.array([1.0, np.nan, 1.0], dtype=np.float32)

    with pytest.raises(StoreError, match=rf"^slow: .*'m\.t'.* of key {KEYS[7]}: column 1 is nan, which int8 rows"):
        server.lookup("m.t", np.array(KEYS))

    assert server.lookup("m.t", np.array(KEYS[:7]))[1].all()


def test_slower_tiers_are_asked_for_missing_keys_only(config):
    slow = DictStore()
    server = serve(config, MemoryStore(), slow)
    slow.calls.clear()

    server.lookup("m.t", np.array(KEYS))
    assert slow.calls["fetch"] == 0
    keep(server.stores[0], KEYS[1:])
    server.lookup("m.t", np.array(KEYS))

    assert slow.calls["fetch"] == 1


def tables(*names):
    """Tables of the model "m" in a tier "dict"."""
    health, clock = ModelHealth("'m'", ["dict"]), VersionClock(ModelVersions())
    return [
        Table(
            TableSource(TableSpec(f"m.{name}", 3), None),
            "I64",
            0.0,
            TableCounting("m", 0, name, ["dict"], RequestCounts(1), 0),
            health,
            clock,
        )
        for name in names
    ]


def in_tier(store, *all_tables):
    """The tables in a tier of this store."""
    tier = tier_table.Tier(store, 0, tier_table.TierSettings())
    return [TierTable(tier, table) for table in all_tables]


def said(caplog):
    """The log lines without their last part."""
    return [line.rpartition(": ")[0] for line in caplog.messages]


class TestOutages:
    @pytest.fixture
    def server(self, config):
        return serve(config, DictStore("fast"), DictStore("slow"))

    def test_a_tier_that_is_down_is_bypassed_where_a_slower_tier_answers(self, server):
        server.stores[0].is_down = True

        rows, found = server.lookup("m.t", np.array(KEYS))

        assert found.all()
        assert rows.tobytes() == ROWS.tobytes()
        counters = server.counters()["m.t"]
        assert (counters.hits, errors_of(server)) == ({"slow": 12}, {"fast": 1})

    def test_an_outage_is_logged_once_when_it_starts_and_once_when_it_ends(self, server, caplog):
        caplog.set_level(logging.INFO)
        for is_down in (False, True, True, True, False, False, True):
            server.stores[0].is_down = is_down
            server.lookup("m.t", np.array(KEYS))

        assert [(record.levelname, record.getMessage().rpartition(": ")[0]) for record in caplog.records] == [
            ("ERROR", "tier fast does not answer, model 'm': no answer (table 'm.t')"),
            ("WARNING", "tier fast answers again, model 'm'"),
            ("ERROR", "tier fast does not answer, model 'm': no answer (table 'm.t')"),
        ]

    def test_an_outage_is_logged_once_more_when_an_unreachable_tier_is_reached_and_fails(self, caplog):
        class FailingStore(DictStore):
            def fetch(self, table, keys, out):
                raise failure

        refused = StoreUnreachableError("dict", "m.t", "Connection refused")
        lost = StoreError("dict", "m.t", "has lost the rows")
        late = StoreTimeoutError("dict", "m.t", "no answer within 5 ms")
        [table] = tables("t")
        [in_a_tier] = in_tier(FailingStore(), table)
        for failure in (refused, refused, late, lost, refused, lost):  # noqa: B007 - the store raises it
            in_a_tier.fetch(np.array([1]))

        assert said(caplog) == [
            "tier dict does not answer, model 'm': Connection refused (table 'm.t')",
            "tier dict answers with errors, model 'm': has lost the rows (table 'm.t')",
        ]

    def test_a_table_that_fails_is_logged_once_whatever_other_tables_answer(self, caplog):
        store = DictStore()
        damaged, healthy = in_tier(store, *tables("bad", "good"))
        for _ in range(3):
            for in_a_tier in (damaged, healthy):
                store.is_down = in_a_tier is damaged
                in_a_tier.fetch(np.array([1]))

        assert said(caplog) == ["tier dict does not answer, model 'm': no answer (table 'm.bad')"]

    def test_the_outage_of_a_cache_lasts_until_the_cache_is_whole_again(self, caplog):
        store = DurableDictStore("dict")
        [table] = tables("t")
        [in_a_tier] = in_tier(store, table)
        store.is_down = True
        in_a_tier.fetch(np.array([1]))
        store.is_down = False
        for is_whole in (False, True):
            store.is_whole = is_whole
            in_a_tier.fetch(np.array([1]))
            assert in_a_tier.is_failing != is_whole

        assert said(caplog) == [
            "tier dict does not answer, model 'm': no answer (table 'm.t')",
            "tier dict answers again, model 'm'",
        ]

    @pytest.mark.parametrize("kind", [DictStore, DurableDictStore])
    def test_what_the_last_tier_does_not_hold_is_unknown_even_if_a_faster_tier_is_down(self, config, kind):
        server = serve(config, DictStore("fast"), kind("truth"))
        server.stores[0].is_down = True

        rows, found = server.lookup("m.t", np.array([1, 777]))
        pooled, pooled_found = server.lookup_pooled("m.t", np.array([1, 777]), np.array([0, 2]), "sum")

        assert found.tolist() == pooled_found.tolist() == [True, False]
        assert rows.tobytes() == ROWS[0].tobytes() + bytes(12)
        np.testing.assert_array_equal(pooled, ROWS[:1])
        counters = server.counters()["m.t"]
        assert (counters.hits, counters.defaulted_keys) == ({"truth": 2}, 2)
        assert errors_of(server) == {"fast": 2}

    @pytest.mark.parametrize("kind", [DictStore, DurableDictStore])
    @pytest.mark.parametrize("is_fast_down", [False, True])
    def test_while_the_last_tier_does_not_answer_no_key_is_unknown(self, config, is_fast_down, kind):
        server = serve(config, DictStore("fast"), kind("truth"))
        server.stores[0].is_down, server.stores[1].is_down = is_fast_down, True

        with pytest.raises(StoreError, match=r"^truth: .*no answer"):
            server.lookup("m.t", np.array([1, 777]))
        with pytest.raises(StoreError, match=r"^truth: .*no answer"):
            server.lookup_pooled("m.t", np.array([1, 777]), np.array([0, 2]), "sum")

    def test_only_the_last_tier_says_what_is_unknown(self, config):
        server = serve(config, DictStore("fast"), DurableDictStore(), DictStore("slow"))
        server.stores[0].is_down = server.stores[2].is_down = True

        with pytest.raises(StoreError, match=r"^slow: .*no answer"):
            server.lookup("m.t", np.array([777]))

    def test_no_row_is_copied_into_a_tier_that_does_not_answer(self, config):
        server = serve(config, DictStore("fast"), DurableDictStore(), promote=True)
        keep(server.stores[0], [])
        server.stores[0].is_down = True

        server.lookup("m.t", np.array([1, 777]))

        assert server.wait_for_promotions(60)
        assert server.stores[0].rows == {"m.t": {}}

    def test_a_slow_tier_that_is_down_is_not_noticed_while_no_lookup_needs_it(self, server):
        server.stores[1].is_down = True

        assert server.lookup("m.t", np.array(KEYS))[1].all()
        assert errors_of(server) == {}

    def test_a_pooling_tier_that_is_down_is_asked_once_and_bypassed(self, config):
        class Failing(HookedMemory):
            calls = 0

            def on_fetch_pooled(self, table, *args):
                Failing.calls += 1
                raise StoreError("memory", table.spec.name, "no answer")

            def on_fetch(self, table, *args):
                Failing.calls += 1
                raise StoreError("memory", table.spec.name, "no answer")

        server = serve(config, Failing(), DictStore("slow"))

        pooled, found = server.lookup_pooled("m.t", np.array([1, 2]), np.array([0, 2]), "sum")

        assert found.all()
        np.testing.assert_array_equal(pooled, ROWS[:1] + ROWS[1:2])
        assert Failing.calls == 1
        assert errors_of(server) == {"memory": 1}
        assert not server.lookup_pooled("m.t", np.array([777]), np.array([0, 1]), "sum")[1].any()


def test_counters_tell_keys_hits_by_tier_and_defaults(config):
    server = serve(config, MemoryStore(), DictStore())
    keep(server.stores[0], [1, 2, 3])

    server.lookup_pooled("m.t", np.array([1, 1, 4, 777]), np.array([0, 1, 4]), "sum")
    server.lookup_pooled("m.t", np.array([1, 2]), np.array([0, 2]), "mean")
    server.lookup("m.t", np.array([5, 3, 777]))

    counters = server.counters()["m.t"]
    assert (counters.model, counters.version, counters.table) == ("m", 0, "t")
    assert counters.keys == 9
    assert counters.hits == {"memory": 5, "dict": 2}
    assert counters.defaulted_keys == 2


def test_counters_tell_of_each_tier_what_it_was_asked_and_what_it_held(config):
    with serve(config, MemoryStore(), DictStore("middle"), DictStore("slow")) as server:
        keep(server.stores[0], [1, 2, 3])
        keep(server.stores[1], [4])
        server.lookup_pooled("m.t", np.array([1, 1, 4, 777, 2]), np.array([0, 1, 4, 5]), "sum")
        server.lookup("m.t", np.array([1, 5]))
        server.stores[1].is_down = True
        server.lookup("m.t", np.array([1, 5]))

        tiers = server.counters()["m.t"].tiers

        assert [(tier.tier, tier.asked_keys, tier.hits) for tier in tiers] == [
            ("memory", 9, 5),
            ("middle", 3, 1),
            ("slow", 3, 2),
        ]
        assert [tier.errors for tier in tiers] == [0, 1, 0]
        # the first tier is asked again for bags of which a row is missing
        assert [sum(tier.fetch_times.counts) for tier in tiers] == [4, 2, 3]


def test_the_time_of_each_fetch_falls_into_a_bucket(config, monkeypatch):
    clock, caller = iter([0.0, 0.00003, 10.0, 10.0007, 20.0, 31.0]), threading.get_ident()

    def now_s():  # threads of other servers ask for the time, too
        return next(clock) if threading.get_ident() == caller else time.perf_counter()

    with serve(config, DictStore()) as server:
        monkeypatch.setattr(tier_table, "now_s", now_s)
        for _ in range(3):
            server.lookup("m.t", np.array([1]))

        times = server.counters()["m.t"].tiers[0].fetch_times

    below = dict(zip(FETCH_BUCKETS_S, accumulate(times.counts), strict=False))
    assert [below[bound] for bound in (2.5e-5, 5e-5, 5e-4, 1e-3, 10.0)] == [0, 1, 1, 2, 2]
    assert times.counts[-1] == 1
    assert [bound for bound, *_ in times.buckets()][-2:] == ["10", "+Inf"]
    assert times.sum_s == pytest.approx(11.00073)
    assert (times.bounds_s[0], times.bounds_s[-1]) == (1e-5, 10.0)
    assert list(times.bounds_s) == sorted(times.bounds_s)


def test_counters_that_were_read_do_not_change_any_more(config):
    with serve(config, DictStore()) as server:
        before = server.counters()["m.t"].tiers[0]
        server.lookup("m.t", np.array([1]))

        assert (before.asked_keys, sum(before.fetch_times.counts), before.fetch_times.sum_s) == (0, 0, 0.0)


def test_counts_of_many_threads_add_up(config):
    server = serve(config, MemoryStore())
    keys, row_ptrs = np.array([1, 777]), np.array([0, 2])

    def work():
        for _ in range(200):
            server.lookup_pooled("m.t", keys, row_ptrs, "sum")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    counters = server.counters()["m.t"]
    assert (counters.keys, counters.hits, counters.defaulted_keys) == (1600, {"memory": 800}, 800)


def test_an_unknown_table_is_an_unknown_model(config):
    server = serve(config, MemoryStore())

    with pytest.raises(UnknownModelError, match=r"m\.other"):
        server.lookup("m.other", np.array([1]))
    with pytest.raises(UnknownModelError, match=r"m\.other"):
        server.lookup_pooled("m.other", np.array([1]), np.array([0, 1]), "sum")


@pytest.mark.parametrize("key", [2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1])
def test_a_reserved_key_is_refused_and_named(config, key):
    server = serve(config, MemoryStore())

    with pytest.raises(RequestError, match=f"key {key} at position 1 is reserved"):
        server.lookup("m.t", np.array([1, key]))


def test_a_server_needs_stores_of_different_names():
    with pytest.raises(ValueError, match=r"of different names, got \['dict', 'memory', 'dict'\]"):
        ParameterServer([DictStore(), MemoryStore(), DictStore()])
    with pytest.raises(ValueError, match=r"one store or several of different names, got \[\]"):
        ParameterServer([])


def test_closing_closes_every_store_and_forgets_the_models(config):
    store = DictStore()
    with serve(config, store) as server:
        pass

    assert store.calls["close"] == 1
    assert server.models() == ()
    with pytest.raises(UnknownModelError):
        server.lookup("m.t", np.array([1]))


@pytest.mark.parametrize("reloaded", [False, True], ids=["unloaded", "unloaded and loaded again"])
def test_a_lookup_that_meets_the_unloading_fails_and_calls_no_key_unknown(config, reloaded):
    class Unloading(HookedMemory):
        def unload(self):
            server.unload_model("m")
            if reloaded:
                server.load_model(config)

        def on_fetch(self, *args):
            self.unload()
            return super().on_fetch(*args)

        def on_fetch_pooled(self, *args):
            self.unload()
            return super().on_fetch_pooled(*args)

    server = serve(config, Unloading())
    with pytest.raises(UnknownModelError, match=r"'m\.t' was unloaded"):
        server.lookup_pooled("m.t", np.array([1, 2]), np.array([0, 2]), "sum")
    if not reloaded:
        server.load_model(config)
    with pytest.raises(UnknownModelError, match=r"'m\.t' was unloaded"):
        server.lookup("m.t", np.array([1, 2]))


def test_only_the_version_that_is_meant_is_unloaded(config):
    server = serve(config, MemoryStore())

    with pytest.raises(UnknownModelError, match="of version 7"):
        server.unload_model("m", 7)
    assert server.models() == (config,)
    server.unload_model("m", config.version)
    assert server.models() == ()
