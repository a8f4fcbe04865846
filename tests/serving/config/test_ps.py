import json
import traceback

import pytest

from serving.config import GpuCacheConfig, GpuNetworkConfig, read_ps_config
from serving.errors import ConfigError
from serving.parameter_server.table_files import memory_needed


@pytest.fixture
def ps(write_model, tmp_path):
    """A ps.json with many keys, and a function that reads it after a change."""
    table = write_model.table
    write_model(table(slots=3, dim=4), table(slots=2, dim=6), features=5)
    document = {
        "supportlonglong": True,
        "models": [
            {
                "model": "dcn",
                "sparse_files": ["model/0_sparse_10.model", "model/1_sparse_10.model"],
                "dense_file": "model/_dense_10.model",
                "network_file": "model/model.json",
                "max_batch_size": 128,
                "gpucache": False,
                "hit_rate_threshold": 0.8,
                "embedding_table_names": ["user", "ad"],
                "embedding_vecsize_per_table": [4, 6],
                "default_value_for_each_table": [0.5, 0],
                "maxnum_catfeature_query_per_table_per_sample": [7, 8],
                "maxnum_des_feature_per_sample": 5,
                "deployed_device_list": [0],
                "label_dim": 1,
                "slot_num": 5,
            }
        ],
        "volatile_db": {"type": "parallel_hash_map", "capacity_rows": 1000},
        "persistent_db": {"type": "rocks_db", "path": "db", "read_only": True, "num_threads": 2, "max_batch_size": 99},
    }

    def read(change=None):
        if change is not None:
            change(document)
        (tmp_path / "ps.json").write_text(json.dumps(document))
        return read_ps_config(tmp_path / "ps.json")

    return read


NO_TIER = {"type": "disabled"}


def rows_per_table(value):
    """Give each table its own capacity instead of a shared capacity."""

    def change(document):
        document["volatile_db"] = {"type": "hash_map", "capacity_rows_per_table": value}

    return change


def test_a_capacity_per_table_is_read(ps):
    config = ps(rows_per_table({"dcn.ad": 3, "dcn.user": 0}))

    assert config.volatile_db.capacity_rows_per_table == {"dcn.ad": 3, "dcn.user": 0}


def test_row_types_are_read_for_all_tables_and_for_some(ps):
    unsaid = ps()
    said = ps(in_tier("volatile_db", row_dtype="bf16", row_dtype_per_table={"dcn.ad": "int8"}))

    assert [table.row_dtype for table in unsaid.models[0].tables] == ["fp32", "fp32"]
    assert [(table.name, table.row_dtype) for table in said.models[0].tables] == [("user", "bf16"), ("ad", "int8")]


def test_memory_needed_counts_the_row_type(ps):
    wide, narrow = (memory_needed(ps(in_tier("volatile_db", row_dtype=one)).models[0]) for one in ("fp32", "int8"))

    assert wide.keys() == narrow.keys()
    assert narrow["ad"] < wide["ad"]


def test_every_stated_value_is_read(ps, tmp_path):
    config = ps()

    (model,) = config.models
    assert (model.name, model.max_batchsize) == ("dcn", 128)
    assert (model.gpu_cache.hit_rate_threshold, model.gpu_cache.wanted) == (0.8, False)
    assert [(t.name, t.dim, t.default_value, t.max_keys_per_sample) for t in model.tables] == [
        ("user", 4, 0.5, 7),
        ("ad", 6, 0.0, 8),
    ]
    assert model.tables[1].file == tmp_path / "model" / "1_sparse_10.model"
    assert (config.volatile_db.type, config.volatile_db.capacity_rows) == ("hash_map", 1000)
    persistent = config.persistent_db
    assert (persistent.type, persistent.path, persistent.read_only) == ("rocks_db", tmp_path / "db", True)
    assert (persistent.num_threads, persistent.max_batch_size) == (2, 99)


def test_one_default_value_applies_to_all_tables_as_in_hps_and_the_log_warns(ps, caplog):
    (model,) = ps(in_model(default_value_for_each_table=[0.25])).models

    assert [table.default_value for table in model.tables] == [0.25, 0.25]
    [line] = [line for line in caplog.messages if "default_value_for_each_table" in line]
    assert line.endswith("models[0].default_value_for_each_table: the single value applies to all 2 tables, as in HPS")


