"""What the values of a ``ps.json`` become."""

import pytest

from serving.config import GpuCacheConfig, GpuNetworkConfig
from serving.parameter_server.table_files import memory_needed
from tests.serving.config.conftest import in_model, in_ram, in_redis, in_shared_ram, on_disk


def test_every_stated_value_is_read(read, ps_folder):
    config = read(
        in_model(
            max_batch_size=128,
            default_value_for_each_table=[0.5, 0],
            maxnum_catfeature_query_per_table_per_sample=[7, 8],
        )
        | in_ram(capacity_rows=1000, lookup_threads=3)
        | on_disk(read_only=True, num_threads=2, max_batch_size=99, warm_up="false", catch_up_interval_ms=250)
    )

    (model,) = config.models
    assert (model.name, model.max_batchsize) == ("dcn", 128)
    assert [(t.name, t.dim, t.default_value, t.max_keys_per_sample) for t in model.tables] == [
        ("user", 4, 0.5, 7),
        ("ad", 6, 0.0, 8),
    ]
    assert model.tables[1].file == ps_folder / "model" / "1_sparse_10.model"
    ram, disk = config.volatile_db, config.persistent_db
    assert (ram.type, ram.capacity_rows, ram.lookup_threads) == ("hash_map", 1000, 3)
    assert (disk.type, disk.path, disk.read_only) == ("rocks_db", ps_folder / "db", True)
    assert (disk.num_threads, disk.max_batch_size) == (2, 99)
    assert (disk.warm_up, disk.catch_up_interval_ms) == (False, 250)


def test_absent_keys_have_hps_defaults(read):
    config = read({"models": {"embedding_table_names": ...}, "volatile_db": ..., "persistent_db": ...})

    (model,) = config.models
    assert model.max_batchsize == 64
    assert model.gpu_cache == GpuCacheConfig(wanted=True, hit_rate_threshold=0.9)
    assert (model.gpu_cache.key_bits, model.gpu_cache.line_keys) == (64, 15)
    assert model.gpu_network == GpuNetworkConfig(precision="fp32", captures_graphs=True)
    assert [table.name for table in model.tables] == ["table0", "table1"]
    assert (config.volatile_db.type, config.persistent_db.type) == ("hash_map", "disabled")
    assert config.volatile_db.lookup_threads is None


def test_a_database_warms_up_by_default_and_keeps_rows_as_the_tables_have_them(read):
    disk = read().persistent_db

    assert (disk.row_dtype, disk.warm_up, disk.catch_up_interval_ms) == (None, True, None)


@pytest.mark.parametrize("models", [[], ...])
def test_the_list_of_models_may_be_empty_or_absent(read, models):
    assert read({"models": models}).models == ()


@pytest.mark.parametrize(("wide", "key_type"), [(True, "I64"), (False, "I32")])
def test_supportlonglong_decides_the_key_type_of_every_model(read, wide, key_type):
    config = read({"supportlonglong": wide})

    assert config.models[0].key_type == config.key_type == key_type


@pytest.mark.parametrize(
    ("tier", "spelling", "meaning"),
    [
        *(("volatile_db", text, "disabled") for text in ("disabled", "disable", "none")),
        *(("volatile_db", text, "hash_map") for text in ("hash_map", "hashmap", "hash", "map")),
        *(
            ("volatile_db", text, "hash_map")
            for text in ("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map")
        ),
        ("volatile_db", "multi_process_map", "multi_process_hash_map"),
        *(("volatile_db", text, "redis_cluster") for text in ("redis_cluster", "redis")),
        *(("persistent_db", text, "rocks_db") for text in ("rocks_db", "rocksdb", "rocks")),
    ],
)
def test_types_have_the_spelling_of_hps(read, tier, spelling, meaning):
    assert getattr(read({tier: {"type": spelling}}), tier).type == meaning


def test_one_default_value_applies_to_all_tables_as_in_hps_and_the_log_warns(read, caplog):
    (model,) = read(in_model(default_value_for_each_table=[0.25])).models

    assert [table.default_value for table in model.tables] == [0.25, 0.25]
    [line] = [line for line in caplog.messages if "default_value_for_each_table" in line]
    assert line.endswith("models[0].default_value_for_each_table: the single value applies to all 2 tables, as in HPS")


