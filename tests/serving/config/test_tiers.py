"""``volatile_db`` as a list: which tiers may follow each other, and which lists are refused."""

import pytest

from serving.config import read_ps_config
from serving.errors import ConfigError
from tests.serving.ps_files import listed, write_ps

RAM, REDIS = {"type": "hash_map"}, {"type": "redis_cluster"}
ROCKS = {"type": "rocks_db", "path": "rows"}


@pytest.fixture
def read(write_model, tmp_path):
    """Return a function that reads a ps.json of one model with these tiers."""
    model = write_model(write_model.table(slots=3, dim=4), features=2)

    def read(volatile_db, persistent_db=None):
        disk = {} if persistent_db is None else {"persistent_db": persistent_db}
        return read_ps_config(write_ps(tmp_path, [listed(model.config_file)], volatile_db=volatile_db, **disk))

    return read


def test_tiers_are_in_the_order_of_the_list(read):
    config = read([RAM | {"capacity_rows": 10}, REDIS | {"address": "10.0.0.1:7000"}], ROCKS)

    ram, redis = config.volatile_tiers
    assert (ram.type, ram.capacity_rows) == ("hash_map", 10)
    assert (redis.type, redis.addresses) == ("redis_cluster", (("10.0.0.1", 7000),))
    assert config.volatile_db == ram


@pytest.mark.parametrize("clause", [RAM, REDIS, {"type": "snapshot", "path": "s"}, {"type": "multi_process_hash_map"}])
def test_a_list_of_one_tier_is_that_tier(read, clause):
    alone = read(clause)

    assert read([clause]) == alone
    assert alone.volatile_tiers == (alone.volatile_db,)


def test_a_disabled_tier_is_no_tier(read):
    assert read({"type": "disabled"}, ROCKS).volatile_tiers == ()


@pytest.mark.parametrize(
    ("volatile", "persistent", "path", "reason"),
    [
        ([], ROCKS, "volatile_db", "expected a list that is not empty"),
        ([RAM, RAM], ROCKS, "volatile_db[1].type", "two tiers of the type hash_map"),
        ([REDIS, REDIS], ROCKS, "volatile_db[1].type", "two tiers of the type redis_cluster"),
        ([REDIS, RAM], ROCKS, "volatile_db[1].type", "redis_cluster is slower than hash_map"),
        ([RAM, REDIS, RAM], ROCKS, "volatile_db[2].type", "redis_cluster is slower than hash_map"),
        (
            [{"type": "disabled"}, REDIS],
            ROCKS,
            "volatile_db[0].type",
            "expected hash_map and redis_cluster in a list of tiers, got dis",
        ),
        ([{"type": "snapshot", "path": "s"}, REDIS], None, "volatile_db[0].type", "which has every row"),
        ([RAM, {"type": "snapshot", "path": "s"}], None, "volatile_db[1].type", "which has every row"),
        ([{"type": "multi_process_hash_map"}, REDIS], None, "volatile_db[0].type", "which has every row"),
        ([{"type": "disabled"}], None, "", "both disabled"),
        ([{"type": "snapshot", "path": "s"}], ROCKS, "persistent_db.type", "would never be read"),
        ([RAM, REDIS | {"overflow_margin": 9}], None, "volatile_db[1].overflow_margin", "another tier must hold"),
        ([RAM, REDIS | {"capacity_rows": 9}], ROCKS, "volatile_db[1]", "capacity_rows: only a hash_map has it"),
        ([RAM | {"capacity_row": 9}, REDIS], ROCKS, "volatile_db[0].capacity_row", "unknown key"),
        ([RAM, "redis"], ROCKS, "volatile_db[1]", "expected an object"),
        ([RAM, None], ROCKS, "volatile_db[1]", "expected an object"),
        ([RAM | {"initial_cache_rate": 0.5}], None, "volatile_db[0].initial_cache_rate", "hold the other rows"),
        (
            [RAM | {"capacity_rows_per_table": {"dcn.user": 9}}, REDIS],
            ROCKS,
            "volatile_db[0].capacity_rows_per_table",
            "no model has a table 'dcn.user'",
        ),
        (
            [RAM | {"row_dtype": "fp16"}, REDIS | {"row_dtype": "int8"}],
            ROCKS,
            "volatile_db[1].row_dtype",
            "'int8', but volatile_db[0].row_dtype makes the rows of table 'dcn.table0' 'fp16'",
        ),
        (
            [RAM | {"row_dtype": "int8", "cache_missed_embeddings": True}, REDIS | {"row_dtype": "int8"}],
            ROCKS,
            "volatile_db[1].row_dtype",
            "volatile_db[0].cache_missed_embeddings is true: rows copied from",
        ),
        (
            [RAM | {"row_dtype": "int8", "cache_missed_embeddings": True}, REDIS],
            ROCKS | {"row_dtype": "int8"},
            "persistent_db.row_dtype",
            "volatile_db[0].cache_missed_embeddings is true: rows copied from",
        ),
    ],
)
def test_tiers_that_do_not_fit_together_are_refused_with_the_path(read, volatile, persistent, path, reason):
    with pytest.raises(ConfigError) as caught:
        read(volatile, persistent)

    assert (caught.value.path, reason in caught.value.reason) == (path, True), caught.value


@pytest.mark.parametrize(
    "ram", [RAM | {"initialize_after_startup": False}, RAM | {"initial_cache_rate": 0.5}, RAM | {"capacity_rows": 5}]
)
def test_ram_before_redis_need_not_hold_every_row(read, ram):
    assert [tier.type for tier in read([ram, REDIS]).volatile_tiers] == ["hash_map", "redis_cluster"]


def test_the_fastest_tier_decides_the_row_type(read):
    (model,) = read([RAM | {"row_dtype": "bf16"}, REDIS | {"row_dtype": "bf16"}], ROCKS).models

    assert [table.row_dtype for table in model.tables] == ["bf16"]


def test_a_key_without_effect_is_reported_with_its_place_in_the_list(read):
    config = read([RAM | {"address": "10.0.0.1:7000", "cache_missed_embeddings": True}, REDIS])

    assert config.keys_without_effect == ("volatile_db[0].address: no effect: only a redis_cluster has it",)
    (line,) = read([RAM, REDIS | {"cache_missed_embeddings": True}]).keys_without_effect
    assert line.startswith("volatile_db[1].cache_missed_embeddings: no effect: there is no slower tier")
