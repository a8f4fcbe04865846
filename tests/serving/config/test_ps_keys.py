"""Every key that HPS's ``ps.json`` ever had has its effect, agrees with the default, or is reported as without effect.

Sources of the keys: HPS's configuration of HugeCTR v3.3 to v24.06, and the samples of its Triton backends. The values
that are refused are in ``test_ps_refusals.py``.
"""

import json
import logging
from pathlib import Path

import pytest

from serving.cli.main import main
from serving.config.ps import ModelClause, PsDocument
from serving.config.tiers import HashMapConfig, PersistentDbConfig
from serving.config.update_source import UpdateSourceConfig
from serving.errors import ConfigError
from serving.parameter_server import ParameterServer

TESTS = Path(__file__).parents[1]
DOCUMENTATION = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()

SAME = "it agrees with what is so without it"
IDLE = "a line says that it has no effect"
UNSEEN = "the configuration differs by it, but no answer and no file on the disk"
# Else a key changes the configuration, and its row names the test that sees its effect.
GPUS, CACHES = "lookup/test_gpu_serving.py::", "lookup/test_refresh_and_fill.py::"
LOADING, SHARED = "parameter_server/test_loading.py::", "storage/test_shared_memory_store.py::"
REDIS, SECURITY = "storage/test_redis_store.py::", "storage/test_redis_security.py::"
LISTED = "frontend/test_hugectr_files.py::test_the_models_that_a_ps_json_lists_are_served"
TIERS = "frontend/test_hugectr_files.py::test_the_tiers_that_a_ps_json_names_hold_the_rows"
NAMED = "repository/test_lookup_only.py::test_its_tables_are_dumped_and_loaded"
BOUND = "test_batch.py::test_a_wrong_value_is_named_with_its_tensor_and_position"
SHARING = SHARED + "test_a_server_shares_its_memory_under_the_name_of_its_ps_json"
DISABLED = LOADING + "test_a_disabled_tier_is_not_opened"
FILLED = LOADING + "test_a_ps_json_says_how_its_tiers_are_filled_and_how_long_they_are_waited_for"
CACHE = GPUS + "test_a_ps_json_says_what_caches_are_like"
STATIC = CACHES + "test_a_static_cache_has_every_row_whatever_the_configuration_says_about_filling"
HALF = GPUS + "test_half_precision_is_near"

UPDATES = "config/test_update_source.py::test_the_configuration_of_hps_is_read"