def test_the_keys_of_gpus_are_read_into_their_own_records(read):
    (plain,) = read().models
    # as in the samples of HugeCTR's Triton backend and HPS
    gpu = {
        "num_of_worker_buffer_in_pool": "4", "num_of_refresher_buffer_in_pool": 3, "gpucacheper": "0.5",
        "cache_refresh_percentage_per_iteration": 0.25, "mixed_precision": True, "use_mixed_precision": False,
        "scaler": 1.0, "use_algorithm_search": True, "use_cuda_graph": False, "thread_pool_size": 0, "init_ec": False,
        "use_context_stream": True, "use_hctr_cache_implementation": False, "refresh_delay": 1, "refresh_interval": 5.5,
        "use_static_table": False, "embedding_cache_type": "uvm", "enable_pagelock": True, "fp8_quant": False,
        "deployed_device_list": [1, 0], "embedding_cache_mode": "asynchronous", "gpucache": True,
        "hit_rate_threshold": 0.75,
    }  # fmt: skip

    (model,) = read(in_model(**gpu)).models

    assert model.gpu_cache == GpuCacheConfig(
        wanted=True,
        kind="uvm",
        size_ratio=0.5,
        mode="asynchronous",
        hit_rate_threshold=0.75,
        fill="always",
        worker_buffers=4,
        insertion_threads=1,
        refresh_ratio=0.25,
        refresh_delay_s=1.0,
        refresh_interval_s=5.5,
        refresher_buffers=3,
        devices=(1, 0),
        fills_at_start=False,
    )
    assert model.gpu_network == GpuNetworkConfig(precision="fp16", captures_graphs=False)
    restored = {"gpu_cache": plain.gpu_cache, "gpu_network": plain.gpu_network}
    assert model.model_copy(update=restored) == plain


@pytest.mark.parametrize(
    ("in_file", "key", "field", "value"),
    [
        ({}, "embedding_cache_line_keys", "line_keys", 7),
        ({"supportlonglong": False}, "embedding_cache_key_bits", "key_bits", 32),
    ],
)
def test_lines_of_caches_may_have_7_keys_or_32_bit_keys(read, in_file, key, field, value):
    (plain,) = read(in_file).models

    for said in (value, str(value)):
        (model,) = read(in_file | in_model(**{key: said})).models
        assert model.gpu_cache == plain.gpu_cache.model_copy(update={field: value})


def test_products_on_a_gpu_may_use_tf32(read):
    (model,) = read(in_model(enable_tf32_compute="true", use_mixed_precision=False)).models

    assert model.gpu_network == GpuNetworkConfig(precision="tf32")


@pytest.mark.parametrize(
    "said",
    [
        {"use_static_table": True},
        {"embedding_cache_type": "static"},
        {"embedding_cache_type": "static", "use_static_table": True},
    ],
)
def test_a_static_cache_has_two_names_and_may_keep_8_bit_floats(read, said):
    (model,) = read(in_model(**said, fp8_quant=True)).models

    assert (model.gpu_cache.kind, model.gpu_cache.fp8_rows) == ("static", True)


@pytest.mark.parametrize(
    ("changes", "row_dtypes"),
    [
        ({}, ["fp32", "fp32"]),
        (in_ram(row_dtype="bf16", row_dtype_per_table={"dcn.ad": "int8"}), ["bf16", "int8"]),
        (in_shared_ram(row_dtype="bf16"), ["bf16", "bf16"]),
        (in_redis(row_dtype="int8"), ["int8", "int8"]),
        (in_ram(row_dtype="int8") | on_disk(row_dtype="int8"), ["int8", "int8"]),
        (in_ram(type="disabled") | on_disk(row_dtype="bf16"), ["bf16", "bf16"]),
    ],
    ids=str,
)
def test_the_tiers_decide_the_row_type_of_the_tables(read, changes, row_dtypes):
    config = read(changes)

    assert [table.row_dtype for table in config.models[0].tables] == row_dtypes
    assert config.persistent_db.row_dtype == changes.get("persistent_db", {}).get("row_dtype")


@pytest.mark.parametrize("row_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "copied", [in_ram(cache_missed_embeddings=True), on_disk(initialize_after_startup=False)], ids=str
)
def test_rows_that_are_copied_between_tiers_may_be_narrow_floats(read, row_dtype, copied):
    narrow = {tier: copied.get(tier, {}) | {"row_dtype": row_dtype} for tier in ("volatile_db", "persistent_db")}

    assert read(narrow).persistent_db.row_dtype == row_dtype


def test_memory_needed_counts_the_row_type(read):
    wide, narrow = (memory_needed(read(in_ram(row_dtype=one)).models[0]) for one in ("fp32", "int8"))

    assert wide.keys() == narrow.keys()
    assert narrow["ad"] < wide["ad"]


def test_a_capacity_per_table_is_read(read):
    rows = {"dcn.ad": 3, "dcn.user": 0}

    assert read(in_ram(capacity_rows_per_table=rows)).volatile_db.capacity_rows_per_table == rows


