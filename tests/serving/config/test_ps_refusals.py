"""Values of a ``ps.json`` that are refused: the error names their JSON path, what was expected and what came."""

import traceback

import pytest

from serving.errors import ConfigError
from tests.serving.config.conftest import MODEL, in_model, in_ram, in_redis, in_shared_ram, on_disk

ONE_TIER = {"persistent_db": {"type": "disabled"}}
ROW_DTYPES = "'fp32', 'fp16', 'bf16', 'int8' or 'uint8'"
OF_FILE = [
    ({"supportlonglong": ...}, "supportlonglong", "required"),
    ({"supportlonglong": 1}, "supportlonglong", "boolean"),
    ({"update_source": {"type": ...}}, "update_source.type", "required"),
    ({"update_source": {"broker": "a"}}, "update_source.broker", "unknown key"),
    ({"update_source": {"type": "zookeeper"}}, "update_source.type", "expected one of null, none, kafka_message_queue"),
    ({"fuse_embedding_table": 1}, "fuse_embedding_table", "valid boolean"),
    ({"volatile": 1}, "volatile", "unknown key"),
    ({"models": [5]}, "models[0]", "expected an object, got 5"),
    ({"models": [MODEL, MODEL]}, "models[1].model", "taken"),
    ({"volatile_db": {"type": "disabled"}, **ONE_TIER}, "", "both disabled"),
]
OF_MODELS = [
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
    (in_model(fp8_quant=True), "models[0]", "fp8_quant: .*only a static cache"),
    (in_model(embedding_cache_mode="async"), "models[0].embedding_cache_mode", "'exact' or 'asynchronous'"),
    (
        in_model(embedding_cache_type="lru"),
        "models[0].embedding_cache_type",
        "input should be 'dynamic', 'static' or 'uvm', got 'lru'",
    ),
    (in_model(embedding_cache_type=None), "models[0].embedding_cache_type", "got null; leave the key out"),
    (in_model(deployed_device_list=[]), "models[0].deployed_device_list", "expected a list that is not empty, got"),
    (in_model(deployed_device_list=[1, 0, 1]), "models[0]", "deployed_device_list: expected each GPU once"),
    (in_model(deployed_device_list=["cuda:0"]), "models[0].deployed_device_list[0]", "integer"),
    (in_model(deployed_device_list=[0, 1024]), "models[0].deployed_device_list[1]", "less than 1024, got 1024"),
    (in_model(gpu_cache=True), "models[0].gpu_cache", "unknown key"),
    (in_model(gpucache="no"), "models[0].gpucache", "boolean"),
    (in_model(gpucacheper=1.5), "models[0].gpucacheper", "less than or equal to 1, got 1.5"),
    (in_model(gpucacheper=-0.5), "models[0].gpucacheper", "greater than or equal to 0, got -0.5"),
    (in_model(gpucacheper="half"), "models[0].gpucacheper", "valid number, got 'half'"),
    (
        in_model(gpucache=True, gpucacheper=0),
        "models[0].gpucacheper",
        "more than 0 and at most 1, got 0: for no cache, set gpucache to false",
    ),
    (in_model(gpucache=True, gpucacheper="0.0"), "models[0].gpucacheper", "more than 0 and at most 1, got 0"),
    (in_model(hit_rate_threshold="NaN"), "models[0].hit_rate_threshold", "valid number, got 'NaN'"),
    (in_model(hit_rate_threshold=2.0), "models[0].hit_rate_threshold", "less than or equal to 1"),
    (in_model(hit_rate_threshold=-0.1), "models[0].hit_rate_threshold", "greater than or equal to 0"),
    *(
        (in_model(**{key: value}), f"models[0].{key}", f"than or equal to {bound}")
        for key in ("num_of_worker_buffer_in_pool", "num_of_refresher_buffer_in_pool")
        for value, bound in ((0, 1), (1025, "1024, got 1025"))
    ),
    (in_model(thread_pool_size=4097), "models[0].thread_pool_size", "less than or equal to 4096, got 4097"),
    (
        in_model(cache_refresh_percentage_per_iteration=20),
        "models[0].cache_refresh_percentage_per_iteration",
        "less than or equal to 1, got 20",
    ),
    (in_model(refresh_delay=1e30), "models[0].refresh_delay", "less than or equal to 315360000, got 1e[+]30"),
    (in_model(refresh_interval=315360001), "models[0].refresh_interval", "less than or equal to 315360000"),
    (in_model(embedding_cache_key_bits=32), "models[0].embedding_cache_key_bits", "32, .* keys are int64"),
    (in_model(embedding_cache_key_bits=16), "models[0].embedding_cache_key_bits", "32 or 64, got 16"),
    *(
        (in_model(embedding_cache_key_bits=value), "models[0].embedding_cache_key_bits", "valid integer, got 64.0")
        for value in (64.0, "64.0")
    ),
    (in_model(embedding_cache_line_keys=8), "models[0].embedding_cache_line_keys", "7 or 15, got 8"),
    (in_model(embedding_cache_line_keys=7.0), "models[0].embedding_cache_line_keys", "valid integer, got 7.0"),
    (
        {"supportlonglong": False, **in_model(embedding_cache_key_bits=32, embedding_cache_line_keys=7)},
        "models[0]",
        "embedding_cache_line_keys: lines of 32-bit keys have 15 keys, got 7",
    ),
    (in_model(use_mixed_precision=True, enable_tf32_compute=True), "models[0].enable_tf32_compute", "use_mixed_"),
    (in_model(mixed_precision=True, enable_tf32_compute=True), "models[0].enable_tf32_compute", "but mixed_prec"),
    (in_model(enable_tf32_compute=1), "models[0].enable_tf32_compute", "boolean, got 1"),
    (in_model(use_cuda_graph=1), "models[0].use_cuda_graph", "valid boolean, got 1"),
    (in_model(max_batch_size=0), "models[0].max_batch_size", "greater than or equal to 1, got 0"),
    (in_model(max_batch_size="64.5"), "models[0].max_batch_size", "valid integer, got 64.5"),
    (in_model(max_batch_size="[64]"), "models[0].max_batch_size", r"valid integer, got '\[64\]'"),
    (in_model(max_batch_size="9" * 50), "models[0].max_batch_size", "valid integer, got '999"),
    (in_model(model="a.b"), "models[0].model", "model name 'a.b'"),
    (in_model(sparse_files=["~/x", "y"]), "models[0].sparse_files[0]", "a path is taken as it is: write '~' out"),
    (in_model(sparse_files=["$HOME/x", "y"]), "models[0].sparse_files[0]", r"write '\$HOME' out"),
    (in_model(sparse_files=["x\0", "y"]), "models[0].sparse_files[0]", "without the character NUL"),
    *(
        (in_model(**{key: "x\0"}), f"models[0].{key}", "without the character NUL")
        for key in ("dense_file", "network_file", "non_trainable_params_file")
    ),
    (
        in_model(non_trainable_params_file="other.json"),
        "models[0].non_trainable_params_file",
        r"expected .*/_dense_10\.model\.ntp\.json, .*next to the dense file.*; got 'other\.json'",
    ),
    (in_model(network_file="nowhere.json"), "", r"nowhere\.json: no such file"),
    (in_model(sparse_files=["x"]), "models[0].sparse_files", "expected 2, one per embedding layer; got 1"),
    *(
        (in_model(**{key: value}), f"models[0].{key}", f"expected 2, one per table; got {len(value)}")
        for key, value in (
            ("embedding_table_names", ["a"]),
            ("embedding_vecsize_per_table", [4, 6, 1]),
            ("default_value_for_each_table", [0, 1, 2]),
            ("maxnum_catfeature_query_per_table_per_sample", []),
        )
    ),
    (in_model(embedding_table_names=["a", "a"]), "models[0].embedding_table_names[1]", "taken"),
    (in_model(embedding_table_names=["a", "b@1"]), "models[0].embedding_table_names[1]", "pattern"),
    (in_model(embedding_vecsize_per_table=[4, 5]), "models[0].embedding_vecsize_per_table[1]", "5, but .* 6"),
    (
        in_model(default_value_for_each_table=[0, 1e39]),
        "models[0].default_value_for_each_table[1]",
        "less than or equal",
    ),
    (in_model(maxnum_des_feature_per_sample=0), "models[0].maxnum_des_feature_per_sample", "0, but the graph has 5"),
    (in_model(label_dim=2), "models[0].label_dim", "2, but the graph has 1"),
    (in_model(slot_num=10), "models[0].slot_num", "10, but the graph has 5"),
]
OF_RAM = [
    (in_ram(type=...), "volatile_db.type", "required"),
    (in_ram(type=3), "volatile_db.type", "expected one of"),
    (in_ram(type="hash_mapp"), "volatile_db.type", "expected one of disabled, .* 'hash_mapp'"),
    (in_ram(capacity=1), "volatile_db.capacity", "unknown key"),
    (
        in_ram(type="disabled", row_dtypes="int8"),
        "volatile_db.row_dtypes",
        r"unknown key; did you mean 'row_dtype'\?",
    ),
    (in_ram(capacity_rows=0), "volatile_db.capacity_rows", "greater than or equal to 1"),
    (in_ram(capacity_rows=9, capacity_bytes=9), "volatile_db", "one capacity, got capacity_bytes and capacity_rows"),
    (
        in_ram(capacity_rows=9, capacity_rows_per_table={}),
        "volatile_db",
        "one capacity, got capacity_rows and capacity_rows_per_table",
    ),
    *(
        (in_ram(capacity_rows_per_table=value), f"volatile_db.capacity_rows_per_table{below}", reason)
        for value, below, reason in (
            ({"dcn.item": 3}, "", "no model has a table 'dcn.item'"),
            ({"user": 3}, "", "expected some of 'dcn.ad', 'dcn.user'"),
            ({"dcn.ad": -1}, ".dcn.ad", "greater than or equal to 0"),
            ([3, 4], "", "expected an object, got"),
        )
    ),
    (in_ram(overflow_margin=0), "volatile_db.overflow_margin", "greater than or equal to 1"),
    (in_ram(overflow_margin=9, capacity_rows=9), "volatile_db", "capacity_rows and overflow_margin"),
    (in_ram(overflow_policy="evict_none"), "volatile_db.overflow_policy", "evict_oldest"),
    (in_ram(overflow_resolution_target=1.0), "volatile_db.overflow_resolution_target", "less than 1"),
    (in_ram(overflow_resolution_target=0), "volatile_db.overflow_resolution_target", "than 0"),
    (in_ram(initial_cache_rate=-1), "volatile_db.initial_cache_rate", "greater than or equal to 0"),
    (in_ram(initial_cache_rate=1.5), "volatile_db.initial_cache_rate", "less than or equal to 1"),
    (in_ram(initial_cache_rate=True), "volatile_db.initial_cache_rate", "valid number, got True"),
    (
        in_ram(initial_cache_rate=0) | ONE_TIER,
        "volatile_db.initial_cache_rate",
        "no tier would hold the other rows",
    ),
    (
        in_ram(initialize_after_startup=False) | ONE_TIER,
        "volatile_db.initialize_after_startup",
        "false without a persistent_db",
    ),
    (in_ram(hot_keys="hot", initialize_after_startup=False), "volatile_db", "hot_keys: initialize_after_startup is f"),
    (in_ram(hot_keys=""), "volatile_db.hot_keys", "at least 1 character"),
    (in_ram(cache_missed_embeddings=1), "volatile_db.cache_missed_embeddings", "valid boolean"),
    (in_ram(timeout_ms=9), "volatile_db", "only a redis_cluster has it, .* is hash_map"),
    (in_ram(lookup_threads=65), "volatile_db.lookup_threads", "less than or equal to 64"),
    (in_ram(row_dtype="int4"), "volatile_db.row_dtype", ROW_DTYPES),
    (in_ram(row_dtype_per_table={"dcn.ad": "half"}), "volatile_db.row_dtype_per_table.dcn.ad", ROW_DTYPES),
    (
        in_ram(row_dtype_per_table={"ad": "int8"}),
        "volatile_db.row_dtype_per_table",
        "no model has a table 'ad'; expected some of 'dcn.ad', 'dcn.user'",
    ),
    (in_ram(layout="hps"), "volatile_db", "layout: only a redis_cluster has it"),
    (in_shared_ram(shared_memory_size=0), "volatile_db.shared_memory_size", "greater than or equal to 1"),
    (in_shared_ram(shared_memory_name="../mine"), "volatile_db.shared_memory_name", "should match pattern"),
    (in_shared_ram(overflow_margin=10**6), "volatile_db", "overflow_margin: .*evicts nothing"),
    (in_shared_ram(cache_missed_embeddings=True), "volatile_db", "cache_missed_embeddings: .*has every row"),
    (in_shared_ram(initial_cache_rate=0.5), "volatile_db", "initial_cache_rate: only RAM is filled in part"),
    (in_shared_ram(capacity_rows=10), "volatile_db", "capacity_rows: only a hash_map has it"),
]
OF_REDIS = [
    (in_redis(capacity_rows=9), "volatile_db", "capacity_rows: only a hash_map has it"),
    (
        in_redis(row_dtype_per_table={"dcn.ad": "int8"}),
        "volatile_db",
        "row_dtype_per_table: only a hash_map or multi_process_hash_map or snapshot has it",
    ),
    (in_redis(hot_keys="hot"), "volatile_db", "hot_keys: only a hash_map has it"),
    (in_redis(initial_cache_rate=0.5), "volatile_db", "initial_cache_rate: only RAM is filled in part"),
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
    (in_redis(enable_tls=True, tls_client_key="k"), "volatile_db", "tls_client_key: needs tls_client_certificate"),
    (in_redis(tls_ca_certificate="ca"), "volatile_db", "tls_ca_certificate: needs enable_tls"),
]
ON_DISK = [
    (on_disk(type="leveldb"), "persistent_db.type", "expected one of"),
    (on_disk(path=...), "persistent_db", "path is required"),
    (on_disk(num_threads=2000000000), "persistent_db.num_threads", "less than or equal to 1024"),
    *((on_disk(num_threads=text), "persistent_db.num_threads", "integer") for text in ("", "many", "1.5", "true")),
    (on_disk(timeout_ms=0), "persistent_db.timeout_ms", "greater than or equal to 1"),
    (on_disk(row_dtype="int4"), "persistent_db.row_dtype", ROW_DTYPES),
    (on_disk(warm_up="yes"), "persistent_db.warm_up", "valid boolean"),
    (on_disk(catch_up_interval_ms=0), "persistent_db.catch_up_interval_ms", "equal to 1"),
    (on_disk(catch_up_interval_ms=9), "persistent_db", "catch_up_interval_ms: needs read_only"),
    (
        on_disk(type="disabled", row_type="int8"),
        "persistent_db.row_type",
        r"unknown key; did you mean 'row_dtype'\?",
    ),
]
# Row types that differ between tiers, and rows that would be rounded twice.
OF_ROW_TYPES = [
    (
        on_disk(row_dtype="int8"),
        "persistent_db.row_dtype",
        r"'int8', but volatile_db\.row_dtype makes the rows of table 'dcn\.user' 'fp32'",
    ),
    (
        in_ram(row_dtype="int8") | on_disk(row_dtype="fp32"),
        "persistent_db.row_dtype",
        r"'fp32', but volatile_db\.row_dtype makes .* 'dcn\.user' 'int8'",
    ),
    (
        in_ram(row_dtype="int8", row_dtype_per_table={"dcn.ad": "fp16"}) | on_disk(row_dtype="int8"),
        "persistent_db.row_dtype",
        r"but volatile_db\.row_dtype_per_table\['dcn\.ad'\] makes the rows of table 'dcn\.ad' 'fp16'",
    ),
    *(
        (
            in_ram(row_dtype=row_dtype, **volatile) | on_disk(row_dtype=row_dtype, **persistent),
            "persistent_db.row_dtype",
            f"'{row_dtype}', and {key}: .* twice",
        )
        for row_dtype in ("int8", "uint8")
        for volatile, persistent, key in (
            ({"cache_missed_embeddings": True}, {}, r"volatile_db\.cache_missed_embeddings is true"),
            ({}, {"initialize_after_startup": False}, r"persistent_db\.initialize_after_startup is false"),
        )
    ),
]


@pytest.mark.parametrize(
    ("changes", "path", "reason"), [*OF_FILE, *OF_MODELS, *OF_RAM, *OF_REDIS, *ON_DISK, *OF_ROW_TYPES], ids=str
)
def test_a_wrong_value_is_refused_with_its_json_path(read, changes, path, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        read(changes)

    assert caught.value.path == path


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
def test_no_error_and_no_cause_of_an_error_shows_a_password(read, volatile_db):
    with pytest.raises(ConfigError) as caught:
        read({"volatile_db": volatile_db})

    shown = "".join(traceback.format_exception(caught.value))
    assert "volatile_db" in shown
    assert "open sesame" not in shown