# Where a row's key is, if not in the clause of that name: the clause, and what it has besides.
PLACES = {
    "kafka": ("update_source", {"type": "kafka", "brokers": "10.0.0.1:9092"}),
    "redis": ("volatile_db", {"type": "redis_cluster"}),
    "shared": ("volatile_db", {"type": "multi_process_hash_map"}),
    "tls": ("volatile_db", {"enable_tls": False, "tls_client_certificate": "client.pem"}),
    "asynchronous": ("models", {"embedding_cache_mode": "asynchronous"}),
    "static": ("models", {"embedding_cache_type": "static"}),
}
ROWS = [
    ("", "supportlonglong", False, "repository/test_repository.py::test_a_folder_whose_key_type_contradicts_ps_json"),
    ("", "fuse_embedding_table", True, IDLE),
    ("", "fuse_embedding_table", False, SAME),
    ("", "models", [], LISTED),
    ("", "volatile_db", {"type": "disabled"}, DISABLED),
    ("", "persistent_db", {"type": "disabled"}, TIERS),
    ("", "update_source", {"type": "none"}, SAME),
    ("update_source", "type", "null", SAME),
    ("update_source", "brokers", "127.0.0.1:9092;10.0.0.2:9092", IDLE),
    ("kafka", "brokers", "127.0.0.1:9092;10.0.0.2:9092", UPDATES),
    ("kafka", "metadata_refresh_interval_ms", 20000, UNSEEN),
    ("kafka", "receive_buffer_size", 262144, IDLE),
    ("kafka", "poll_timeout_ms", 400, UNSEEN),
    ("kafka", "max_batch_size", 8192, IDLE),
    ("kafka", "failure_backoff_ms", 40, UNSEEN),
    ("kafka", "max_commit_interval", 32, IDLE),
    ("models", "model", "din", NAMED),
    ("models", "sparse_files", ["other/0.model", "other/1.model"], LISTED),
    ("models", "dense_file", "model/other.model", LISTED),
    ("models", "network_file", "model/other.json", LISTED),
    ("models", "max_batch_size", 7, BOUND),
    ("models", "gpucache", False, GPUS + "test_a_model_that_wants_no_cache_has_none"),
    ("models", "gpucacheper", 0.5, CACHE),
    (
        *("models", "hit_rate_threshold", 0.1),
        "lookup/test_hit_rate_threshold.py::test_an_exact_cache_is_given_what_it_lacked_where_its_hit_rate_was_below",
    ),
    ("models", "num_of_worker_buffer_in_pool", 4, GPUS + "test_many_threads_have_workspaces_of_their_own"),
    (
        *("models", "num_of_refresher_buffer_in_pool", 4),
        CACHES + "test_the_number_of_devices_refreshed_at_a_time_is_limited",
    ),
    (
        *("models", "cache_refresh_percentage_per_iteration", 0.25),
        CACHES + "test_refresh_times_without_a_refresh_percentage_are_warned_about",
    ),
    ("models", "deployed_device_list", [0, 1], GPUS + "test_each_gpu_of_the_list_has_caches_and_all_answer_alike"),
    ("models", "maxnum_catfeature_query_per_table_per_sample", [9, 8], BOUND),
    ("models", "embedding_vecsize_per_table", [4, 6], SAME),
    (
        *("models", "default_value_for_each_table", [1.5, 0]),
        "test_session.py::test_unknown_keys_get_the_default_value_of_the_table",
    ),
    ("models", "maxnum_des_feature_per_sample", 26, SAME),
    ("models", "refresh_delay", 1.5, CACHES + "test_a_refresh_delay_alone_starts_one_refresh"),
    ("models", "refresh_interval", 1.5, CACHES + "test_the_refresh_interval_starts_refreshes"),
    ("models", "embedding_table_names", ["buyer", "shop"], NAMED),
    ("models", "fuse_embedding_table", True, IDLE),
    ("models", "fuse_embedding_table", False, SAME),
    ("models", "use_static_table", True, STATIC),
    *(("models", "embedding_cache_type", kind, SAME) for kind in ("dynamic", "stochastic")),
    *(("models", "embedding_cache_type", kind, CACHE) for kind in ("static", "uvm")),
    ("models", "use_hctr_cache_implementation", False, IDLE),
    ("models", "use_context_stream", False, IDLE),
    ("models", "thread_pool_size", 4, IDLE),  # because answers are exact by default
    (
        *("asynchronous", "thread_pool_size", 4),
        "lookup/test_insertions.py::test_two_tables_are_inserted_in_parallel_and_a_single_table_is_not",
    ),
    ("models", "init_ec", False, CACHES + "test_a_cache_is_not_filled_if_the_configuration_says_so"),
    ("models", "enable_pagelock", True, IDLE),
    ("models", "enable_pagelock", False, SAME),
    ("static", "fp8_quant", True, CACHE),
    ("models", "label_dim", 1, SAME),
    ("models", "slot_num", 5, SAME),
    ("models", "mixed_precision", True, HALF),
    ("models", "use_mixed_precision", True, HALF),
    ("models", "scaler", 2.0, IDLE),
    ("models", "use_algorithm_search", False, IDLE),
    ("models", "use_cuda_graph", False, GPUS + "test_probabilities_are_those_of_numpy"),
    *(
        ("models", "non_trainable_params_file", file, SAME)
        for file in ("", "model/_dense_10.model.ntp.json", "./model/../model/_dense_10.model.ntp.json")
    ),
    ("volatile_db", "type", "disabled", DISABLED),
    ("volatile_db", "address", "10.0.0.1:7000", IDLE),
    ("volatile_db", "user_name", "hotrow", IDLE),
    ("volatile_db", "password", "secret", IDLE),
    ("volatile_db", "num_node_connections", 2, IDLE),
    ("volatile_db", "max_batch_size", 100, IDLE),
    ("volatile_db", "enable_tls", True, IDLE),
    ("tls", "tls_ca_certificate", "ca.pem", IDLE),
    ("tls", "tls_client_certificate", "other.pem", IDLE),
    ("tls", "tls_client_key", "key.pem", IDLE),
    ("tls", "tls_server_name_identification", "redis.localhost", IDLE),
    ("volatile_db", "num_partitions", 8, IDLE),
    ("volatile_db", "allocation_rate", 2**20, IDLE),
    ("volatile_db", "algorithm", "phm", IDLE),
    ("volatile_db", "max_get_batch_size", 100, IDLE),
    ("volatile_db", "max_set_batch_size", 100, IDLE),
    ("volatile_db", "refresh_time_after_fetch", True, IDLE),
    ("volatile_db", "update_filters", ["^hps_.+$"], IDLE),
    (
        *("volatile_db", "overflow_margin", 10**6),
        "storage/test_memory_overflow.py::test_a_table_at_its_bound_evicts_down_to_the_target_and_takes_the_new_rows",
    ),
    ("volatile_db", "overflow_policy", "evict_least_used", IDLE),  # without a bound
    ("volatile_db", "overflow_resolution_target", 0.5, IDLE),
    ("volatile_db", "initialize_after_startup", False, FILLED),
    ("volatile_db", "initial_cache_rate", 1.0, SAME),
    (
        *("volatile_db", "initial_cache_rate", 0.5),
        "parameter_server/test_first_rows.py::"
        "test_the_initial_cache_rate_is_the_share_of_each_tables_rows_that_ram_starts_with",
    ),
    ("volatile_db", "cache_missed_embeddings", True, FILLED),
    ("volatile_db", "type", "multi_process_hash_map", SHARING),
    ("volatile_db", "shared_memory_size", 2**34, IDLE),
    ("volatile_db", "shared_memory_name", "hctr_mp_hash_map_database", IDLE),
    ("volatile_db", "shared_memory_auto_remove", True, IDLE),
    ("shared", "shared_memory_size", 2**33, SHARED + "test_tables_beyond_the_size_are_refused"),
    ("shared", "shared_memory_name", "mine", SHARING),
    ("shared", "shared_memory_auto_remove", False, SHARED + "test_without_auto_remove_the_tables_stay"),
    ("redis", "address", "10.0.0.1:7000", REDIS + "test_the_first_address_that_answers_is_enough"),
    ("redis", "user_name", "hotrow", SECURITY + "test_the_error_names_the_right_that_a_user_does_not_have"),
    ("redis", "password", "secret", SECURITY + "test_the_right_password_is_accepted"),
    (
        *("redis", "num_partitions", 8),
        "storage/test_redis_other_partitions.py::test_a_process_with_the_old_number_changes_nothing",
    ),
    (
        *("redis", "num_node_connections", 2),
        "storage/test_redis_faults.py::test_a_caller_waits_for_a_connection_no_longer_than_it_may",
    ),
    ("redis", "max_batch_size", 100, REDIS + "test_however_many_keys_one_command_takes_the_rows_are_the_same"),
    ("redis", "enable_tls", True, SECURITY + "test_rows_come_through_an_encrypted_connection"),
    (
        *("redis", "overflow_margin", 10**6),
        "storage/test_redis_overflow.py::test_a_partition_that_grows_beyond_its_margin_is_brought_down_to_the_target",
    ),
    ("redis", "overflow_policy", "evict_least_used", IDLE),
    ("redis", "overflow_resolution_target", 0.5, IDLE),
    ("redis", "refresh_time_after_fetch", False, IDLE),
    ("redis", "allocation_rate", 2**20, IDLE),
    ("redis", "algorithm", "phm", IDLE),
    ("redis", "max_get_batch_size", 100, IDLE),
    ("redis", "shared_memory_size", 2**34, IDLE),
    ("persistent_db", "type", "disabled", TIERS),
    ("persistent_db", "path", "elsewhere", TIERS),
    ("persistent_db", "num_threads", 2, UNSEEN),
    ("persistent_db", "read_only", True, "cli/test_check_tiers.py::test_a_read_only_database_must_exist"),
    ("persistent_db", "max_batch_size", 100, UNSEEN),
    ("persistent_db", "max_get_batch_size", 100, IDLE),
    ("persistent_db", "max_set_batch_size", 100, IDLE),
    ("persistent_db", "update_filters", [".+"], IDLE),
    (
        *("persistent_db", "initialize_after_startup", False),
        LOADING + "test_a_database_is_served_as_it_is_and_fills_memory",
    ),
]
# Keys that HPS does not have. Other tests cover them.
OWN = {
    "": set(),
    "models": {
        *("embedding_cache_key_bits", "embedding_cache_line_keys", "embedding_cache_mode", "enable_tf32_compute"),
    },
    "update_source": {
        *(
            "kafka",
            "address",
            "user_name",
            "password",
            "path",
            "max_staleness_s",
            "rejected_file",
            "update_headroom_ratio",
        ),
        *("enable_tls", "tls_ca_certificate", "tls_client_certificate", "tls_client_key"),
        "tls_server_name_identification",
    },
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
    "update_source": UpdateSourceConfig,
}