@pytest.mark.parametrize(
    ("said", "policy"),
    [
        ({"overflow_policy": "evict_random"}, "evict_random"),
        ({"overflow_policy": "random"}, "evict_random"),
        ({"overflow_policy": "least_used"}, "evict_least_used"),
        ({"overflow_policy": "evict_oldest"}, "evict_oldest"),
        ({"overflow_policy": "oldest", "refresh_time_after_fetch": True}, "evict_oldest"),
        ({"overflow_policy": "oldest", "refresh_time_after_fetch": False}, "evict_oldest_written"),
        ({}, "evict_random"),
    ],
    ids=str,
)
def test_a_margin_of_each_partition_bounds_each_table_and_evicts_by_the_policy(read, said, policy):
    tier = read(in_ram(num_partitions=8, overflow_margin="1000", **said)).volatile_db

    assert (tier.capacity_rows_of_each_table, tier.overflow_policy) == (8000, policy)
    assert tier.overflow_resolution_target == 0.8


def test_the_default_margin_of_hps_is_no_limit(read):
    assert read(in_ram(overflow_margin=2**64 - 1)).volatile_db == read().volatile_db


def test_a_capacity_refuses_rows_unless_a_policy_is_given(read):
    silent = read(in_ram(capacity_rows=10)).volatile_db
    evicting = read(in_ram(capacity_rows=10, overflow_policy="oldest")).volatile_db

    assert (silent.capacity_rows, silent.overflow_policy) == (10, None)
    assert (evicting.capacity_rows, evicting.overflow_policy) == (10, "evict_oldest")


@pytest.mark.parametrize("folder", ["hot", "/elsewhere/hot"])
def test_the_folder_of_hot_keys_is_relative_to_the_file(read, ps_folder, folder):
    assert read(in_ram(hot_keys=folder)).volatile_db.hot_keys == ps_folder / folder


@pytest.mark.parametrize(
    ("keys", "overflow"),
    [
        ({}, None),
        ({"overflow_margin": 2**64 - 1}, None),
        ({"overflow_policy": "evict_oldest", "overflow_resolution_target": 0.5}, None),
        ({"overflow_margin": 1000}, (1000, "random", 0.8, True)),
        ({"overflow_margin": 1000, "overflow_policy": "evict_least_used"}, (1000, "least_used", 0.8, True)),
        (
            {"overflow_margin": 7, "overflow_policy": "oldest", "refresh_time_after_fetch": False},
            (7, "oldest", 0.8, False),
        ),
        (
            {"overflow_margin": 7, "overflow_policy": "random", "overflow_resolution_target": 0.5},
            (7, "random", 0.5, True),
        ),
    ],
)
def test_redis_evicts_rows_only_if_a_margin_is_set(read, keys, overflow):
    rule = read(in_redis(**keys)).volatile_db.overflow

    assert (rule and (rule.margin_rows, rule.policy, rule.target_ratio, rule.refreshes)) == overflow


def test_redis_has_the_defaults_of_hps(read):
    redis = read(in_redis()).volatile_db

    assert (redis.addresses, redis.user_name, redis.tls) == ((("127.0.0.1", 7000),), "default", None)
    assert redis.password.get_secret_value() == ""
    assert (redis.num_partitions, redis.num_node_connections, redis.max_batch_size) == (16, 5, 65536)
    assert (redis.row_dtype, redis.connect_timeout_ms, redis.timeout_ms) == (None, 500, 2000)


def test_every_stated_value_of_redis_is_read(read, ps_folder):
    said = {
        "address": "10.0.0.1:7000;host-b.local:7001, [::1]:7002",
        "user_name": "hotrow",
        "password": "open sesame",
        "num_partitions": "8",
        "num_node_connections": 3,
        "max_batch_size": 1000,
        "row_dtype": "bf16",
        "connect_timeout_ms": 50,
        "timeout_ms": 70,
        "enable_tls": True,
        "tls_ca_certificate": "ca.crt",
        "tls_client_certificate": "certs/client.crt",
        "tls_client_key": "certs/client.key",
        "tls_server_name_identification": "redis.localhost",
    }

    config = read(in_redis(**said))

    redis = config.volatile_db
    assert redis.addresses == (("10.0.0.1", 7000), ("host-b.local", 7001), ("::1", 7002))
    assert (redis.user_name, redis.password.get_secret_value()) == ("hotrow", "open sesame")
    assert (redis.num_partitions, redis.num_node_connections, redis.max_batch_size) == (8, 3, 1000)
    assert (redis.row_dtype, redis.connect_timeout_ms, redis.timeout_ms) == ("bf16", 50, 70)
    assert redis.tls.ca_certificate == ps_folder / "ca.crt"
    assert (redis.tls.client_certificate, redis.tls.client_key) == (
        ps_folder / "certs" / "client.crt",
        ps_folder / "certs" / "client.key",
    )
    assert redis.tls.server_name == "redis.localhost"
    assert "open sesame" not in repr(config)
