"""The status document and the status page of an application without a server."""

import copy
import re

import pytest

from kernels.errors import HotrowError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.frontend.status import merged_status
from serving.opening import Runtime
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import write_lookup_model, write_ps
from tests.tools.tiny_model import TinyModel

UNKNOWN_KEY = 5000  # the tables have the keys 0 to 999


@pytest.fixture
def client(tmp_path):
    """An application with one model, of which RAM has room for a few rows."""
    TinyModel().write(tmp_path, "ctr", 3)
    rocksdb = {"type": "rocks_db", "path": str(tmp_path / "rows")}
    write_ps(tmp_path, volatile_db={"type": "hash_map", "capacity_rows": 100}, persistent_db=rocksdb)
    with ModelRepository(tmp_path) as repository:
        repository.load()
        yield Client(create_app(FrontEnd(repository)))


def predict(client, *users, model="ctr"):
    samples = [{"dense": [1, 2, 3], "keys": [list(users), [1], []]}]
    return client.post(f"/predict/{model}", {"samples": samples}).status_code


def status(client):
    return client.get("/status").json()


def test_a_server_without_requests_has_its_models_tables_and_rows(client):
    document = status(client)

    assert (document["server"], document["is_ready"], document["requests_in_flight"]) == ("hotrow", True, 0)
    assert document["memory_bytes"] > 1e6
    [model] = document["models"]
    assert (model["name"], model["requests"], model["samples"], sum(model["latency"]["counts"])) == ("ctr", {}, 0, 0)
    [version] = model["versions"]
    assert (version["version"], version["state"], version["reason"]) == ("3", "READY", "")
    shapes = [(table["name"], table["slots"], table["dim"], table["keys"]) for table in version["tables"]]
    assert shapes == [("user", 1, 4, 0), ("item", 2, 4, 0)]
    memory, rocksdb = version["tables"][0]["tiers"]
    assert (memory["name"], memory["rows"], memory["rows_are_estimated"]) == ("memory", 50, False)
    assert memory["bytes"] > 50 * 4 * 4
    assert (rocksdb["name"], rocksdb["rows"], rocksdb["rows_are_estimated"]) == ("rocksdb", 1000, True)
    assert rocksdb["bytes"] is None


def test_the_documents_of_workers_add_up(client):
    predict(client, 1, UNKNOWN_KEY)
    one = status(client)
    predict(client, model="no")
    two = status(client)

    both = merged_status(copy.deepcopy([one, two]))

    [model], [of_one], [of_two] = (document["models"] for document in (both, one, two))
    assert model["requests"] == {"200": of_one["requests"]["200"] + of_two["requests"]["200"]}
    assert model["samples"] == of_one["samples"] + of_two["samples"] == 2
    assert sum(model["latency"]["counts"]) == 2
    assert both["unmatched_requests"] == two["unmatched_requests"]
    assert both["memory_bytes"] == one["memory_bytes"] + two["memory_bytes"]
    [table, _], [table_of_one, _] = (entry["versions"][0]["tables"] for entry in (model, of_one))
    assert (table["keys"], table["defaulted_keys"]) == (4, 2)
    for tier, tier_of_one in zip(table["tiers"], table_of_one["tiers"], strict=True):
        assert tier["hits"] + tier["misses"] == 2 * (tier_of_one["hits"] + tier_of_one["misses"])
        assert tier["rows"] == tier_of_one["rows"]
        assert sum(tier["fetch_times"]["counts"]) == 2 * sum(tier_of_one["fetch_times"]["counts"])
    assert merged_status([copy.deepcopy(one)]) == one


def test_the_documents_of_workers_have_the_worst_state_and_every_model(client):
    predict(client, 1)
    well, ill = status(client), status(client)
    ill |= {"is_ready": False, "state": "not ready"}
    [version] = ill["models"][0]["versions"]
    version |= {"state": "UNAVAILABLE", "reason": "tier rocksdb does not answer"}
    version["tables"][0]["tiers"][1]["is_up"] = False
    ill["models"].insert(0, copy.deepcopy(well["models"][0]) | {"name": "another"})

    for documents in ([well, ill], [ill, well]):
        both = merged_status(copy.deepcopy(documents))

        assert (both["is_ready"], both["state"]) == (False, "not ready")
        another, ctr = both["models"]
        assert (another["name"], another["samples"], ctr["samples"]) == ("another", 1, 2)
        [version] = ctr["versions"]
        assert (version["state"], version["reason"]) == ("UNAVAILABLE", "tier rocksdb does not answer")
        assert [tier["is_up"] for tier in version["tables"][0]["tiers"]] == [True, False]
    degraded = copy.deepcopy(well) | {"state": "degraded"}
    degraded["models"][0]["versions"][0]["reason"] = "tier rocksdb does not answer"
    both = merged_status([well, degraded])
    assert (both["is_ready"], both["state"]) == (True, "degraded")
    [version] = both["models"][0]["versions"]
    assert (version["state"], version["reason"]) == ("READY", "tier rocksdb does not answer")


