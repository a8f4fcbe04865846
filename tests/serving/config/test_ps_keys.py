"""Every key that HPS's ``ps.json`` ever had is read, checked, reported as without effect, or refused.

Sources of the keys: HPS's configuration of HugeCTR v3.3 to v24.06, and the samples of its Triton backends.
"""

import json
import re
from pathlib import Path

import pytest

from serving.config import read_ps_config
from serving.config.ps import ModelClause, PsDocument, UpdateSourceClause
from serving.config.tiers import HashMapConfig, PersistentDbConfig
from serving.errors import ConfigError

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "configuration.md"

# ``test_ps_key_effects.py`` names the test that sees the effect of each key.
READ, SAME = "the configuration differs by it", "it agrees with what is so without it"
IDLE = "a line says that it has no effect"

# (where, key, value, READ, SAME or IDLE, or how it is refused). "redis" is a volatile_db of the type redis_cluster,
# "shared" is one of the type multi_process_hash_map, and "asynchronous" is a model whose cache mode is asynchronous.
ROWS = [
    ("", "supportlonglong", False, READ),
    ("", "fuse_embedding_table", True, IDLE),
    ("", "fuse_embedding_table", False, SAME),
    ("", "models", [], READ),
    ("", "volatile_db", {"type": "disabled"}, READ),
    ("", "persistent_db", {"type": "disabled"}, READ),
    ("", "update_source", {"type": "none"}, SAME),
    *(
        ("update_source", "type", kind, "not read from Kafka yet")
        for kind in ("kafka_message_queue", "kafka_mq", "kafka")
    ),
    ("update_source", "type", "null", SAME),
    ("update_source", "type", "zookeeper", "expected one of null, none"),
    ("update_source", "brokers", "127.0.0.1:9092;10.0.0.2:9092", IDLE),
    ("update_source", "metadata_refresh_interval_ms", 30000, IDLE),
    ("update_source", "receive_buffer_size", 262144, IDLE),
    ("update_source", "poll_timeout_ms", 500, IDLE),
    ("update_source", "max_batch_size", 8192, IDLE),
    ("update_source", "failure_backoff_ms", 50, IDLE),
    ("update_source", "max_commit_interval", 32, IDLE),
    ("models", "model", "din", READ),
    ("models", "sparse_files", ["other/0_sparse_10.model"], READ),
    ("models", "dense_file", "model/other.model", READ),
    ("models", "network_file", "model/other.json", READ),
    ("models", "max_batch_size", 7, READ),
    ("models", "gpucache", False, READ),
    ("models", "gpucacheper", 0.5, READ),
    ("models", "hit_rate_threshold", 0.1, READ),
    ("models", "num_of_worker_buffer_in_pool", 4, READ),
    ("models", "num_of_refresher_buffer_in_pool", 4, READ),
    ("models", "cache_refresh_percentage_per_iteration", 0.2, READ),
    ("models", "deployed_device_list", [0, 1], READ),
    ("models", "maxnum_catfeature_query_per_table_per_sample", [9], READ),
    ("models", "embedding_vecsize_per_table", [4], SAME),
    ("models", "embedding_vecsize_per_table", [5], "5, but the graph has 4"),
    ("models", "default_value_for_each_table", [1.5], READ),
    ("models", "default_value_for_each_table", [1.5, 2.5], "expected 1, one per table; got 2"),
    ("models", "maxnum_des_feature_per_sample", 26, SAME),
    ("models", "maxnum_des_feature_per_sample", 0, "0, but the graph has 2"),
    ("models", "refresh_delay", 1.5, READ),
    ("models", "refresh_interval", 1.5, READ),
    ("models", "embedding_table_names", ["user"], READ),
    ("models", "fuse_embedding_table", True, IDLE),
    ("models", "fuse_embedding_table", False, SAME),
    ("models", "use_static_table", True, READ),
    *(("models", "embedding_cache_type", kind, SAME) for kind in ("dynamic", "stochastic")),
    *(("models", "embedding_cache_type", kind, READ) for kind in ("static", "uvm")),
    ("models", "embedding_cache_type", "lru", "expected 'dynamic', 'static', 'uvm' or 'stochastic'|input should be"),
    ("models", "use_hctr_cache_implementation", False, IDLE),
    ("models", "use_context_stream", False, IDLE),
    ("models", "thread_pool_size", 4, IDLE),  # because answers are exact by default
    ("asynchronous", "thread_pool_size", 4, READ),
    ("models", "init_ec", False, READ),
    ("models", "enable_pagelock", True, IDLE),
    ("models", "enable_pagelock", False, SAME),
    ("models", "fp8_quant", True, "only a static cache"),
    ("models", "label_dim", 1, SAME),
    ("models", "label_dim", 2, "2, but the graph has 1"),
    ("models", "slot_num", 3, SAME),
    ("models", "slot_num", 10, "10, but the graph has 3"),
    ("models", "mixed_precision", True, READ),
    ("models", "use_mixed_precision", True, READ),
    ("models", "scaler", 2.0, IDLE),
    ("models", "use_algorithm_search", False, IDLE),
    ("models", "use_cuda_graph", False, READ),
    ("models", "non_trainable_params_file", "model/_dense_10.model.ntp.json", SAME),
    ("models", "non_trainable_params_file", "elsewhere.json", "next to the dense file"),
    ("volatile_db", "type", "disabled", READ),
    ("volatile_db", "type", "map_of_hashes", "expected one of"),
    ("volatile_db", "address", "10.0.0.1:7000", IDLE),
    ("volatile_db", "user_name", "hotrow", IDLE),
    ("volatile_db", "password", "secret", IDLE),
    ("volatile_db", "num_node_connections", 2, IDLE),
    ("volatile_db", "max_batch_size", 100, IDLE),
    ("volatile_db", "enable_tls", True, IDLE),
    ("volatile_db", "tls_ca_certificate", "ca.pem", IDLE),
    ("volatile_db", "tls_client_certificate", "client.pem", IDLE),
    ("volatile_db", "tls_client_key", "key.pem", IDLE),
    ("volatile_db", "tls_server_name_identification", "redis.localhost", IDLE),
    ("volatile_db", "num_partitions", 8, IDLE),
    ("volatile_db", "allocation_rate", 2**20, IDLE),
    ("volatile_db", "algorithm", "phm", IDLE),
    ("volatile_db", "max_get_batch_size", 100, IDLE),
    ("volatile_db", "max_set_batch_size", 100, IDLE),
    ("volatile_db", "refresh_time_after_fetch", True, IDLE),
    ("volatile_db", "update_filters", ["^hps_.+$"], IDLE),
    ("volatile_db", "overflow_margin", 10**6, READ),
    ("volatile_db", "overflow_policy", "evict_least_used", IDLE),  # without a bound; other tests cover the other cases
    ("volatile_db", "overflow_policy", "evict_none", "evict_oldest"),
    ("volatile_db", "overflow_resolution_target", 0.5, IDLE),
    ("volatile_db", "initialize_after_startup", False, READ),
    ("volatile_db", "initial_cache_rate", 1.0, SAME),
    ("volatile_db", "initial_cache_rate", 0.5, READ),
    ("volatile_db", "initial_cache_rate", 1.5, "less than or equal to 1"),
    ("volatile_db", "cache_missed_embeddings", True, READ),
    ("volatile_db", "type", "multi_process_hash_map", READ),
    ("volatile_db", "shared_memory_size", 2**34, IDLE),
    ("volatile_db", "shared_memory_name", "hctr_mp_hash_map_database", IDLE),
    ("volatile_db", "shared_memory_auto_remove", True, IDLE),
    ("shared", "shared_memory_size", 2**33, READ),
    ("shared", "shared_memory_size", 0, "greater than or equal to 1"),
    ("shared", "shared_memory_name", "mine", READ),
    ("shared", "shared_memory_name", "../mine", "should match pattern"),
    ("shared", "shared_memory_auto_remove", False, READ),
    ("shared", "overflow_margin", 10**6, "evicts nothing"),
    ("shared", "cache_missed_embeddings", True, "has every row"),
    ("shared", "initial_cache_rate", 0.5, "only RAM is filled in part"),
    ("shared", "row_dtype", "bf16", READ),
    ("shared", "capacity_rows", 10, "only a hash_map has it"),
    ("redis", "address", "10.0.0.1:7000", READ),
    ("redis", "user_name", "hotrow", READ),
    ("redis", "password", "secret", READ),
    ("redis", "num_partitions", 8, READ),
    ("redis", "num_node_connections", 2, READ),
    ("redis", "max_batch_size", 100, READ),
    ("redis", "enable_tls", True, READ),
    ("redis", "overflow_margin", 10**6, READ),
    ("redis", "overflow_policy", "evict_least_used", IDLE),
    ("redis", "overflow_resolution_target", 0.5, IDLE),
    ("redis", "refresh_time_after_fetch", False, IDLE),
    ("redis", "initial_cache_rate", 0.5, "only RAM is filled in part"),
    ("redis", "allocation_rate", 2**20, IDLE),
    ("redis", "algorithm", "phm", IDLE),
    ("redis", "max_get_batch_size", 100, IDLE),
    ("redis", "shared_memory_size", 2**34, IDLE),
    ("persistent_db", "type", "disabled", READ),
    ("persistent_db", "type", "leveldb", "expected one of"),
    ("persistent_db", "path", "elsewhere", READ),
    ("persistent_db", "num_threads", 2, READ),
    ("persistent_db", "read_only", True, READ),
    ("persistent_db", "max_batch_size", 100, READ),
    ("persistent_db", "max_get_batch_size", 100, IDLE),
    ("persistent_db", "max_set_batch_size", 100, IDLE),
    ("persistent_db", "update_filters", [".+"], IDLE),
    ("persistent_db", "initialize_after_startup", False, READ),
]
# Keys that HPS does not have. Other tests cover them.
OWN = {
    "": set(),
    "models": {
        *("embedding_cache_key_bits", "embedding_cache_line_keys", "embedding_cache_mode", "enable_tf32_compute"),
    },
    "update_source": set(),
    "volatile_db": {
        *("capacity_rows", "capacity_bytes", "capacity_rows_per_table", "row_dtype", "row_dtype_per_table"),
        *("lookup_threads", "hot_keys", "connect_timeout_ms", "timeout_ms", "layout"),
        *("path", "overlay_capacity_rows", "warm_up"),
    },
    "persistent_db": {"catch_up_interval_ms", "row_dtype", "timeout_ms", "warm_up"},
}
CLAUSES = {
    "": PsDocument,
    "models": ModelClause,
    "volatile_db": HashMapConfig,
    "persistent_db": PersistentDbConfig,
    "update_source": UpdateSourceClause,
}


