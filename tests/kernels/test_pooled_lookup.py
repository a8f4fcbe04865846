"""PooledLookup: several tables in one call, against NumPy and a dict of each table's rows."""

import itertools
import os
import threading
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ReservedKeyError
from kernels.host import HostTable, PooledLookup, gather_bags, lookup_threads, round_rows, set_lookup_threads
from kernels.shared import SharedTable
from kernels.snapshot import Snapshot
from tests.kernels.snapshot_files import write

ROWS = 300
BOUNDS_NS = [1_000, 1_000_000]
KINDS = ["own", "shared", "snapshot"]


@dataclass(frozen=True)
class Subject:
    """A table of the keys 0, 3, 6, ..., its rows by key, and how a model uses it."""

    table: Any
    rows: dict
    dim: int
    slots: int
    combiner: str


def subject(folder, kind, dim, row_dtype="fp32", slots=1, combiner="sum"):
    keys = np.arange(ROWS) * 3
    rows = np.random.default_rng(dim).standard_normal((ROWS, dim), dtype=np.float32)
    if kind == "snapshot":
        write(folder / "t", keys, rows, row_dtype)
        table = Snapshot(folder / "t")
    else:
        shared = kind == "shared"
        table = SharedTable.create(folder / "t", dim, ROWS, row_dtype) if shared else HostTable(dim, ROWS, row_dtype)
        table.insert(keys, rows)
    round_rows(rows, row_dtype, rows)
    return Subject(table, dict(zip(keys.tolist(), rows, strict=True)), dim, slots, combiner)