def test_requests_and_keys_are_counted(client):
    codes = [
        predict(client, 1, 2, UNKNOWN_KEY),
        predict(client, 999),
        predict(client, "x"),
        predict(client, model="no"),
    ]

    document = status(client)

    assert codes == [200, 200, 400, 404]
    [model] = document["models"]
    assert (model["requests"], model["samples"]) == ({"200": 2, "400": 1}, 2)
    assert sum(model["latency"]["counts"]) == 3
    assert document["unmatched_requests"] == {"404": 1}
    user, item = model["versions"][0]["tables"]
    assert (user["keys"], user["defaulted_keys"], item["keys"], item["defaulted_keys"]) == (4, 1, 2, 0)
    memory, rocksdb = user["tiers"]
    assert memory["hits"] + memory["misses"] == 4
    assert rocksdb["hits"] + rocksdb["misses"] == memory["misses"]
    assert memory["hits"] + rocksdb["hits"] + user["defaulted_keys"] == user["keys"]
    assert sum(rocksdb["fetch_times"]["counts"]) >= 1


def test_uptime_grows_from_one_reading_to_the_next(client):
    first, second = status(client), status(client)

    assert 0 < first["uptime_s"] < second["uptime_s"]
    assert first["time_s"] <= second["time_s"]


def test_a_gpu_cache_is_the_first_tier_and_its_hits_count_as_keys(tmp_path):
    TinyModel().write(tmp_path, "ctr", 3)
    with ModelRepository(tmp_path, Runtime(device="runner")) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        for _ in range(4):
            predict(client, 1, 2, 3)

        [version] = status(client)["models"][0]["versions"]

    cache, memory = version["tables"][0]["tiers"]
    assert (cache["name"], memory["name"]) == ("runner", "memory")
    assert cache["hits"] + cache["misses"] == 12
    assert cache["hits"] > 0
    assert memory["hits"] == 12 - cache["hits"]
    assert version["tables"][0]["keys"] == 12
    assert (cache["fetch_times"], cache["bytes"] > 0) == (None, True)


def test_loaded_and_unloaded_versions_are_told_apart(tmp_path):
    for version in (3, 4):
        TinyModel(seed=version).write(tmp_path, "ctr", version)
    TinyModel().write(tmp_path, "waiting", 1)
    (tmp_path / "ctr" / "config.pbtxt").write_text('backend: "python"\nversion_policy: { all { } }\n')
    with ModelRepository(tmp_path, control="explicit", startup=("ctr",)) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        predict(client, 1, 2)
        loaded = status(client)
        repository.unload_model("ctr")
        unloaded = status(client)

    ctr, waiting = loaded["models"]
    shown = [(one["version"], one["state"], [table["keys"] for table in one["tables"]]) for one in ctr["versions"]]
    assert shown == [("3", "READY", [0, 0]), ("4", "READY", [2, 1])]  # the newest version answers
    assert (waiting["name"], waiting["versions"]) == ("waiting", [])
    ctr, _ = unloaded["models"]
    assert (ctr["requests"], unloaded["is_ready"]) == ({"200": 1}, True)
    assert [(one["state"], one["reason"], one["tables"]) for one in ctr["versions"]] == [
        ("UNAVAILABLE", "unloaded", []),
        ("UNAVAILABLE", "unloaded", []),
    ]


def test_the_status_has_the_states_and_reasons_of_the_index(tmp_path):
    version = TinyModel().write(tmp_path, "ctr")
    TinyModel().write(tmp_path, "broken")
    (tmp_path / "broken" / "config.pbtxt").write_text('name: "other"')
    with ModelRepository(tmp_path, control="explicit", startup=("ctr",)) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        (version / "dense.model").write_bytes(b"1234")
        for name in ("ctr", "broken"):
            with pytest.raises(HotrowError):
                repository.load_model(name)
        shown = status(client)
        index = client.post("/v2/repository/index", {}).json()

    fields = ("version", "state", "reason")
    versions = [(model["name"], version) for model in shown["models"] for version in model["versions"]]
    found = [(name, *map(version.get, fields)) for name, version in versions]
    assert found == [(one["name"], *map(one.get, fields)) for one in index]
    assert [place[:3] for place in found] == [("broken", "", "UNAVAILABLE"), ("ctr", "1", "READY")]
    assert all(reason for *_, reason in found)


def test_a_model_without_a_dense_network_has_its_tables(tmp_path):
    with ModelRepository(write_lookup_model(tmp_path)) as repository:
        repository.load()
        [model] = status(Client(create_app(FrontEnd(repository))))["models"]

    tables = model["versions"][0]["tables"]
    assert [(table["name"], table["dim"], table["tiers"][0]["rows"]) for table in tables] == [
        ("embedding_table1", 2, 3),
        ("embedding_table2", 4, 3),
    ]


def test_the_page_loads_nothing_from_another_server(client):
    page = client.get("/")

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    urls = set(re.findall(r"https?://[^\s\"']+", page.text))
    assert urls == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody loads
    assert not re.search(r"\bsrc=|@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write", page.text)


def test_the_links_of_the_page_lead_to_routes(client):
    links = re.findall(r'<a href="([^"]+)"', client.get("/").text)

    assert links
    assert [client.get(f"/{link}").status_code for link in links] == [200] * len(links)
