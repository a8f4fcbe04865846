"""Every counter of /metrics and /status against a count of random requests made by hand."""

import random
from collections import Counter
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.errors import StoreError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.opening import Runtime
from serving.repository import ModelRepository
from serving.storage.rocksdb.table import RocksDbTable
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import DEEP, KEYS, write_lookup_model, write_ps
from tests.tools.redis_servers import wait_until
from tests.tools.tiny_model import TinyModel

MODEL = TinyModel(tables={"user": 1, "item": 2}, rows=200, max_batchsize=8)
TABLES = ("user", "item")
UNKNOWN = range(1000, 1030)
RAM = {"volatile_db": {"type": "hash_map"}}


def over_rocksdb(**of_ram):
    rocksdb = {"type": "rocks_db", "path": "rows", "num_threads": 1}
    return {"volatile_db": {"type": "hash_map", "capacity_rows": 100, **of_ram}, "persistent_db": rocksdb}


class Oracle:
    """What requests must have counted: a few lines of Python, and no code of the server."""

    def __init__(self):
        self.requests, self.samples = Counter(), 0
        self.keys, self.known, self.defaulted = Counter(), Counter(), Counter()

    def answered(self, samples):
        self.samples += len(samples)
        for sample in samples:
            user, *items = sample["keys"]
            for table, bags in (("user", [user]), ("item", items)):
                for key in (key for bag in bags for key in bag):
                    self.keys[table] += 1
                    (self.defaulted if key in UNKNOWN else self.known)[table] += 1