def test_a_database_keeps_narrow_rows_if_row_dtype_is_set(ps):
    def narrow(document):
        document["volatile_db"]["row_dtype"] = document["persistent_db"]["row_dtype"] = "int8"
        document["persistent_db"].update(warm_up=False, catch_up_interval_ms=250)

    wide, said = ps().persistent_db, ps(narrow).persistent_db

    assert (wide.row_dtype, wide.warm_up, wide.catch_up_interval_ms) == (None, True, None)
    assert (said.row_dtype, said.warm_up, said.catch_up_interval_ms) == ("int8", False, 250)


def test_a_database_alone_decides_the_row_type_of_the_tables(ps):
    def alone(document):
        document["volatile_db"] = {"type": "disabled"}
        document["persistent_db"]["row_dtype"] = "bf16"

    assert [table.row_dtype for table in ps(alone).models[0].tables] == ["bf16", "bf16"]


@pytest.mark.parametrize(
    ("volatile", "persistent", "named"),
    [
        ({}, "int8", r"'int8', but volatile_db\.row_dtype makes the rows of table 'dcn\.user' 'fp32'"),
        ({"row_dtype": "int8"}, "fp32", r"'fp32', but volatile_db\.row_dtype makes .* 'dcn\.user' 'int8'"),
        (
            {"row_dtype": "int8", "row_dtype_per_table": {"dcn.ad": "fp16"}},
            "int8",
            r"but volatile_db\.row_dtype_per_table\['dcn\.ad'\] makes the rows of table 'dcn\.ad' 'fp16'",
        ),
    ],
)
def test_row_types_that_differ_between_tiers_are_refused_with_both_paths(ps, volatile, persistent, named):
    def differ(document):
        document["volatile_db"].update(volatile)
        document["persistent_db"]["row_dtype"] = persistent

    with pytest.raises(ConfigError, match=named) as caught:
        ps(differ)

    assert caught.value.path == "persistent_db.row_dtype"


@pytest.mark.parametrize(
    ("tier", "key", "value"),
    [("volatile_db", "cache_missed_embeddings", True), ("persistent_db", "initialize_after_startup", False)],
)
@pytest.mark.parametrize(("row_dtype", "is_taken"), [("int8", False), ("uint8", False), ("fp16", True), ("bf16", True)])
def test_rows_that_would_be_rounded_twice_are_refused(ps, tier, key, value, row_dtype, is_taken):
    def copy(document):
        document["volatile_db"]["row_dtype"] = document["persistent_db"]["row_dtype"] = row_dtype
        document[tier][key] = value

    if is_taken:
        assert ps(copy).persistent_db.row_dtype == row_dtype
        return
    with pytest.raises(
        ConfigError, match=f"'{row_dtype}', and {tier}.{key} is {str(value).lower()}: .* twice"
    ) as caught:
        ps(copy)

    assert caught.value.path == "persistent_db.row_dtype"


def test_absent_keys_have_hps_defaults(ps):
    def only_required(document):
        keep = ("model", "sparse_files", "dense_file", "network_file")
        document["models"] = [{key: document["models"][0][key] for key in keep}]
        del document["volatile_db"], document["persistent_db"]

    config = ps(only_required)

    (model,) = config.models
    assert model.max_batchsize == 64
    assert model.gpu_cache == GpuCacheConfig(wanted=True, hit_rate_threshold=0.9)
    assert model.gpu_network == GpuNetworkConfig(precision="fp32", captures_graphs=True)
    assert [table.name for table in model.tables] == ["table0", "table1"]
    assert (config.volatile_db.type, config.persistent_db.type) == ("hash_map", "disabled")


def test_the_threads_of_a_lookup_are_unset_by_default(ps):
    assert ps().volatile_db.lookup_threads is None
    assert ps(in_tier("volatile_db", lookup_threads=3)).volatile_db.lookup_threads == 3


def test_the_list_of_models_may_be_empty_or_absent(ps):
    assert ps(lambda document: document.update(models=[])).models == ()
    assert ps(lambda document: document.pop("models")).models == ()