VOLATILE_TYPES = {"redis": "redis_cluster", "shared": "multi_process_hash_map"}


@pytest.fixture
def read(write_model, tmp_path):
    """Return a function that adds one key to a small ps.json and reads it."""
    for folder in ("model", "other"):
        write_model(write_model.table(slots=3, dim=4), features=2, folder=folder)
    for name, other in (("_dense_10.model", "other.model"), ("model.json", "other.json")):
        (tmp_path / "model" / other).write_bytes((tmp_path / "model" / name).read_bytes())
    model = {
        "model": "dcn",
        "sparse_files": ["model/0_sparse_10.model"],
        "dense_file": "model/_dense_10.model",
        "network_file": "model/model.json",
    }

    def read(where="", key=None, value=None):
        document = {
            "supportlonglong": True,
            "models": [dict(model)],
            "volatile_db": {"type": VOLATILE_TYPES.get(where, "parallel_hash_map")},
            "persistent_db": {"type": "rocks_db", "path": "db"},
            "update_source": {"type": "null"},
        }
        holders = {"": document, "models": document["models"][0]}
        holders |= dict.fromkeys(VOLATILE_TYPES, document["volatile_db"])
        if where == "asynchronous":
            holders[where] = holders["models"] | {"embedding_cache_mode": "asynchronous"}
            document["models"] = [holders[where]]
        if key is not None:
            holders.get(where, document.get(where))[key] = value
            if key.startswith("tls_"):
                document["volatile_db"]["enable_tls"] = False
            if key == "tls_client_key":
                document["volatile_db"]["tls_client_certificate"] = "client.pem"
        (tmp_path / "ps.json").write_text(json.dumps(document))
        return read_ps_config(tmp_path / "ps.json")

    return read


