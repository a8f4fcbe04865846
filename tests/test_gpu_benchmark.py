"""The benchmark of the GPU cache runs and is right without a GPU; its figures are what they are said to be."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import keys, lookups, pooling, predictions, targets
from benchmarks.gpu.byte_counts import gather_bytes, pool_bytes, query_bytes
from benchmarks.gpu.ceiling import KnownRows
from benchmarks.gpu.keys import WrongAnswerError, check_rows, codes_of, positions, rows_of
from benchmarks.gpu.plot import draw
from benchmarks.gpu.queries import BareQuery
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import WARM_UPS, take_turns
from benchmarks.gpu.sizes import QUICK
from benchmarks.gpu.tables import Tables
from benchmarks.gpu.torch_peer import TorchPeer, open_peer
from gpu_cache.layout import Layout
from kernels.host import round_rows

COMMAND = [sys.executable, "-m", "benchmarks.gpu"]
FORMS = ["fp32", "fp16", "bf16", "int8", "fp8"]


@pytest.mark.slow
def test_the_quick_form_measures_every_case_on_the_runner(tmp_path):
    file = tmp_path / "out.json"
    done = subprocess.run(
        [*COMMAND, "--device", "runner", "--quick", "--json", file], capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert document["absent"] == {}
    assert document["device"]["device"] == "runner"
    assert document["versions"]["numpy"] == np.__version__
    names = [record["name"] for record in document["records"]]
    assert {name: names.count(name) for name in names} == {
        "copy_kernel": 1,
        "copy_array": 1,
        "gather": 8,  # forms, batches, distributions
        "query": 24,  # these by hit rate, and 7 keys per line for fp32
        "lookup": 4,  # tables, distributions
        "lookup_plain": 4,
        "query_plain": 2,
        "pool": 16,  # bags, tables, distributions; forms, hit rates, distributions
        "query_beside_writes": 4,
        "query_graph": 2,
        "query_graph_upload": 2,
        "host_launch": 1,
        "host_graph": 1,
        "host_query": 1,
        "predict": 2,
        "predict_misses": 2,
    }
    for record in document["records"]:
        least, most = record["spread"]
        assert 0 < least <= record["median_us"] <= most
        assert (record["ratio"] is None) == ("absent" in record["ratio_to"] or "none" in record["ratio_to"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_machine_without_the_gpu_is_told_what_is_missing():
    done = subprocess.run([*COMMAND, "--device", "cuda:99"], capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stderr.startswith("make bench-gpu needs a GPU: cuda:99: ")
    assert done.stdout == ""


def test_nothing_is_imported_that_a_bare_gpu_machine_lacks():
    code = "import sys, benchmarks.gpu.__main__ as m; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    packages = {name.partition(".")[0] for name in loaded}
    assert {"gpu_cache", "kernels", "numpy"} <= packages
    assert not packages & {"serving", "training", "pydantic", "redis", "rocksdict", "fastapi", "torch", "matplotlib"}


def test_a_wrong_answer_fails_the_run_and_the_next_measurement_goes_on(monkeypatch, tmp_path, capsys):
    good = Record.of("good", [(1.0, 2.0)], "peer")

    def wrong():
        yield good
        raise WrongAnswerError("rows differ")

    monkeypatch.setattr(benchmark, "measurements", lambda device, sizes: [("queries", wrong()), ("pooling", [good])])
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "runner", "--json", str(tmp_path / "out.json")])

    assert benchmark.main() == 1

    document = json.loads((tmp_path / "out.json").read_text())
    assert document["failures"] == ["queries: rows differ"]
    assert [record["name"] for record in document["records"]] == ["good", "good"]
    assert "WRONG: queries: rows differ" in capsys.readouterr().err


def test_a_run_that_is_cut_short_leaves_what_was_measured(monkeypatch, tmp_path):
    good = Record.of("good", [(1.0, 2.0)], "peer")

    def cut_short():
        yield good
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "measurements", lambda device, sizes: [("queries", cut_short())])
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "runner", "--json", str(tmp_path / "out.json")])

    with pytest.raises(KeyboardInterrupt):
        benchmark.main()

    assert [record["name"] for record in json.loads((tmp_path / "out.json").read_text())["records"]] == ["good"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_groups_that_were_not_asked_for_are_not_measured(monkeypatch, tmp_path):
    def record(name):
        yield Record.of(name, [(1.0, 2.0)], "peer")

    groups = [(name, record(name)) for name in benchmark.GROUPS]
    monkeypatch.setattr(benchmark, "measurements", lambda device, sizes: groups)
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "runner", "--only", "latency", "queries", "--json", str(file)])

    assert benchmark.main() == 0

    assert [record["name"] for record in json.loads(file.read_text())["records"]] == ["queries", "latency"]


@pytest.mark.parametrize(
    ("dim", "row_dtype", "line_keys", "published"),
    [
        (32, "fp32", 15, 8 + 128 + 2 * 128),
        (64, "fp32", 15, 648),
        (128, "fp32", 15, 1160),
        (32, "fp32", 7, 8 + 64 + 2 * 128),
        (64, "fp16", 15, 8 + 128 + 128 + 256),
        (32, "int8", 15, 328),  # 36 bytes in rows 48 apart: two sectors of 32
        (64, "fp8", 15, 488),
        (128, "fp8", 15, 808),
    ],
)
def test_bytes_of_a_query_are_key_line_and_row_in_and_out(dim, row_dtype, line_keys, published):
    layout = Layout(dim, row_dtype, line_keys=line_keys)

    assert query_bytes(layout) == published
    assert gather_bytes(layout) == published - layout.line_bytes
    assert query_bytes(layout, hit_rate=0.0) == 8 + layout.line_bytes + 12 + 4 * dim


@pytest.mark.parametrize(("dim", "published"), [(32, 270), (64, 405), (128, 674)])
def test_bytes_of_pooled_lookups_have_one_row_out_for_each_bag(dim, published):
    assert round(pool_bytes(Layout(dim), bag_keys=20)) == published
    for hit_rate in (1.0, 0.9):
        assert pool_bytes(Layout(dim), 1, hit_rate) == query_bytes(Layout(dim), hit_rate)
    saved_bytes = 0.1 * (4 * dim - 12)  # a missing row is not read, but its key and position are written
    assert pool_bytes(Layout(dim), 20) - pool_bytes(Layout(dim), 20, 0.9) == pytest.approx(saved_bytes)


@pytest.mark.parametrize("row_dtype", FORMS)
def test_every_form_of_rows_holds_the_columns_exactly(row_dtype):
    rows = rows_of(np, np.arange(500), 32, row_dtype)

    if row_dtype == "fp8":
        torch = pytest.importorskip("torch")
        kept = torch.from_numpy(rows).to(torch.float8_e4m3fn).float().numpy()
    else:
        kept = np.empty_like(rows)
        round_rows(rows, row_dtype, kept)
    np.testing.assert_array_equal(kept, rows)
    assert (rows.max(axis=1) == codes_of(row_dtype)[1]).all()
    assert len(np.unique(rows, axis=0)) == 500


def test_rows_are_the_same_on_the_device(device):
    wanted = np.array([0, 5, keys.FIRST_ABSENT_KEY + 3])

    of_device = rows_of(device.xp, device.xp.asarray(wanted), 17, "fp8")

    np.testing.assert_array_equal(device.to_host(of_device), rows_of(np, wanted, 17, "fp8"))


@pytest.mark.parametrize("place", [(0, 0), (5, 3), (9, 7)])
def test_one_wrong_column_is_found(device, place):
    host_keys = np.arange(10)
    rows = rows_of(np, host_keys, 8, "fp32")
    missing = np.arange(10) == 2
    rows[missing] = 0
    check_rows(device, "rows", host_keys, device.xp.asarray(rows), "fp32", missing)
    rows[place] += 1

    with pytest.raises(WrongAnswerError, match="rows: rows"):
        check_rows(device, "rows", host_keys, device.xp.asarray(rows), "fp32", missing)


@pytest.fixture
def small_query(device):
    """A query of a cache that holds some keys, and these."""
    filled = keys.filled_cache(device, 300, 8, "fp16")
    yield BareQuery(filled.cache, 64), filled.population[:64]
    filled.close()


def test_a_right_query_passes(small_query):
    query, held = small_query
    asked, missing = held.copy(), np.arange(held.size) % 5 == 0
    asked[missing] += keys.FIRST_ABSENT_KEY

    query.check(asked, query.device.xp.asarray(asked), missing)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda cache, held: cache.erase(held[:1]), "1 misses were listed, 0 keys are missing"),
        (lambda cache, held: cache.update(held[5:6], np.zeros((1, 8), np.float32)), "query: rows"),
    ],
)
def test_a_query_that_is_wrong_is_found(small_query, spoil, message):
    query, held = small_query
    spoil(query.cache, held)
    query.cache.stream.synchronize()

    with pytest.raises(WrongAnswerError, match=message):
        query.check(held, query.device.xp.asarray(held), np.zeros(held.size, bool))


@pytest.fixture
def small_lookup(device):
    """Two tables, a request for 61 of their keys, and where it is answered."""
    tables = Tables(device, None, 8, 2, 300)
    yield tables, tables.group.workspace(1, 61, max_single_keys=61), lookups.Request.of(tables, np.arange(61))
    tables.close()


def test_a_right_lookup_passes(small_lookup):
    lookups.check_misses(*small_lookup)
    lookups.check(*small_lookup)


def lose_a_row(cache, key):
    cache.erase(key)


def spoil_a_row(cache, key):
    cache.update(key, np.zeros((1, 8), np.float32))


@pytest.mark.parametrize(
    ("check", "spoil", "message"),
    [
        (lookups.check, lose_a_row, "hold were missed"),
        (lookups.check, spoil_a_row, "lookup: rows"),
        (lookups.check_misses, lose_a_row, "told as missing"),
        (lookups.check_misses, spoil_a_row, "lookup: rows"),
    ],
)
def test_a_lookup_that_is_wrong_is_found(small_lookup, check, spoil, message):
    tables, work, request = small_lookup
    spoil(tables.filled[1].cache, request.keys[1][5:6])
    tables.filled[1].cache.stream.synchronize()

    with pytest.raises(WrongAnswerError, match=message):
        check(tables, work, request)


@pytest.fixture
def small_pool(device):
    """Two tables of fp16 rows, a request for bags of 3 keys, a third of which nobody has, and where it is answered."""
    tables = Tables(device, None, 8, 2, 300, "fp16")
    request = pooling.request_of(tables, positions("uniform", tables.populations[0].size, 90), 20, 3, 0, 0.67)
    yield tables, tables.group.workspace(20, 120), request
    tables.close()


def test_a_right_pooled_lookup_passes_and_lacks_some_keys(small_pool):
    tables, work, request = small_pool

    pooling.check(tables, work, request, 3)

    assert all(0 < bags.missing.sum() < bags.keys.size for bags in request)
    for bags, population in zip(request, tables.populations, strict=True):
        np.testing.assert_array_equal(bags.keys[~bags.missing], population[bags.places][~bags.missing])
        assert not np.isin(bags.keys[bags.missing], population).any()


@pytest.mark.parametrize(("spoil", "message"), [(lose_a_row, "told as missing"), (spoil_a_row, "pool: sums")])
def test_a_pooled_lookup_that_is_wrong_is_found(small_pool, spoil, message):
    tables, work, request = small_pool
    bags = request[1]
    spoil(tables.filled[1].cache, bags.keys[~bags.missing][:1])
    tables.filled[1].cache.stream.synchronize()

    with pytest.raises(WrongAnswerError, match=message):
        pooling.check(tables, work, request, 3)


def test_every_timed_launch_of_a_request_lists_what_it_lacks(device, monkeypatch):
    tables, missed_keys = Tables(device, None, 8, 1, 300), []

    def take_turns(contenders, rounds):
        for _ in range(rounds):
            contenders[0]()
            missed_keys.append(tables.filled[0].cache.stats().missed_keys)
        return [(1.0,)]

    monkeypatch.setattr(pooling, "take_turns", take_turns)
    places = positions("uniform", tables.populations[0].size, 60)
    pooling.pooled(tables, "absent", "uniform", places, (5, 3, 0.5), 4, 1.0)
    tables.close()

    requests = [pooling.request_of(tables, places, 5, 3, number, 0.5) for number in range(pooling.WORKSPACES)]
    missing = sum(int(bags.missing.sum()) for [bags] in requests)
    assert missing > 0
    assert np.diff(missed_keys).tolist() == [missing] * 3


def test_a_request_deals_its_keys_to_the_tables_evenly():
    class Held:
        populations = (np.arange(100, 150), np.arange(200, 250), np.arange(300, 350))

    request = lookups.Request.of(Held, np.array([4, 0, 7, 9, 4]))

    assert [of_table.tolist() for of_table in request.keys] == [[104, 100], [207, 209], [304]]
    assert [of_table.tolist() for of_table in request.places] == [[4, 0], [7, 9], [4]]


@pytest.mark.parametrize("row_dtype", FORMS)
def test_rows_with_known_slots_are_those_of_the_numbers(device, row_dtype):
    known, stream = KnownRows(device, Layout(32, row_dtype), 100), device.stream()
    numbers, others = known.numbers(np.arange(40)), known.numbers(np.arange(1, 41))
    out = device.empty((40, 32), np.float32)

    known.queue(numbers, out, stream)
    stream.synchronize()

    known.check(numbers, out)
    with pytest.raises(WrongAnswerError, match="gather: rows differ"):
        known.check(others, out)


def test_zipf_positions_come_as_often_as_the_law_says():
    drawn = positions("zipf", 1000, 200_000)

    shares = np.arange(1, 1001) ** -1.05
    expected = 200_000 * shares[:20] / shares.sum()
    found = np.bincount(drawn, minlength=1000)[:20]
    assert (np.abs(found - expected) < 5 * np.sqrt(expected)).all()  # five standard deviations
    assert drawn.max() < 1000


def test_contenders_take_turns_after_a_warm_up():
    asked = []

    def contender(name, us):
        return lambda: asked.append(name) or us

    rounds = take_turns([contender("ours", 2.0), contender("peer", 3.0)], 3)

    assert rounds == [(2.0, 3.0)] * 3
    assert asked == ["ours"] * WARM_UPS + ["peer"] * WARM_UPS + ["peer", "ours", "ours", "peer", "peer", "ours"]


def test_a_records_ratio_is_the_median_over_rounds_of_the_peers_time_over_ours():
    record = Record.of("query", [(1.0, 2.0), (4.0, 4.0), (2.0, 6.0)], "peer", batch=7)

    assert (record.median_us, record.spread, record.ratio) == (2.0, (1.0, 4.0), 2.0)
    assert Record.of("query", [(1.0,)], "absent: no GPU").ratio is None


def query_record(dim, batch, median_us, byte_limit_ratio):
    rounds = [(median_us, 0.9 * median_us)]
    form = {"dim": dim, "dtype": "fp32", "batch": batch, "distribution": "uniform", "hit_rate": 1.0, "line_keys": 15}
    return Record.of(
        "query", rounds, "the gather", **form, byte_limit_ratio=byte_limit_ratio, gkeys_per_s=batch / median_us / 1e3
    )


def test_targets_are_held_against_the_worst_of_the_large_batches(capsys):
    records = [
        query_record(32, 1 << 10, 5.0, 0.1),
        query_record(32, 1 << 19, 60.0, 0.70),
        query_record(32, 1 << 20, 120.0, 0.85),
        query_record(64, 1 << 20, 200.0, 0.60),
        Record.of("query_graph", [(7.0, 2.0)], "nothing", batch=1 << 10, dim=32, distribution="uniform"),
    ]

    targets.print_table(records)

    lines = capsys.readouterr().out.splitlines()
    verdicts = {line[:52].strip(): line.split()[-2:] for line in lines[1:]}
    assert verdicts["query, dim 32 fp32, of the byte limit"] == ["0.70", "pass"]
    assert verdicts["query, dim 64 fp32, of the byte limit"] == ["0.60", "FAIL"]
    assert verdicts["query, dim 32 fp32, of the gather"] == ["0.90", "goal"]
    assert verdicts["1024 keys in a graph, us"] == ["7.00", "pass"]
    assert verdicts["query, dim 128 fp32, of the byte limit"] == ["-", "-"]
    assert len(verdicts) == len(targets.TARGETS)


def test_a_picture_is_drawn_of_the_queries(tmp_path):
    draw([query_record(32, 1 << n, 2.0**n, 0.5) for n in range(10, 13)], "some GPU", tmp_path / "out.png")

    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_pytorch_answers_what_the_caches_do(runner):
    weights = rows_of(np, np.arange(50), 8, "fp32")
    places, offsets = np.array([3, 3, 49, 0, 7]), np.array([0, 2, 2, 5], dtype=np.int32)
    peer = TorchPeer(runner, "cpu")
    table, indices = peer.tensor(runner.xp.asarray(weights)), peer.indices(places)

    rows = peer.host(peer.embedding(table, indices))
    sums = peer.host(peer.embedding_bag(table, indices, peer.indices(offsets)))

    np.testing.assert_array_equal(rows, weights[places])
    np.testing.assert_array_equal(sums, [weights[3] * 2, np.zeros(8), weights[49] + weights[0] + weights[7]])
    assert peer.contender(lambda: peer.embedding(table, indices), 2)() > 0


def test_pytorch_is_absent_where_there_is_no_gpu(runner):
    assert open_peer(runner) == (None, "absent: runner is no GPU")


def test_what_needs_a_package_that_is_not_there_is_absent_and_no_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "serving", None)
    unmeasured = ("predictions", predictions.measure(None, QUICK))
    monkeypatch.setattr(benchmark, "measurements", lambda device, sizes: [unmeasured])
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "runner", "--json", str(tmp_path / "out.json")])

    assert benchmark.main() == 0

    assert "serving" in json.loads((tmp_path / "out.json").read_text())["absent"]["predictions"]
    assert "predictions: absent: " in capsys.readouterr().out