@pytest.mark.parametrize("wide", [True, False])
def test_supportlonglong_decides_the_key_type_of_every_model(ps, wide):
    config = ps(lambda document: document.update(supportlonglong=wide))

    assert config.models[0].key_type == config.key_type == ("I64" if wide else "I32")


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        *((text, "disabled") for text in ("disabled", "disable", "none")),
        *((text, "hash_map") for text in ("hash_map", "hashmap", "hash", "map")),
        *((text, "hash_map") for text in ("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map")),
        ("multi_process_map", "multi_process_hash_map"),
    ],
)
def test_volatile_types_have_the_spelling_of_hps(ps, spelling, meaning):
    assert ps(lambda document: document.update(volatile_db={"type": spelling})).volatile_db.type == meaning


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
def test_redis_evicts_rows_only_if_a_margin_is_set(ps, keys, overflow):
    tier = ps(in_redis(**keys)).volatile_db

    if overflow is None:
        assert tier.overflow is None
    else:
        rule = tier.overflow
        assert (rule.margin_rows, rule.policy, rule.target_ratio, rule.refreshes) == overflow


def test_redis_and_its_tables_keep_narrow_rows_if_row_dtype_is_set(ps):
    wide, narrow = ps(in_redis()), ps(in_redis(row_dtype="int8"))

    assert (wide.volatile_db.row_dtype, narrow.volatile_db.row_dtype) == (None, "int8")
    assert [table.row_dtype for table in narrow.models[0].tables] == ["int8", "int8"]


@pytest.mark.parametrize("spelling", ["redis_cluster", "redis"])
def test_redis_has_the_spelling_and_defaults_of_hps(ps, spelling):
    redis = ps(lambda document: document.update(volatile_db={"type": spelling})).volatile_db

    assert redis.type == "redis_cluster"
    assert (redis.addresses, redis.user_name, redis.tls) == ((("127.0.0.1", 7000),), "default", None)
    assert redis.password.get_secret_value() == ""
    assert (redis.num_partitions, redis.num_node_connections, redis.max_batch_size) == (16, 5, 65536)
    assert (redis.connect_timeout_ms, redis.timeout_ms) == (500, 2000)


def test_every_stated_value_of_redis_is_read(ps, tmp_path):
    said = {
        "type": "redis_cluster",
        "address": "10.0.0.1:7000;host-b.local:7001, [::1]:7002",
        "user_name": "hotrow",
        "password": "open sesame",
        "num_partitions": "8",
        "num_node_connections": 3,
        "max_batch_size": 1000,
        "connect_timeout_ms": 50,
        "timeout_ms": 70,
        "enable_tls": True,
        "tls_ca_certificate": "ca.crt",
        "tls_client_certificate": "certs/client.crt",
        "tls_client_key": "certs/client.key",
        "tls_server_name_identification": "redis.localhost",
    }

    config = ps(lambda document: document.update(volatile_db=said))

    redis = config.volatile_db
    assert redis.addresses == (("10.0.0.1", 7000), ("host-b.local", 7001), ("::1", 7002))
    assert (redis.user_name, redis.password.get_secret_value()) == ("hotrow", "open sesame")
    assert (redis.num_partitions, redis.num_node_connections, redis.max_batch_size) == (8, 3, 1000)
    assert (redis.connect_timeout_ms, redis.timeout_ms) == (50, 70)
    assert redis.tls.ca_certificate == tmp_path / "ca.crt"
    assert (redis.tls.client_certificate, redis.tls.client_key) == (
        tmp_path / "certs" / "client.crt",
        tmp_path / "certs" / "client.key",
    )
    assert redis.tls.server_name == "redis.localhost"
    assert "open sesame" not in repr(config)


@pytest.mark.parametrize(
    "volatile_db",
    [
        {"type": "redis", "password": ["open sesame"]},
        {"type": "redis", "password": {"open": "open sesame"}},
        {"type": "redis", "password": "open sesame", "num_partitions": 1},
        {"type": "redis", "password": "open sesame", "address": "nowhere"},
        [{"type": "redis", "password": ["open sesame"]}],
        [{"type": "redis", "password": "open sesame"}, {"type": "hash_map"}],
    ],
)
def test_no_error_and_no_cause_of_an_error_shows_a_password(ps, volatile_db):
    with pytest.raises(ConfigError) as caught:
        ps(lambda document: document.update(volatile_db=volatile_db))

    shown = "".join(traceback.format_exception(caught.value))
    assert "volatile_db" in shown
    assert "open sesame" not in shown


@pytest.mark.parametrize("spelling", ["rocks_db", "rocksdb", "rocks"])
def test_persistent_types_have_the_spelling_of_hps(ps, spelling):
    assert ps(lambda document: document["persistent_db"].update(type=spelling)).persistent_db.type == "rocks_db"