@pytest.mark.parametrize(
    ("where", "key", "value", "outcome"), [pytest.param(*row, id=f"{row[0]}.{row[1]}={row[2]}") for row in ROWS]
)
def test_a_key_of_hps_is_read_or_reported_as_without_effect_or_refused(read, where, key, value, outcome):
    plain = read(where)

    if outcome == READ:
        assert read(where, key, value).model_copy(update={"keys_without_effect": ()}) != plain
    elif outcome == SAME:
        assert read(where, key, value) == plain
    elif outcome == IDLE:
        config = read(where, key, value)
        path = {"": key, "models": f"models[0].{key}", "redis": f"volatile_db.{key}"}.get(where, f"{where}.{key}")
        assert config.model_copy(update={"keys_without_effect": ()}) == plain
        paths = [line.partition(": no effect: ")[0].split(", ") for line in config.keys_without_effect]
        assert any(path in of_reason for of_reason in paths)
    else:
        with pytest.raises(ConfigError, match=rf"{where.rstrip('s')}.*{key}|{key}.*") as caught:
            read(where, key, value)
        assert re.search(outcome, str(caught.value))


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("volatile_db", "overflow_margin", 10),
        ("volatile_db", "cache_missed_embeddings", True),
        ("persistent_db", "read_only", True),
        ("persistent_db", "num_threads", 4),
        ("persistent_db", "warm_up", False),
        ("models", "max_batch_size", 7),
    ],
)
def test_a_number_or_a_boolean_may_be_a_string(read, where, key, value):
    assert read(where, key, json.dumps(value)) == read(where, key, value) != read(where)


@pytest.mark.parametrize("value", ["", "many", "1.5", "true"])
def test_a_string_without_a_whole_number_is_not_a_number_of_threads(read, value):
    with pytest.raises(ConfigError, match=r"persistent_db\.num_threads"):
        read("persistent_db", "num_threads", value)


@pytest.mark.parametrize("where", CLAUSES)
def test_every_key_that_is_read_is_listed_here(where):
    listed = {key for holder, key, _, _ in ROWS if holder == where}

    assert CLAUSES[where].known_keys() == listed | OWN[where]
    assert not listed & OWN[where]


@pytest.mark.parametrize("where", CLAUSES)
def test_no_key_may_be_null(read, where):
    """HPS's parser fails at null."""
    clause = CLAUSES[where]
    for key in clause.fields_by_key().keys() | clause.ignored_keys("hash_map"):
        with pytest.raises(ConfigError, match=rf"{key}: expected a value, got null"):
            read(where, key, None)


@pytest.mark.parametrize("where", CLAUSES)
def test_every_key_is_documented(where):
    documentation = DOCUMENTATION.read_text()

    for key in CLAUSES[where].known_keys():
        assert any(f"`{lead}{key}`" in documentation for lead in ("", ".", f"{where}.")), key