@pytest.fixture
def read_key(read):
    """Return a function that reads the ps.json of a place, with a key or without it."""

    def read_key(where, key=None, value=None):
        clause, keys = PLACES.get(where, (where, {}))
        if key is not None:
            keys = keys | {key: value}
        return read({clause: keys} if clause else keys)

    return read_key


@pytest.mark.parametrize(
    ("where", "key", "value", "outcome"), [pytest.param(*row, id=f"{row[0]}.{row[1]}={row[2]}") for row in ROWS]
)
def test_a_key_of_hps_has_its_effect_or_is_reported_as_without_effect(read_key, where, key, value, outcome):
    plain, config = read_key(where), read_key(where, key, value)

    clause, _ = PLACES.get(where, (where, {}))
    path = {"": key, "models": f"models[0].{key}"}.get(clause, f"{clause}.{key}")
    paths = [path for line in config.keys_without_effect for path in line.partition(": no effect: ")[0].split(", ")]
    assert paths.count(path) == (outcome == IDLE)
    assert (config != plain.model_copy(update={"keys_without_effect": config.keys_without_effect})) == (
        outcome not in (SAME, IDLE)
    )
    if isinstance(value, int | float):  # Triton's configurations have only strings
        assert read_key(where, key, json.dumps(value)) == read_key(where, key, str(value)) == config
    if "::" in outcome:
        file, test = outcome.split("::")
        assert f"def {test}(" in (TESTS / file).read_text()