def test_numbers_and_booleans_may_be_strings_as_in_triton(ps):
    plain = ps()

    def quote(node):
        if isinstance(node, dict):
            return {key: quote(value) for key, value in node.items()}
        if isinstance(node, list):
            return [quote(value) for value in node]
        return node if isinstance(node, str) else str(node)  # False becomes "False"

    def change(document):
        document["models"] = quote(document["models"])
        document["supportlonglong"] = "true"

    assert ps(change) == plain


def test_the_keys_of_gpus_are_read_into_their_own_records(ps):
    plain = ps()
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

    config = ps(in_model(**gpu))

    (model,), (plain_model,) = config.models, plain.models
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
    restored = {"gpu_cache": plain_model.gpu_cache, "gpu_network": plain_model.gpu_network}
    assert model.model_copy(update=restored) == plain_model


@pytest.mark.parametrize("keys", [7, "7"])
def test_caches_may_have_lines_of_7_keys(ps, keys):
    (plain,) = ps().models
    (model,) = ps(in_model(embedding_cache_line_keys=keys)).models

    assert plain.gpu_cache.line_keys == 15
    assert model.gpu_cache == plain.gpu_cache.model_copy(update={"line_keys": 7})


def test_lines_of_32_bit_keys_have_15_keys(ps):
    def change(document):
        document["supportlonglong"] = False
        document["models"][0] |= {"embedding_cache_key_bits": 32, "embedding_cache_line_keys": 7}

    with pytest.raises(ConfigError, match="embedding_cache_line_keys: lines of 32-bit keys have 15 keys, got 7"):
        ps(change)


@pytest.mark.parametrize("bits", [32, "32"])
def test_caches_of_a_uint32_model_may_have_lines_of_32_bit_keys(ps, bits):
    (plain,) = ps(lambda document: document.update(supportlonglong=False)).models
    (model,) = ps(in_model(embedding_cache_key_bits=bits)).models

    assert (plain.key_type, plain.gpu_cache.key_bits) == ("I32", 64)
    assert model.gpu_cache == plain.gpu_cache.model_copy(update={"key_bits": 32})


def test_products_on_a_gpu_may_use_tf32(ps):
    (model,) = ps(in_model(enable_tf32_compute="true", use_mixed_precision=False)).models

    assert model.gpu_network == GpuNetworkConfig(precision="tf32")


@pytest.mark.parametrize(
    "said",
    [
        {"use_static_table": True},
        {"embedding_cache_type": "static"},
        {"embedding_cache_type": "static", "use_static_table": True},
    ],
)
def test_a_static_cache_has_two_names_and_may_keep_8_bit_floats(ps, said):
    (model,) = ps(in_model(**said, fp8_quant=True)).models

    assert (model.gpu_cache.kind, model.gpu_cache.fp8_rows) == ("static", True)


def test_keys_for_hps_own_stores_change_nothing(ps):
    plain = ps()

    def change(document):  # as in the samples of HugeCTR's Triton backend, old and new
        document["fuse_embedding_table"] = False
        document["volatile_db"].update(
            num_partitions=8, allocation_rate=268435456, max_batch_size=65536, max_get_batch_size=100000,
            max_set_batch_size="100000", initial_cache_rate="1.0", cache_missed_embeddings=False,
            initialize_after_startup=True, refresh_time_after_fetch=False, update_filters=["^hps_.+$"],
            address="127.0.0.1:7000", user_name="default", password="", algorithm="phm",
            num_node_connections=5, enable_tls=False, tls_ca_certificate="cacertbundle.crt",
        )  # fmt: skip
        document["persistent_db"].update(
            max_get_batch_size=10000, max_set_batch_size=10000, update_filters=[".+"], initialize_after_startup=True
        )

    config = ps(change)
    assert config.model_copy(update={"keys_without_effect": ()}) == plain
    assert len(config.keys_without_effect) == 7  # one line per reason


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
def test_a_margin_of_each_partition_bounds_each_table_and_evicts_by_the_policy(ps, said, policy):
    tier = ps(in_ram(num_partitions=8, overflow_margin="1000", **said)).volatile_db

    assert (tier.capacity_rows_of_each_table, tier.overflow_policy) == (8000, policy)
    assert tier.overflow_resolution_target == 0.8


def test_the_default_margin_of_hps_is_no_limit(ps):
    assert ps(in_ram(overflow_margin=2**64 - 1)).volatile_db == ps(in_ram()).volatile_db


