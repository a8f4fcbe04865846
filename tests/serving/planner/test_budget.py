"""Planned memory compared with real tiers, and divisions of a budget compared with all other divisions."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_cache.layout import Layout
from kernels.host import HostTable
from serving import ParameterServer
from serving.config import read_model_directory
from serving.errors import TraceError
from serving.planner import (
    TablePlan,
    disk_bytes,
    divide_budget,
    gpu_share_for,
    plan_tables,
    ram_bytes,
    table_sizes,
)
from serving.planner.policies import POLICIES
from serving.storage import MemoryStore, RocksDbStore
from serving.storage.marker import Marker
from serving.storage.store import TableSpec
from tests.tools.tiny_model import TinyModel


def table(name, places, rows, dim=16):
    """Plan one table from the places of the rows that were looked up."""
    places = np.array(places, dtype=np.int32)
    curves = {policy: curve_of(places, places.size) for policy, curve_of in POLICIES.items()}
    return TablePlan(name, dim, rows, places.size, 0, len(set(places.tolist())), curves, Layout(dim))


class TestMemory:
    def test_ram_is_what_the_memory_store_takes(self):
        store = MemoryStore(capacity_rows=123_456)
        store.table(TableSpec("m.t", 12)).open(123_456)

        assert ram_bytes(12, 123_456) == store.tables["m.t"].size_bytes
        assert ram_bytes(12, 0) == 0

    @pytest.mark.parametrize(("dim", "key_bytes"), [(1, 8), (16, 8), (16, 4), (128, 8), (1024, 8)])
    def test_the_disk_estimate_is_within_three_percent_of_a_loaded_database(self, tmp_path, dim, key_bytes):
        rows = 4_000_000 // (dim + 10) // 4
        keys = np.arange(rows) * 7919
        store = RocksDbStore(tmp_path)
        spec = TableSpec("m.t", dim, key_bytes)
        store.table(spec).open(rows)
        batches = iter([(keys.astype(np.int64), np.ones((rows, dim), np.float32))])
        store.table(spec).load(batches, Marker("digest"), keep=False)
        store.close()

        written = sum(file.stat().st_size for file in tmp_path.glob("*.sst"))
        assert disk_bytes(dim, rows, key_bytes) == pytest.approx(written, rel=0.03)

    def test_every_table_of_every_model_is_listed(self, tmp_path):
        TinyModel(rows=500).write(tmp_path, "a")
        TinyModel(rows=70, tables={"ad": 1}, key_type="I32").write(tmp_path, "b")
        models = [read_model_directory(tmp_path / name) for name in ("a", "b")]

        sizes = table_sizes(models)

        assert [(size.name, size.rows, size.dim) for size in sizes] == [
            ("a.user", 500, 4),
            ("a.item", 500, 4),
            ("b.ad", 70, 4),
        ]
        with ParameterServer([MemoryStore()]) as server:
            for model in models:
                server.load_model(model)
            taken = [server.stores[0].tables[one.full_name(table)].size_bytes for one in models for table in one.tables]
        assert [size.ram_bytes for size in sizes] == taken
        assert [size.disk_bytes for size in sizes] == [disk_bytes(4, 500, 8)] * 2 + [disk_bytes(4, 70, 4)]


class TestPlan:
    @pytest.fixture
    def config(self, tmp_path):
        return read_model_directory(TinyModel(rows=100).write(tmp_path))

    def test_lookups_of_unknown_keys_never_hit(self, config):
        trace = {"tiny.user": np.array([7, 7, 5000, 8, 5000, 7], dtype=np.int64)}

        user, item = plan_tables([config], trace)

        assert (user.name, user.dim, user.rows) == ("tiny.user", 4, 100)
        assert (user.lookups, user.unknown, user.distinct) == (6, 2, 2)
        assert {name: float(curve.hits_at(100)) for name, curve in user.curves.items()} == {
            "lru": 2,
            "pinned": 4,
            "file": 4,
        }
        assert (item.lookups, item.unknown, item.distinct) == (0, 0, 0)

    def test_the_file_order_is_the_order_of_rows_and_not_of_keys(self, tmp_path):
        directory = TinyModel(rows=100).write(tmp_path, "reversed")
        (directory / "manifest.json").unlink()
        (directory / "user" / "key").write_bytes(np.arange(100, dtype=np.int64)[::-1].tobytes())

        user, _ = plan_tables([read_model_directory(directory)], {"reversed.user": np.array([99, 98, 0])})

        assert user.curves["file"].hits_at([0, 1, 2, 99, 100]).tolist() == [0, 1, 2, 2, 3]

    def test_a_sample_estimates_only_lru(self, config):
        keys = np.random.default_rng(0).integers(0, 100, 5000)

        (exact, _), (sampled, _) = (
            plan_tables([config], {"tiny.user": keys}),
            plan_tables([config], {"tiny.user": keys}, 0.9),
        )

        sizes = np.array([1, 10, 50, 100])
        for policy in ("pinned", "file"):
            assert (exact.curves[policy].hits_at(sizes) == sampled.curves[policy].hits_at(sizes)).all()
        assert exact.lru_error(sizes).tolist() == [0, 0, 0, 0]
        assert sampled.lru_error(sizes).max() > 0

    def test_a_sample_without_rows_names_the_table(self, config):
        with pytest.raises(TraceError, match=r"tiny\.user: --sample: .* take a larger sample"):
            list(plan_tables([config], {"tiny.user": np.arange(100)}, 0.001))


class TestBudget:
    @settings(deadline=None, max_examples=25)
    @given(
        traces=st.lists(st.lists(st.integers(0, 5), max_size=30), min_size=1, max_size=3),
        dims=st.lists(st.sampled_from([700, 1500, 4000]), min_size=3, max_size=3),
        pages=st.integers(1, 120),
    )
    def test_no_other_division_of_the_same_bytes_answers_more(self, traces, dims, pages):
        plans = [table(f"m.{n}", places, 6, dim) for n, (places, dim) in enumerate(zip(traces, dims, strict=False))]

        shares = divide_budget(plans, "pinned", pages * 4096)

        spent = sum(share.ram_bytes for share in shares)
        assert spent <= pages * 4096
        assert [share.ram_bytes for share in shares] == [
            ram_bytes(plan.dim, share.rows) for plan, share in zip(plans, shares, strict=True)
        ]
        by_rows = [
            [(ram_bytes(plan.dim, rows), plan.curves["pinned"].hits_at(rows)) for rows in range(7)] for plan in plans
        ]
        best = max(sum(hits for _, hits in one) for one in product(*by_rows) if sum(size for size, _ in one) <= spent)
        # Greedy is optimal except for the last step, which gains at most one table's hits.
        lost = max((float(plan.curves["pinned"].hits[-1]) for plan in plans), default=0.0)
        assert best - lost <= sum(share.hits for share in shares) <= best

    def test_a_large_budget_holds_every_row_that_was_looked_up(self):
        plans = [table("m.a", [1, 1, 2], 10), table("m.b", [9], 10), table("m.c", [], 10)]

        shares = divide_budget(plans, "file", 2**30)

        assert [(share.rows, share.hits) for share in shares] == [(3, 3), (10, 1), (0, 0)]

    def test_a_budget_that_fits_exactly_is_used_to_the_last_step(self):
        falling = np.repeat(np.arange(2000), np.geomspace(1000, 1, 2000).astype(int))
        plans = [table("m.a", falling, 2000, dim=64), table("m.b", falling, 2000, dim=16)]

        shares = divide_budget(plans, "pinned", ram_bytes(64, 2000) + ram_bytes(16, 2000))

        assert [(share.rows, share.hits) for share in shares] == [(2000, falling.size)] * 2

    def test_the_table_with_more_hits_per_byte_comes_first(self):
        hot, cold = [0] * 1000 + [1] * 1000, list(range(2))
        plans = [table("m.cold", cold, 2), table("m.wide", hot, 2, dim=4096), table("m.hot", hot, 2)]

        shares = divide_budget(plans, "pinned", ram_bytes(16, 2))

        assert [share.hits for share in shares] == [0, 0, 2000]

    def test_a_narrow_table_gets_more_rows_from_the_same_budget(self):
        wide = table("m.a", range(20_000), 20_000, dim=128)
        narrow = replace(wide, row_dtype="int8")

        [wide_share], [narrow_share] = (divide_budget([plan], "file", 2**21) for plan in (wide, narrow))

        assert narrow_share.rows > 2 * wide_share.rows
        assert narrow_share.ram_bytes == HostTable.memory_bytes(128, narrow_share.rows, "int8") <= 2**21

    def test_a_budget_too_small_for_one_row_holds_none(self):
        [share] = divide_budget([table("m.a", [1], 10)], "file", 10)

        assert (share.rows, share.ram_bytes, share.hits) == (0, 0, 0)

    @pytest.mark.parametrize("hit_rate", [0.2, 0.5, 0.8, 0.95])
    def test_the_gpu_share_is_the_smallest_that_reaches_the_hit_rate(self, hit_rate):
        rng = np.random.default_rng(0)
        plans = [table("m.a", rng.integers(0, 300, 2000), 400), table("m.b", rng.zipf(1.5, 3000) % 900, 900)]

        share = gpu_share_for(plans, "lru", hit_rate)

        def reached(share):
            hits = sum(plan.curves["lru"].hits_at(np.ceil(round(share * plan.rows, 6))) for plan in plans)
            return hits / 5000 >= hit_rate

        if share is None:
            assert not reached(1.0)
        else:
            assert reached(share)
            assert not reached(share - 0.0001)
