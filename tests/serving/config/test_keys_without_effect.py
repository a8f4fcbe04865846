"""Keys of a ``ps.json`` without effect are reported in the log, in `hotrow check` and in the docs."""

import logging
from pathlib import Path

import pytest

from serving.cli.main import main
from serving.config import read_ps_config
from serving.config.keys_without_effect import TABLE
from serving.parameter_server import ParameterServer
from tests.serving.ps_files import listed, write_ps


@pytest.fixture
def write(write_model, tmp_path):
    """Return a function that writes a ps.json of one model, with additional keys of the model and of the file."""
    model = write_model(write_model.table(slots=3, dim=4), features=2)

    def write(in_model=None, **tiers):
        return write_ps(tmp_path, [listed(model.config_file, **in_model or {})], **tiers)

    return write


ROCKS = {"type": "rocks_db", "path": "rows"}
CASES = [
    pytest.param(
        {"update_source": {"type": "none", "brokers": "127.0.0.1:9092", "max_commit_interval": 32}},
        ["update_source.brokers, update_source.max_commit_interval: no effect: updates are not read from Kafka"],
        id="one line for all keys of one reason",
    ),
    pytest.param(
        {"volatile_db": {"type": "map", "update_filters": [".+"]}, "persistent_db": ROCKS | {"update_filters": []}},
        ["volatile_db.update_filters, persistent_db.update_filters: no effect: updates are not read from Kafka"],
        id="one line for both tiers",
    ),
    pytest.param(
        {"volatile_db": {"type": "hash_map", "cache_missed_embeddings": True}},
        ["volatile_db.cache_missed_embeddings: no effect: there is no slower tier to copy rows from"],
        id="promotion without a slower tier",
    ),
    pytest.param(
        {"volatile_db": {"type": "hash_map", "overflow_margin": 9, "num_partitions": 2, "overflow_policy": "random"}},
        [],
        id="a bound has its policy and its partitions",
    ),
    pytest.param(
        {"volatile_db": {"type": "hash_map", "capacity_rows": 9, "overflow_resolution_target": 0.5}},
        [
            "volatile_db.overflow_resolution_target: no effect: no row is evicted without an overflow_margin or a "
            "capacity with an overflow_policy"
        ],
        id="a capacity without a policy evicts nothing",
    ),
    pytest.param(
        {
            "volatile_db": {
                "type": "hash_map",
                "overflow_margin": 9,
                "overflow_policy": "evict_random",
                "refresh_time_after_fetch": True,
            }
        },
        ["volatile_db.refresh_time_after_fetch: no effect: the overflow_policy is not evict_oldest"],
        id="times of rows that go at random",
    ),
    pytest.param(
        {"volatile_db": {"type": "snapshot", "path": "s", "overflow_margin": 9, "max_batch_size": 9}},
        [
            "volatile_db.max_batch_size: no effect: a lookup or load of any size is one pass",
            "volatile_db.overflow_margin: no effect: a snapshot holds every row",
        ],
        id="a margin of snapshots",
    ),
    pytest.param(
        {"volatile_db": {"type": "disabled", "address": "127.0.0.1:7000"}, "persistent_db": ROCKS},
        ["volatile_db.address: no effect: the type is disabled"],
        id="a disabled tier",
    ),
    pytest.param(
        {
            "volatile_db": {"type": "none", "capacity_rows": "many", "row_dtype": None, "path": 5},
            "persistent_db": ROCKS,
        },
        ["volatile_db.capacity_rows, volatile_db.row_dtype, volatile_db.path: no effect: the type is disabled"],
        id="values of a disabled tier, which nobody reads",
    ),
    pytest.param(
        {"volatile_db": {"type": "redis", "layout": "hashes"}},
        ["volatile_db.layout: no effect: HPS's hashes are the only layout"],
        id="the only layout",
    ),
    pytest.param(
        {"persistent_db": {"type": "disabled", "path": "rows"}},
        ["persistent_db.path: no effect: the type is disabled"],
        id="a disabled database",
    ),
    pytest.param(
        {"persistent_db": ROCKS | {"max_batch_size": 2049}},
        ["persistent_db.max_batch_size: no effect: a value above 2048 counts as 2048, because a large batch is split"],
        id="batches larger than the database has them",
    ),
    pytest.param({"persistent_db": ROCKS | {"max_batch_size": 2048}}, [], id="the largest batches"),
    pytest.param({"persistent_db": ROCKS}, [], id="an absent key"),
    pytest.param(
        {"in_model": {"thread_pool_size": 4}},
        ["models[0].thread_pool_size: no effect: only the embedding_cache_mode asynchronous inserts rows later"],
        id="threads that insert later where none does",
    ),
    pytest.param(
        {"in_model": {"embedding_cache_mode": "asynchronous", "thread_pool_size": 4}}, [], id="rows are inserted later"
    ),
    pytest.param(
        {"in_model": {"embedding_cache_type": "static", "gpucacheper": 0.5, "hit_rate_threshold": 0.5}},
        ["models[0].gpucacheper, models[0].hit_rate_threshold: no effect: a static cache has every row from the start"],
        id="a share of a static cache",
    ),
    pytest.param({"in_model": {"embedding_cache_type": "uvm", "enable_pagelock": True}}, [], id="uvm is page-locked"),
    pytest.param({"in_model": {"gpucache": False, "thread_pool_size": 4}}, [], id="no cache is wanted"),
    pytest.param({}, [], id="no keys"),
]


@pytest.mark.parametrize(("said", "expected"), CASES)
def test_each_key_without_effect_is_reported_once_with_the_reason(write, said, expected):
    assert list(read_ps_config(write(**said)).keys_without_effect) == expected


def test_keys_without_effect_are_logged_at_startup(write, caplog):
    file = write({"scaler": 1.0}, fuse_embedding_table=True)

    with caplog.at_level(logging.WARNING), ParameterServer.from_config(file):
        pass

    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "fuse_embedding_table: no effect: every table is looked up by its own name, which changes no answer",
        "models[0].scaler: no effect: it scales gradients, and serving has no gradients",
    ]


def test_hotrow_check_reports_keys_without_effect(write, capsys):
    file = write({"use_context_stream": False}, volatile_db={"type": "hash_map", "allocation_rate": 2**28})

    assert main(["check", str(file)]) == 0

    assert capsys.readouterr().err.splitlines() == [
        "hotrow check: warning: models[0].use_context_stream: no effect: only TensorFlow and TensorRT use contexts",
        "hotrow check: warning: volatile_db.allocation_rate: no effect: a table allocates its memory at once",
    ]


def test_the_documentation_has_the_table():
    documentation = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()

    for row in TABLE:
        keys = ", ".join(f"`{row.clause}.{key}`" if row.clause else f"`{key}`" for key in row.keys)
        assert f"| {keys} | {row.reason} |" in documentation