def test_a_capacity_refuses_rows_unless_a_policy_is_given(ps):
    silent = ps(in_ram(capacity_rows=10)).volatile_db
    evicting = ps(in_ram(capacity_rows=10, overflow_policy="oldest")).volatile_db

    assert (silent.capacity_rows, silent.overflow_policy) == (10, None)
    assert (evicting.capacity_rows, evicting.overflow_policy) == (10, "evict_oldest")


def test_the_folder_of_hot_keys_is_relative_to_the_file(ps, tmp_path):
    assert ps(in_tier("volatile_db", hot_keys="hot")).volatile_db.hot_keys.parent.exists()
    assert ps(in_tier("volatile_db", hot_keys=str(tmp_path / "x"))).volatile_db.hot_keys == tmp_path / "x"


def test_part_of_the_rows_in_ram_needs_a_tier_with_every_row(ps):
    assert ps(in_tier("volatile_db", initial_cache_rate="0.25")).volatile_db.initial_cache_rate == 0.25

    with pytest.raises(ConfigError, match="no tier would hold the other rows") as caught:
        ps(lambda d: d.update(persistent_db={"type": "disabled"}, volatile_db={"type": "map", "initial_cache_rate": 0}))

    assert caught.value.path == "volatile_db.initial_cache_rate"


@pytest.mark.parametrize("said", ["", "model/_dense_10.model.ntp.json", "./model/../model/_dense_10.model.ntp.json"])
def test_the_parameters_that_are_not_trained_are_next_to_the_dense_file(ps, said):
    plain = ps()

    assert ps(in_model(non_trainable_params_file=said)) == plain


def test_parameters_that_are_not_trained_are_not_looked_for_elsewhere(ps):
    with pytest.raises(ConfigError, match=r"expected .*/_dense_10\.model\.ntp\.json, .*; got 'other\.json'") as caught:
        ps(in_model(non_trainable_params_file="other.json"))

    assert caught.value.path == "models[0].non_trainable_params_file"


def in_model(**change):
    return lambda document: document["models"][0].update(change)


def in_tier(tier, **change):
    return lambda document: document[tier].update(change)


def in_ram(**change):
    return lambda document: document.update(volatile_db={"type": "hash_map", **change})