class Model:
    """Several tables and the call that pools them."""

    def __init__(self, subjects):
        self.subjects = subjects
        self.counts = [np.zeros(2 + len(BOUNDS_NS) + 1, np.int64) for _ in subjects]
        dims, slots, combiners = zip(*((one.dim, one.slots, one.combiner) for one in subjects), strict=True)
        self.lookup = PooledLookup(dims, slots, combiners, self.counts, BOUNDS_NS)

    def sizes(self, samples):
        return [-(-samples * one.slots * one.dim // 16) * 16 for one in self.subjects]

    def fetch(self, requests, samples, weights=None, tables=None, dtype=np.int32):
        """Return each table's vectors, and what ``PooledLookup.fetch`` returns as a dict."""
        out = np.full(sum(self.sizes(samples)), 7, np.float32)
        keys, row_ptrs = (np.concatenate(parts) for parts in zip(*requests, strict=True))
        tables = [one.table for one in self.subjects] if tables is None else tables
        rest = self.lookup.fetch(tables, keys, row_ptrs.astype(dtype), out, samples, weights)
        return self.split(out, samples), dict(rest)

    def split(self, out, samples):
        parts, first = [], 0
        for one, size in zip(self.subjects, self.sizes(samples), strict=True):
            used = samples * one.slots * one.dim
            assert (out[first + used : first + size] == 7).all(), "a float between two tables was written"
            parts.append(out[first : first + used].reshape(samples * one.slots, one.dim))
            first += size
        return parts


def request(rng, bags, longest=4, unknown_ratio=0.1):
    """Keys and offsets of one table, with empty bags, duplicates and unknown keys."""
    row_ptrs = np.concatenate(([0], np.cumsum(rng.integers(0, longest + 1, bags))))
    keys = rng.integers(0, min(ROWS, 40), row_ptrs[-1]) * 3
    return keys + (rng.random(keys.size) < unknown_ratio), row_ptrs


def pooled_by_numpy(one, keys, row_ptrs, weights):
    """Bags summed row by row in float32; an unknown key is a row of zeros."""
    out = np.zeros((row_ptrs.size - 1, one.dim), np.float32)
    weights = np.ones(keys.size, np.float32) if weights is None else weights
    for bag, row in enumerate(out):
        total = squares = np.float32(0)
        for at in range(row_ptrs[bag], row_ptrs[bag + 1]):
            row += one.rows.get(int(keys[at]), np.zeros(one.dim, np.float32)) * weights[at]
            total, squares = total + weights[at], squares + weights[at] * weights[at]
        divisor = {"sum": np.float32(1), "mean": total, "sqrtn": np.sqrt(squares)}[one.combiner]
        row[:] = row / divisor if divisor else 0
    return out


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """A table of each kind and row dtype, of several dims."""
    kinds = [(kind, row_dtype) for kind in KINDS for row_dtype in ("fp32", "fp16", "bf16", "int8", "uint8")]
    dims = cycle([1, 7, 8, 16, 32, 20, 3, 128])
    return [
        subject(tmp_path_factory.mktemp("table"), kind, dim, row_dtype)
        for (kind, row_dtype), dim in zip(kinds, dims, strict=False)
    ]


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_every_table_is_pooled_as_numpy_pools_it(subjects, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    chosen = data.draw(st.lists(st.integers(0, len(subjects) - 1), min_size=1, max_size=8))
    samples = data.draw(st.integers(1, 20))
    combiners = st.sampled_from(["sum", "mean", "sqrtn"])
    model = Model(
        [
            replace(subjects[place], slots=data.draw(st.integers(1, 3)), combiner=data.draw(combiners))
            for place in chosen
        ]
    )
    ratio = data.draw(st.sampled_from([0.0, 0.02, 0.5]))
    requests = [request(rng, samples * one.slots, unknown_ratio=ratio) for one in model.subjects]
    weights = [
        rng.standard_normal(keys.size, dtype=np.float32) if data.draw(st.booleans()) else None for keys, _ in requests
    ]
    given_weights = None if data.draw(st.booleans()) else weights
    unread = data.draw(st.sets(st.integers(0, len(chosen) - 1)))
    tables = [None if place in unread else one.table for place, one in enumerate(model.subjects)]

    pooled, rest = model.fetch(
        requests, samples, given_weights, tables, data.draw(st.sampled_from([np.int32, np.int64]))
    )

    for place, (one, (keys, row_ptrs)) in enumerate(zip(model.subjects, requests, strict=True)):
        known = keys % 3 == 0
        lookups = int(place not in unread)
        held_all = lookups and known.all()
        if place in unread:
            assert rest.pop(place) is None
            assert (pooled[place] == 7).all()
        else:
            expected = pooled_by_numpy(one, keys, row_ptrs, given_weights and given_weights[place])
            assert pooled[place].tobytes() == expected.tobytes()
            if not held_all:
                np.testing.assert_array_equal(rest.pop(place), known)
        counts = model.counts[place]
        assert (counts[0], counts[2:].sum()) == (keys.size if held_all else 0, lookups)
        assert (counts[1] > 0) == bool(lookups)
    assert not rest


@pytest.mark.parametrize("largest", [5_000, 20_000], ids=["table by table", "a table that shares its own pieces"])
def test_a_large_request_on_several_threads_has_the_same_bits(subjects, largest):
    rng = np.random.default_rng(5)
    model = Model([replace(one, slots=1000, combiner="mean") for one in subjects[:9]])
    requests = [request(rng, 1000, longest=2 * most // 1000) for most in [largest, *[2_500] * 8]]
    before = lookup_threads()
    try:
        set_lookup_threads(1)
        alone, rest_alone = model.fetch(requests, 1)
        set_lookup_threads(4)
        together, rest = model.fetch(requests, 1)
    finally:
        set_lookup_threads(before)

    assert sum(keys.size for keys, _ in requests) > 16_384
    assert [one.tobytes() for one in together] == [one.tobytes() for one in alone]
    assert sorted(rest) == sorted(rest_alone) == list(range(9))
    for (keys, row_ptrs), one, pooled in zip(requests, model.subjects, together, strict=True):
        assert pooled.tobytes() == pooled_by_numpy(one, keys, row_ptrs, None).tobytes()


@pytest.mark.parametrize("count", [4, 500])
def test_rows_are_whole_while_other_threads_insert(count):
    dim, keys = 32, np.arange(count)
    tables = [HostTable(dim, count) for _ in range(4)]
    lookup = PooledLookup([dim] * 4, [1] * 4, ["sum"] * 4, [np.zeros(3, np.int64) for _ in tables], [])
    for table in tables:
        table.insert(keys, np.zeros((count, dim), np.float32))
    stop, begun = threading.Event(), threading.Barrier(5)

    def write(table):
        for version in itertools.count(1):
            table.insert(keys, np.full((count, dim), version, np.float32))
            if version == 1:
                begun.wait()
            if stop.is_set():
                return

    writers = [threading.Thread(target=write, args=(table,)) for table in tables]
    for writer in writers:
        writer.start()
    begun.wait()
    row_ptrs = np.tile(np.arange(count + 1), 4)
    last = np.zeros(4)
    try:
        for _ in range(100):
            out = np.empty(4 * count * dim, np.float32)
            assert lookup.fetch(tables, np.tile(keys, 4), row_ptrs, out, count) == []
            rows = out.reshape(4, count, dim)
            assert (rows == rows[:, :, :1]).all(), "a torn row"
            assert (rows.min(axis=(1, 2)) >= last).all(), "an older row than before"
            last = rows.min(axis=(1, 2))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert last.all()


def test_a_file_that_was_cut_short_fails_its_own_table_only(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model = Model([subject(tmp_path / "a", "snapshot", 8), subject(tmp_path / "b", "snapshot", 8)])
    requests = [(np.array([0, 3]), np.array([0, 2]))] * 2
    os.truncate(tmp_path / "a" / "t", 4096)

    pooled, rest = model.fetch(requests, 1)

    assert rest == {0: None}
    np.testing.assert_array_equal(pooled[1][0], model.subjects[1].rows[0] + model.subjects[1].rows[3])
    assert [counts[0] for counts in model.counts] == [0, 2]


def test_a_table_of_another_dim_is_not_read(tmp_path):
    model = Model([subject(tmp_path, "own", 8)])

    pooled, rest = model.fetch([(np.array([0]), np.array([0, 1]))], 1, tables=[HostTable(4, 10)])

    assert rest == {0: None}
    assert (pooled[0] == 7).all()


def test_a_table_without_keys_gets_zeros_and_counts_as_a_lookup(tmp_path):
    model = Model([subject(tmp_path, "own", 8, slots=2)])

    pooled, rest = model.fetch([(np.empty(0, np.int64), np.zeros(7, np.int64))], 3)

    assert rest == {}
    assert not pooled[0].any()
    assert (model.counts[0][0], model.counts[0][2:].sum()) == (0, 1)


BAD_REQUESTS = [
    pytest.param({"keys": np.zeros(4, np.int32)}, TypeError, r"keys: expected int64\[N\]", id="int32 keys"),
    pytest.param({"row_ptrs": np.zeros(6, np.float32)}, TypeError, "row_ptrs: expected int32", id="float offsets"),
    pytest.param({"row_ptrs": np.array([0, 1, 2, 0, 2])}, ValueError, "row_ptrs: expected", id="too few offsets"),
    pytest.param({"row_ptrs": np.array([0, 1, 2, 1, 2, 2])}, ValueError, "one CSR per table", id="not from 0"),
    pytest.param({"row_ptrs": np.array([0, 2, 1, 0, 1, 3])}, ValueError, "one CSR per table", id="offsets that fall"),
    pytest.param({"row_ptrs": np.array([0, 1, 2, 0, 1, 1])}, ValueError, "of 4 keys together", id="too few keys"),
    pytest.param({"row_ptrs": np.array([0, 1, 2, 0, 1, 3])}, ValueError, "of 4 keys together", id="too many keys"),
    pytest.param({"row_ptrs": np.array([0, 1, -(2**62), 0, 1, 2])}, ValueError, "one CSR per table", id="negative"),
    pytest.param(
        {"out": np.zeros(31, np.float32)}, ValueError, r"out: expected float32\[N\] of shape \[32\]", id="out"
    ),
    pytest.param({"out": np.zeros(32)}, TypeError, "out: expected float32", id="float64 out"),
    pytest.param({"samples": 0}, ValueError, "samples: expected 1 to", id="no sample"),
    pytest.param({"samples": 2**31 - 1}, ValueError, "row_ptrs: .* of shape", id="more samples than offsets"),
    pytest.param({"tables": [None]}, ValueError, "tables: expected 2", id="too few tables"),
    pytest.param(
        {"tables": [None, 5]}, TypeError, "tables: expected HostTable, Snapshot or None, got int", id="no table"
    ),
    pytest.param({"weights": [None]}, ValueError, "weights: expected 2, one of each table", id="too few weights"),
    pytest.param(
        {"weights": [None, np.ones(3, np.float32)]},
        ValueError,
        r"weights: expected float32\[N\] of shape",
        id="weights",
    ),
    pytest.param({"weights": [None, np.ones(2)]}, TypeError, "weights: expected float32", id="float64 weights"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_REQUESTS)
def test_a_wrong_request_is_refused(change, error, message):
    lookup = PooledLookup([8, 8], [1, 1], ["sum", "sum"], [np.zeros(3, np.int64) for _ in range(2)], [])
    good = {
        "tables": [HostTable(8, 10), HostTable(8, 10)],
        "keys": np.zeros(4, np.int64),
        "row_ptrs": np.array([0, 1, 2, 0, 1, 2], np.int32),
        "out": np.zeros(32, np.float32),
        "samples": 2,
    }
    assert len(lookup.fetch(**good)) == 2

    with pytest.raises(error, match=message):
        lookup.fetch(**good | change)


def test_each_table_may_have_its_own_number_of_bags(subjects):
    few, rng = subjects[:3], np.random.default_rng(0)
    counts = [5, 1, 40]
    requests = [request(rng, count) for count in counts]
    keys, row_ptrs = (np.concatenate(parts) for parts in zip(*requests, strict=True))
    sizes = [-(-count * one.dim // 16) * 16 for count, one in zip(counts, few, strict=True)]
    out = np.full(sum(sizes), 7, np.float32)
    Model(few).lookup.fetch([one.table for one in few], keys, row_ptrs, out, 1, None, counts)
    for one, count, of_table, part in zip(few, counts, requests, np.split(out, np.cumsum(sizes)[:-1]), strict=True):
        wanted = pooled_by_numpy(one, *of_table, None)
        np.testing.assert_array_equal(part[: count * one.dim].reshape(count, one.dim), wanted)
        assert (part[count * one.dim :] == 7).all()


@pytest.mark.parametrize("bags", [[1], [0, 1], [2**31, 1], [2**31 - 1, 1]])
def test_wrong_numbers_of_bags_are_refused(bags):
    lookup = PooledLookup([8, 8], [1, 1], ["sum", "sum"], [np.zeros(3, np.int64) for _ in range(2)], [])
    arrays = np.zeros(0, np.int64), np.zeros(4, np.int32), np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="bags: expected"):
        lookup.fetch([None, None], *arrays, 1, None, bags)


@settings(deadline=None, max_examples=100)
@given(
    tables=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 20)).flatmap(
            lambda one: st.tuples(st.just(one), st.lists(st.integers(0, one[0] - 1), min_size=one[1], max_size=one[1]))
        ),
        max_size=4,
    ),
    dim=st.integers(1, 9) | st.sampled_from([200, 600]),  # with copies that are cut
)
def test_gathered_vectors_are_those_of_take(tables, dim):
    vectors = [np.random.default_rng(rows).normal(size=(rows, dim)).astype(np.float32) for (rows, _), _ in tables]
    bags = [np.array(of_table, np.int32) for _, of_table in tables]
    out = [np.full((of_table.size, dim), 7, np.float32) for of_table in bags]
    gather_bags(vectors, bags, out)
    for found, of_table, places in zip(out, vectors, bags, strict=True):
        np.testing.assert_array_equal(found, of_table.take(places, axis=0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bags": np.array([0, 3], np.int32)}, ValueError, "bags: expected numbers less than 3"),
        ({"bags": np.array([-1, 0], np.int32)}, ValueError, "bags: expected numbers less than 3"),
        ({"bags": np.array([0, 1])}, TypeError, "bags: expected int32"),
        ({"bags": np.zeros(3, np.int32)}, ValueError, "out: expected float32.N, D. of shape .3, 4."),
        ({"vectors": np.zeros((3, 5), np.float32)}, ValueError, "out: expected float32.N, D. of shape .2, 5."),
        ({"vectors": np.zeros((3, 4))}, TypeError, "vectors: expected float32"),
        ({"vectors": np.zeros((0, 4), np.float32)}, ValueError, "bags: expected numbers less than 0"),
        ({"out": np.zeros((4, 2), np.float32).T}, ValueError, "out: .* is not C-contiguous"),
        ({"out": np.broadcast_to(np.float32(0), (2, 4))}, ValueError, "out: "),
    ],
)
def test_wrong_bags_are_not_gathered(change, error, message):
    good = {
        "vectors": np.zeros((3, 4), np.float32),
        "bags": np.array([0, 2], np.int32),
        "out": np.zeros((2, 4), np.float32),
    }
    gather_bags(*([one] for one in good.values()))
    with pytest.raises(error, match=message):
        gather_bags(*([one] for one in (good | change).values()))
    with pytest.raises(ValueError, match="expected vectors, bags and out of the same tables"):
        gather_bags([], [good["bags"]], [])


def test_a_reserved_key_is_refused():
    lookup = PooledLookup([8], [1], ["sum"], [np.zeros(3, np.int64)], [])
    out = np.full(16, 7, np.float32)

    with pytest.raises(ReservedKeyError):
        lookup.fetch([HostTable(8, 10)], np.array([1, 2**63 - 1]), np.array([0, 2]), out, 1)

    assert (out == 7).all()


BAD_TABLES = [
    pytest.param({"dims": [8, 8]}, ValueError, "expected dims, slots, combiners and counts", id="other lengths"),
    pytest.param({"dims": [0]}, ValueError, "dim: expected 1 to 65536, got 0", id="dim 0"),
    pytest.param({"slots": [0]}, ValueError, "slots: expected 1 to", id="no slot"),
    pytest.param({"slots": [2**31]}, ValueError, "slots: expected 1 to 2147483647, got", id="too many slots"),
    pytest.param({"combiners": ["max"]}, ValueError, "combiner: expected 'sum'", id="combiner"),
    pytest.param(
        {"counts": [np.zeros(4, np.int64)]}, ValueError, "counts: expected int64", id="counts of other length"
    ),
    pytest.param({"counts": [np.zeros(5)]}, TypeError, "counts: expected int64", id="counts of float64"),
    pytest.param({"bounds_ns": [2, 1]}, ValueError, "bounds_ns: expected ascending", id="bounds that fall"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_TABLES)
def test_wrong_tables_are_refused(change, error, message):
    good = {"dims": [8], "slots": [1], "combiners": ["sum"], "counts": [np.zeros(5, np.int64)], "bounds_ns": [1, 2]}
    PooledLookup(**good)

    with pytest.raises(error, match=message):
        PooledLookup(**good | change)