class Metrics:
    """The metrics page, and the status."""

    def __init__(self, client):
        page = client.get("/metrics").text
        self._samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        self.status = client.get("/status").json()

    def __call__(self, name, **labels):
        """The sum of the samples that have these labels."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def table(self, name):
        [version] = self.status["models"][0]["versions"]
        return next(one for one in version["tables"] if one["name"] == name)


@contextmanager
def serving(folder, tiers, device="cpu", **ps):
    MODEL.write(folder, "ctr", 3)
    write_ps(folder, **tiers, **ps)
    with ModelRepository(folder, Runtime(device=device)) as repository:
        repository.load()
        yield Client(create_app(FrontEnd(repository)))


def random_samples(rng):
    def bag():
        return [
            rng.choice(UNKNOWN) if rng.random() < 0.125 else rng.randrange(MODEL.rows) for _ in range(rng.randrange(4))
        ]

    return [{"dense": [0.5, 1, 2], "keys": [bag(), bag(), bag()]} for _ in range(rng.randint(1, 4))]


def ask(client, oracle, samples):
    answer = client.post("/predict/ctr", {"samples": samples})
    oracle.requests[str(answer.status_code)] += 1
    if answer.status_code == 200:
        before = sum(oracle.defaulted.values())
        oracle.answered(samples)
        assert answer.json()["defaulted_keys"] == sum(oracle.defaulted.values()) - before


def random_traffic(client, oracle, requests=40):
    rng = random.Random(7)
    for number in range(requests):
        samples = random_samples(rng)
        if number % 10 == 3:
            samples[0]["dense"] = ["x"]
        ask(client, oracle, samples)
        if number % 10 == 7:
            assert client.post("/predict/absent", {"samples": samples}).status_code == 404


def check_requests(metrics, oracle):
    assert oracle.requests["400"] == 4
    by_code = {code: metrics("hotrow_requests_total", model="ctr", code=code) for code in oracle.requests}
    assert by_code == oracle.requests
    assert metrics("hotrow_requests_total", model="", code="404") == 4
    assert metrics("hotrow_request_seconds_count", model="ctr") == sum(oracle.requests.values())
    assert metrics("hotrow_samples_total", model="ctr") == oracle.samples
    assert metrics("hotrow_requests_in_flight") == 0
    [model] = metrics.status["models"]
    assert (model["requests"], model["samples"]) == (oracle.requests, oracle.samples)
    assert metrics.status["unmatched_requests"] == {"404": 4}
    for table in TABLES:
        assert metrics("hotrow_lookup_keys_total", table=table) == oracle.keys[table]
        assert metrics("hotrow_defaulted_keys_total", table=table) == oracle.defaulted[table]
        shown = metrics.table(table)
        assert (shown["keys"], shown["defaulted_keys"]) == (oracle.keys[table], oracle.defaulted[table])


def hits_and_misses(metrics, table, tier):
    of_tier = {"table": table, "tier": tier}
    hits, misses = (metrics(f"hotrow_tier_{name}_total", **of_tier) for name in ("hits", "misses"))
    [shown] = [one for one in metrics.table(table)["tiers"] if one["name"] == tier]
    assert (shown["hits"], shown["misses"]) == (hits, misses)
    assert metrics("hotrow_tier_hit_ratio", **of_tier) == pytest.approx(hits / (hits + misses))
    return hits, misses


def test_ram_holds_every_known_key(tmp_path):
    oracle = Oracle()
    with serving(tmp_path, RAM) as client:
        random_traffic(client, oracle)
        metrics = Metrics(client)

    check_requests(metrics, oracle)
    for table in TABLES:
        assert hits_and_misses(metrics, table, "memory") == (oracle.known[table], oracle.defaulted[table])
        assert metrics("hotrow_tier_rows", table=table) == MODEL.rows


def test_rocksdb_is_asked_for_what_ram_does_not_hold(tmp_path):
    oracle = Oracle()
    with serving(tmp_path, over_rocksdb()) as client:
        held = {table: metrics_rows(client, table) for table in TABLES}
        random_traffic(client, oracle)
        metrics = Metrics(client)

    check_requests(metrics, oracle)
    for table in TABLES:
        hits, misses = hits_and_misses(metrics, table, "memory")
        assert hits + misses == oracle.keys[table]
        assert 0 < hits < oracle.known[table]
        assert hits_and_misses(metrics, table, "rocksdb") == (oracle.known[table] - hits, oracle.defaulted[table])
        assert metrics("hotrow_tier_rows", table=table, tier="memory") == held[table]
        assert metrics("hotrow_tier_errors_total", table=table) == 0


def metrics_rows(client, table):
    return Metrics(client)("hotrow_tier_rows", table=table, tier="memory")


def test_rows_in_ram_are_those_at_the_start_and_the_promoted_rows_less_the_evicted_rows(tmp_path):
    oracle = Oracle()
    tiers = over_rocksdb(cache_missed_embeddings=True, overflow_policy="evict_random")
    MODEL.write(tmp_path, "ctr", 3)
    write_ps(tmp_path, **tiers)
    with ModelRepository(tmp_path) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        held = {table: metrics_rows(client, table) for table in TABLES}
        random_traffic(client, oracle)
        assert repository.models()["ctr"].embedding_cache.server.wait_for_promotions(30)
        metrics = Metrics(client)

    check_requests(metrics, oracle)
    for table in TABLES:
        of_ram = {"table": table, "tier": "memory"}
        promoted = metrics("hotrow_tier_promoted_rows_total", **of_ram)
        evicted = metrics("hotrow_tier_evicted_rows_total", **of_ram)
        assert promoted > 0
        assert metrics("hotrow_tier_rows", **of_ram) == held[table] + promoted - evicted


@pytest.mark.parametrize("tiers", [RAM, over_rocksdb()], ids=["RAM", "RAM and RocksDB"])
def test_behind_a_gpu_cache_unknown_keys_and_duplicates_count_each_time(tmp_path, tiers):
    oracle = Oracle()
    with serving(tmp_path, tiers, device="runner") as client:
        random_traffic(client, oracle)
        metrics = Metrics(client)

    check_requests(metrics, oracle)
    names = ["memory", *(["rocksdb"] if "persistent_db" in tiers else [])]
    for table in TABLES:
        hits, misses, absent = (
            metrics(f"hotrow_gpu_cache_{name}_total", table=table) for name in ("hits", "misses", "absent_keys")
        )
        assert hits + misses + absent == oracle.keys[table]
        assert absent > 0
        in_tiers = {name: hits_and_misses(metrics, table, name) for name in names}
        assert sum(in_tiers["memory"]) == misses
        assert hits + sum(of_tier for of_tier, _ in in_tiers.values()) == oracle.known[table]
        assert in_tiers[names[-1]][1] + absent == oracle.defaulted[table]


def test_a_model_without_a_dense_network_counts_its_keys(tmp_path):
    with ModelRepository(write_lookup_model(tmp_path)) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        for keys in ([3, 3, 5], [7, 2**40, 9]):
            tensors = [
                {"name": "KEYS", "datatype": "INT64", "shape": [5], "data": [*keys, 3, 8]},
                {"name": "NUMKEYS", "datatype": "INT32", "shape": [2], "data": [3, 2]},
            ]
            answer = client.post("/v2/models/hps_wdl/infer", {"inputs": tensors})
            assert answer.json()["parameters"]["defaulted_keys"] == 2
        metrics = Metrics(client)

    assert KEYS.tolist() == [3, 7, 2**40]
    assert len(DEEP) == 3
    for table, known, unknown in (("embedding_table1", 4, 2), ("embedding_table2", 2, 2)):
        assert metrics("hotrow_lookup_keys_total", table=table) == known + unknown
        assert metrics("hotrow_defaulted_keys_total", table=table) == unknown
        assert metrics("hotrow_tier_hits_total", table=table) == known
        assert metrics("hotrow_tier_misses_total", table=table) == unknown


def test_keys_of_requests_that_fail_are_not_counted_and_the_calls_of_the_tiers_are(tmp_path, monkeypatch):
    oracle, cold = Oracle(), MODEL.rows - 1
    with serving(tmp_path, over_rocksdb()) as client:
        fetch = RocksDbTable.fetch
        for is_broken in (False, True, True, False):
            fails = StoreError("rocksdb", "ctr@3.item", "Input/output error")
            broken = Mock(side_effect=fails) if is_broken else fetch
            monkeypatch.setattr(RocksDbTable, "fetch", broken)
            ask(client, oracle, [{"dense": [1, 2, 3], "keys": [[0, 1, 1], [0], [cold, 2]]}])
        metrics = Metrics(client)

    assert oracle.requests == {"200": 2, "503": 2}
    for table in TABLES:
        assert metrics("hotrow_lookup_keys_total", table=table) == oracle.keys[table] == 6
        assert metrics("hotrow_defaulted_keys_total", table=table) == 0
    assert hits_and_misses(metrics, "user", "memory") == (12, 0)
    assert hits_and_misses(metrics, "item", "memory") == (8, 4)
    assert hits_and_misses(metrics, "item", "rocksdb") == (2, 0)
    errors = [metrics("hotrow_tier_errors_total", tier=tier) for tier in ("memory", "rocksdb")]
    assert errors == [0, 2]


def test_in_the_asynchronous_mode_keys_that_come_later_are_defaulted(tmp_path):
    cache = {"gpucache": True, "embedding_cache_mode": "asynchronous", "hit_rate_threshold": 0.0, "init_ec": False}
    with ModelRepository(write_lookup_model(tmp_path, cache), Runtime(device="runner")) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        tensors = [
            {"name": "KEYS", "datatype": "INT64", "shape": [4], "data": [3, 3, 5, 7]},
            {"name": "NUMKEYS", "datatype": "INT32", "shape": [2], "data": [3, 1]},
        ]

        def ask_for_rows():
            return client.post("/v2/models/hps_wdl/infer", {"inputs": tensors}).json()["parameters"]["defaulted_keys"]

        defaulted = [ask_for_rows()]
        wait_until(lambda: Metrics(client)("hotrow_gpu_cache_admitted_rows_total") == 2, "the known rows are inserted")
        defaulted += [ask_for_rows(), ask_for_rows()]
        metrics = Metrics(client)

    assert defaulted == [4, 1, 1]  # key 5 is in no tier
    assert metrics("hotrow_lookup_keys_total") == 12
    assert metrics("hotrow_defaulted_keys_total") == 6
    assert metrics("hotrow_defaulted_keys_total", table="embedding_table1") == 5
    assert metrics("hotrow_gpu_cache_late_keys_total") == 4