def in_redis(**change):
    return lambda document: document.update(volatile_db={"type": "redis_cluster", **change})


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        (lambda d: d.pop("supportlonglong"), "supportlonglong", "required"),
        (lambda d: d.update(supportlonglong=1), "supportlonglong", "boolean"),
        (lambda d: d.update(update_source={}), "update_source.type", "required"),
        (lambda d: d.update(update_source={"type": "null", "broker": "a"}), "update_source.broker", "unknown key"),
        (lambda d: d.update(fuse_embedding_table=1), "fuse_embedding_table", "valid boolean"),
        (lambda d: d.update(volatile=1), "volatile", "unknown key"),
        (
            in_model(use_static_table=True, embedding_cache_type="uvm"),
            "models[0]",
            "use_static_table: true, but embedding_cache_type is 'uvm'",
        ),
        (in_model(use_static_table=True, enable_pagelock=True), "models[0]", "enable_pagelock: .* uvm lie in page"),
        (
            in_model(use_static_table=True, embedding_cache_mode="asynchronous"),
            "models[0]",
            "embedding_cache_mode: a static cache has every row",
        ),
        (in_model(embedding_cache_mode="async"), "models[0].embedding_cache_mode", "'exact' or 'asynchronous'"),
        (in_model(deployed_device_list=[]), "models[0].deployed_device_list", "expected a list that is not empty, got"),
        (in_model(deployed_device_list=[1, 0, 1]), "models[0]", "deployed_device_list: expected each GPU once"),
        (in_model(gpucacheper=1.5), "models[0].gpucacheper", "less than or equal to 1, got 1.5"),
        (
            in_model(num_of_worker_buffer_in_pool=0),
            "models[0].num_of_worker_buffer_in_pool",
            "greater than or equal to 1",
        ),
        (
            in_model(num_of_refresher_buffer_in_pool=0),
            "models[0].num_of_refresher_buffer_in_pool",
            "greater than or equal to 1",
        ),
        (
            in_model(cache_refresh_percentage_per_iteration=20),
            "models[0].cache_refresh_percentage_per_iteration",
            "less than or equal to 1, got 20",
        ),
        (
            in_model(gpucache=True, gpucacheper=0),
            "models[0].gpucacheper",
            "more than 0 and at most 1, got 0: for no cache, set gpucache to false",
        ),
        (in_model(gpucache=True, gpucacheper="0.0"), "models[0].gpucacheper", "more than 0 and at most 1, got 0"),
        (in_model(refresh_delay=1e30), "models[0].refresh_delay", "less than or equal to 315360000, got 1e[+]30"),
        (in_model(refresh_interval=315360001), "models[0].refresh_interval", "less than or equal to 315360000"),
        (in_model(gpucacheper=-0.5), "models[0].gpucacheper", "greater than or equal to 0, got -0.5"),
        (in_model(gpucacheper="half"), "models[0].gpucacheper", "valid number, got 'half'"),
        (in_model(use_cuda_graph=1), "models[0].use_cuda_graph", "valid boolean, got 1"),
        (in_model(max_batch_size="64.5"), "models[0].max_batch_size", "valid integer, got 64.5"),
        (in_model(max_batch_size="[64]"), "models[0].max_batch_size", "valid integer, got '\\[64\\]'"),
        (in_model(max_batch_size="9" * 50), "models[0].max_batch_size", "valid integer, got '999"),
        (in_model(hit_rate_threshold="NaN"), "models[0].hit_rate_threshold", "valid number, got 'NaN'"),
        (in_model(hit_rate_threshold=2.0), "models[0].hit_rate_threshold", "less than or equal to 1"),
        (in_model(hit_rate_threshold=-0.1), "models[0].hit_rate_threshold", "greater than or equal to 0"),
        (in_model(gpu_cache=True), "models[0].gpu_cache", "unknown key"),
        (in_model(gpucache="no"), "models[0].gpucache", "boolean"),
        (in_model(max_batch_size=0), "models[0].max_batch_size", "greater than or equal to 1, got 0"),
        (in_model(model="a.b"), "models[0].model", "model name 'a.b'"),
        (in_model(sparse_files=["x\0", "y"]), "models[0].sparse_files[0]", "without the character NUL"),
        (in_model(dense_file="x\0"), "models[0].dense_file", "without the character NUL"),
        (in_model(network_file="\0"), "models[0].network_file", "without the character NUL"),
        (in_model(non_trainable_params_file="\0"), "models[0].non_trainable_params_file", "without the character NUL"),
        (in_model(sparse_files=["x"]), "models[0].sparse_files", "expected 2, one per embedding layer; got 1"),
        (in_model(embedding_table_names=["a"]), "models[0].embedding_table_names", "expected 2, one per table; got 1"),
        (in_model(embedding_table_names=["a", "a"]), "models[0].embedding_table_names[1]", "taken"),
        (in_model(embedding_table_names=["a", "b@1"]), "models[0].embedding_table_names[1]", "pattern"),
        (
            in_model(embedding_vecsize_per_table=[4, 6, 1]),
            "models[0].embedding_vecsize_per_table",
            "expected 2, one per table; got 3",
        ),
        (in_model(embedding_vecsize_per_table=[4, 5]), "models[0].embedding_vecsize_per_table[1]", "5, but .* 6"),
        (
            in_model(default_value_for_each_table=[0, 1e39]),
            "models[0].default_value_for_each_table[1]",
            "less than or equal",
        ),
        (
            in_model(maxnum_catfeature_query_per_table_per_sample=[]),
            "models[0].maxnum_catfeature_query_per_table_per_sample",
            "expected 2, one per table; got 0",
        ),
        (in_model(deployed_device_list=["cuda:0"]), "models[0].deployed_device_list[0]", "integer"),
        (in_model(deployed_device_list=[0, 1024]), "models[0].deployed_device_list[1]", "less than 1024, got 1024"),
        (in_model(thread_pool_size=4097), "models[0].thread_pool_size", "less than or equal to 4096, got 4097"),
        (in_model(num_of_worker_buffer_in_pool=1025), "models[0].num_of_worker_buffer_in_pool", "to 1024, got 1025"),
        (
            in_model(num_of_refresher_buffer_in_pool=1025),
            "models[0].num_of_refresher_buffer_in_pool",
            "to 1024, got 1025",
        ),
        (in_model(embedding_cache_type=None), "models[0].embedding_cache_type", "got null; leave the key out"),
        (in_model(embedding_cache_key_bits=32), "models[0].embedding_cache_key_bits", "32, .* keys are int64"),
        (in_model(embedding_cache_key_bits=16), "models[0].embedding_cache_key_bits", "32 or 64, got 16"),
        (in_model(embedding_cache_key_bits=64.0), "models[0].embedding_cache_key_bits", "valid integer, got 64.0"),
        (in_model(embedding_cache_line_keys=8), "models[0].embedding_cache_line_keys", "7 or 15, got 8"),
        (in_model(embedding_cache_line_keys=7.0), "models[0].embedding_cache_line_keys", "valid integer, got 7.0"),
        (in_model(embedding_cache_key_bits="64.0"), "models[0].embedding_cache_key_bits", "valid integer, got 64.0"),
        (in_model(use_mixed_precision=True, enable_tf32_compute=True), "models[0].enable_tf32_compute", "use_mixed_"),
        (in_model(mixed_precision=True, enable_tf32_compute=True), "models[0].enable_tf32_compute", "but mixed_prec"),
        (in_model(enable_tf32_compute=1), "models[0].enable_tf32_compute", "boolean, got 1"),
        (lambda d: d["models"].append(d["models"][0]), "models[1].model", "taken"),
        (in_tier("volatile_db", type="redis_cluster"), "volatile_db", "capacity_rows: only a hash_map has it"),
        (
            lambda d: d.update(volatile_db={"type": "redis_cluster", "row_dtype_per_table": {"dcn.ad": "int8"}}),
            "volatile_db",
            "row_dtype_per_table: only a hash_map or multi_process_hash_map or snapshot has it",
        ),
        (
            lambda d: d.update(volatile_db={"type": "disabled", "row_dtypes": "int8"}),
            "volatile_db.row_dtypes",
            "unknown key; did you mean 'row_dtype'\\?",
        ),
        (in_tier("volatile_db", layout="hps"), "volatile_db", "layout: only a redis_cluster has it"),
        (in_redis(layout="hash"), "volatile_db.layout", "expected hashes, got 'hash'$"),
        (in_redis(layout="strings"), "volatile_db.layout", "'strings', which was removed: HPS's hashes are the only"),
        (in_redis(address="a"), "volatile_db.address", "expected <host>:<port> with a port from 1 to 65535, got 'a'"),
        (in_redis(address="a:1;"), "volatile_db.address", "from 1 to 65535, got ''"),
        (in_redis(address="a:65536"), "volatile_db.address", "got 'a:65536'"),
        (in_redis(address="::1:7000"), "volatile_db.address", "got '::1:7000'"),
        (in_redis(address=["a:1"]), "volatile_db.address", "expected <host>:<port>"),
        (in_redis(num_partitions=4), "volatile_db", r"num_partitions: expected num_node_connections \(5\) .*, got 4"),
        (in_redis(num_partitions=65536), "volatile_db", "to 65535, got 65536"),
        (in_redis(num_node_connections=0), "volatile_db.num_node_connections", "greater than or equal to 1"),
        (in_redis(timeout_ms=0), "volatile_db.timeout_ms", "greater than or equal to 1"),
        (in_redis(connect_timeout_ms=0), "volatile_db.connect_timeout_ms", "greater than or equal to 1"),
        (in_redis(connect_timeout_ms=3_600_001), "volatile_db.connect_timeout_ms", "less than or equal to 3600000"),
        (in_redis(user_name=""), "volatile_db.user_name", "at least 1 character"),
        (
            in_redis(enable_tls=True, tls_client_key="k"),
            "volatile_db",
            "tls_client_key: needs tls_client_certificate",
        ),
        (in_redis(tls_ca_certificate="ca"), "volatile_db", "tls_ca_certificate: needs enable_tls"),
        (in_tier("volatile_db", type="hash_mapp"), "volatile_db.type", "expected one of disabled, .* 'hash_mapp'"),
        (in_tier("volatile_db", type=3), "volatile_db.type", "expected one of"),
        (in_tier("volatile_db", overflow_margin=0), "volatile_db.overflow_margin", "greater than or equal to 1"),
        (in_tier("volatile_db", initial_cache_rate=-1), "volatile_db.initial_cache_rate", "greater than or equal to 0"),
        (in_tier("volatile_db", initial_cache_rate=True), "volatile_db.initial_cache_rate", "valid number, got True"),
        (in_redis(hot_keys="hot"), "volatile_db", "hot_keys: only a hash_map has it"),
        (
            in_tier("volatile_db", hot_keys="hot", initialize_after_startup=False),
            "volatile_db",
            "hot_keys: initialize_after_startup is false",
        ),
        (in_tier("volatile_db", hot_keys=""), "volatile_db.hot_keys", "at least 1 character"),
        (
            in_tier("volatile_db", overflow_margin=9, capacity_rows=9),
            "volatile_db",
            "capacity_rows and overflow_margin",
        ),
        (
            in_tier("volatile_db", overflow_resolution_target=1.0),
            "volatile_db.overflow_resolution_target",
            "less than 1",
        ),
        (in_tier("volatile_db", overflow_resolution_target=0), "volatile_db.overflow_resolution_target", "than 0"),
        (
            lambda d: d.update(volatile_db={"type": "map", "initialize_after_startup": False}, persistent_db=NO_TIER),
            "volatile_db.initialize_after_startup",
            "false without a persistent_db",
        ),
        (in_tier("volatile_db", cache_missed_embeddings=1), "volatile_db.cache_missed_embeddings", "valid boolean"),
        (in_tier("volatile_db", timeout_ms=9), "volatile_db", "only a redis_cluster has it, .* is hash_map"),
        (in_tier("persistent_db", timeout_ms=0), "persistent_db.timeout_ms", "greater than or equal to 1"),
        (in_tier("volatile_db", capacity_bytes=9), "volatile_db", "one capacity, got capacity_bytes and capacity_rows"),
        (
            in_tier("volatile_db", capacity_rows_per_table={}),
            "volatile_db",
            "one capacity, got capacity_rows and capacity_rows_per_table",
        ),
        (
            in_tier("volatile_db", lookup_threads=65),
            "volatile_db.lookup_threads",
            "less than or equal to 64",
        ),
        (
            in_tier("volatile_db", row_dtype="int4"),
            "volatile_db.row_dtype",
            "'fp32', 'fp16', 'bf16', 'int8' or 'uint8'",
        ),
        (
            in_tier("volatile_db", row_dtype_per_table={"dcn.ad": "half"}),
            "volatile_db.row_dtype_per_table.dcn.ad",
            "'fp32', 'fp16', 'bf16', 'int8' or 'uint8'",
        ),
        (
            in_tier("volatile_db", row_dtype_per_table={"ad": "int8"}),
            "volatile_db.row_dtype_per_table",
            "no model has a table 'ad'; expected some of 'dcn.ad', 'dcn.user'",
        ),
        (rows_per_table({"dcn.item": 3}), "volatile_db.capacity_rows_per_table", "no model has a table 'dcn.item'"),
        (rows_per_table({"user": 3}), "volatile_db.capacity_rows_per_table", "expected some of 'dcn.ad', 'dcn.user'"),
        (rows_per_table({"dcn.ad": -1}), "volatile_db.capacity_rows_per_table.dcn.ad", "greater than or equal to 0"),
        (rows_per_table([3, 4]), "volatile_db.capacity_rows_per_table", "expected an object, got"),
        (in_tier("volatile_db", capacity_rows=0), "volatile_db.capacity_rows", "greater than or equal to 1"),
        (in_tier("volatile_db", capacity=1), "volatile_db.capacity", "unknown key"),
        (lambda d: d["volatile_db"].pop("type"), "volatile_db.type", "required"),
        (lambda d: d.update(models=[5]), "models[0]", "expected an object, got 5"),
        (in_tier("persistent_db", num_threads=2000000000), "persistent_db.num_threads", "less than or equal to 1024"),
        (lambda d: d["persistent_db"].pop("path"), "persistent_db", "path is required"),
        (in_tier("persistent_db", row_dtype="int4"), "persistent_db.row_dtype", "'fp32', 'fp16', 'bf16', 'int8' or"),
        (in_tier("persistent_db", warm_up="yes"), "persistent_db.warm_up", "valid boolean"),
        (in_tier("persistent_db", catch_up_interval_ms=0), "persistent_db.catch_up_interval_ms", "equal to 1"),
        (
            in_tier("persistent_db", catch_up_interval_ms=9, read_only=False),
            "persistent_db",
            "catch_up_interval_ms: needs read_only",
        ),
        (
            lambda d: d.update(persistent_db={"type": "disabled", "row_type": "int8"}),
            "persistent_db.row_type",
            "unknown key; did you mean 'row_dtype'\\?",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_json_path(ps, change, path, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        ps(change)

    assert caught.value.path == path


def test_a_configuration_without_any_tier_is_refused(ps):
    def disable(document):
        document["volatile_db"] = {"type": "disabled"}
        document["persistent_db"] = {"type": "disabled"}

    with pytest.raises(ConfigError, match="both disabled"):
        ps(disable)


def test_a_missing_graph_is_named(ps, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json: no such file"):
        ps(in_model(network_file="nowhere.json"))