@pytest.mark.parametrize("where", CLAUSES)
def test_every_key_that_is_read_is_listed_here(where):
    listed = {key for place, key, _, _ in ROWS if PLACES.get(place, (place,))[0] == where}

    assert CLAUSES[where].known_keys() == listed | OWN[where]
    assert not listed & OWN[where]


@pytest.mark.parametrize("where", CLAUSES)
def test_no_key_may_be_null(read_key, where):
    """HPS's parser fails at null."""
    clause = CLAUSES[where]
    for key in clause.fields_by_key().keys() | clause.ignored_keys("hash_map"):
        with pytest.raises(ConfigError, match=rf"{key}: expected a value, got null"):
            read_key("kafka" if where == "update_source" else where, key, None)  # the file's own source is disabled


@pytest.mark.parametrize("where", CLAUSES)
def test_every_key_is_documented(where):
    for key in CLAUSES[where].known_keys():
        assert any(f"`{lead}{key}`" in DOCUMENTATION for lead in ("", ".", f"{where}.")), key


CASES = [
    pytest.param(
        {"update_source": {"type": "none", "brokers": "127.0.0.1:9092", "max_commit_interval": 32}},
        ["update_source.brokers, update_source.max_commit_interval: no effect: the type is disabled"],
        id="one line for all keys of one reason",
    ),
    pytest.param(
        {"volatile_db": {"update_filters": [".+"]}, "persistent_db": {"update_filters": [".+"]}},
        ["volatile_db.update_filters, persistent_db.update_filters: no effect: there is no update_source"],
        id="one line for both tiers",
    ),
    pytest.param(
        {"volatile_db": {"cache_missed_embeddings": True}, "persistent_db": ...},
        ["volatile_db.cache_missed_embeddings: no effect: there is no slower tier to copy rows from"],
        id="promotion without a slower tier",
    ),
    pytest.param(
        {"volatile_db": {"overflow_margin": 9, "num_partitions": 2, "overflow_policy": "random"}},
        [],
        id="a bound has its policy and its partitions",
    ),
    pytest.param(
        {"volatile_db": {"capacity_rows": 9, "overflow_resolution_target": 0.5}},
        [
            "volatile_db.overflow_resolution_target: no effect: no row is evicted without an overflow_margin or a "
            "capacity with an overflow_policy"
        ],
        id="a capacity without a policy evicts nothing",
    ),
    pytest.param(
        {"volatile_db": {"overflow_margin": 9, "overflow_policy": "evict_random", "refresh_time_after_fetch": True}},
        ["volatile_db.refresh_time_after_fetch: no effect: the overflow_policy is not evict_oldest"],
        id="times of rows that go at random",
    ),
    pytest.param(
        {
            "volatile_db": {"type": "snapshot", "path": "s", "overflow_margin": 9, "max_batch_size": 9},
            "persistent_db": ...,
        },
        [
            "volatile_db.max_batch_size: no effect: a lookup or load of any size is one pass",
            "volatile_db.overflow_margin: no effect: a snapshot holds every row",
        ],
        id="a margin of snapshots",
    ),
    pytest.param(
        {"volatile_db": {"type": "disabled", "address": "127.0.0.1:7000"}},
        ["volatile_db.address: no effect: the type is disabled"],
        id="a disabled tier",
    ),
    pytest.param(
        {"volatile_db": {"type": "none", "capacity_rows": "many", "row_dtype": None, "path": 5}},
        ["volatile_db.capacity_rows, volatile_db.row_dtype, volatile_db.path: no effect: the type is disabled"],
        id="values of a disabled tier, which nobody reads",
    ),
    pytest.param(
        {"volatile_db": {"type": "redis", "layout": "hashes"}},
        ["volatile_db.layout: no effect: HPS's hashes are the only layout"],
        id="the only layout",
    ),
    pytest.param(
        {"persistent_db": {"type": "disabled"}},
        ["persistent_db.path: no effect: the type is disabled"],
        id="a disabled database",
    ),
    pytest.param(
        {"persistent_db": {"max_batch_size": 2049}},
        ["persistent_db.max_batch_size: no effect: a value above 2048 counts as 2048, because a large batch is split"],
        id="batches larger than the database has them",
    ),
    pytest.param({"persistent_db": {"max_batch_size": 2048}}, [], id="the largest batches"),
    pytest.param(
        {"models": {"thread_pool_size": 4}},
        ["models[0].thread_pool_size: no effect: only the embedding_cache_mode asynchronous inserts rows later"],
        id="threads that insert later where none does",
    ),
    pytest.param(
        {"models": {"embedding_cache_type": "static", "gpucacheper": 0.5, "hit_rate_threshold": 0.5}},
        ["models[0].gpucacheper, models[0].hit_rate_threshold: no effect: a static cache has every row from the start"],
        id="a share of a static cache",
    ),
    pytest.param({"models": {"embedding_cache_type": "uvm", "enable_pagelock": True}}, [], id="uvm is page-locked"),
    pytest.param({"models": {"gpucache": False, "thread_pool_size": 4}}, [], id="no cache is wanted"),
    pytest.param({}, [], id="no keys"),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_each_key_without_effect_is_reported_once_with_the_reason(read, changes, expected):
    assert list(read(changes).keys_without_effect) == expected


def test_keys_without_effect_are_logged_at_startup(write, caplog):
    file = write({"models": {"scaler": 1.0}, "fuse_embedding_table": True, "persistent_db": ...})

    with caplog.at_level(logging.WARNING), ParameterServer.from_config(file):
        pass

    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "fuse_embedding_table: no effect: every table is looked up by its own name, which changes no answer",
        "models[0].scaler: no effect: it scales gradients, and serving has no gradients",
    ]


def test_hotrow_check_reports_keys_without_effect(write, capsys):
    changes = {"models": {"use_context_stream": False}, "volatile_db": {"allocation_rate": 2**28}}

    assert main(["check", str(write(changes | {"persistent_db": ...}))]) == 0

    assert capsys.readouterr().err.splitlines() == [
        "hotrow check: warning: models[0].use_context_stream: no effect: only TensorFlow and TensorRT use contexts",
        "hotrow check: warning: volatile_db.allocation_rate: no effect: a table allocates its memory at once",
    ]
