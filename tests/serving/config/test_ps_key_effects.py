"""For each key of a ``ps.json`` that changes the configuration: the test that sees its effect."""

from pathlib import Path

import numpy as np
import pytest

from serving.parameter_server import ParameterServer
from tests.serving.config.test_ps_keys import READ, ROWS
from tests.serving.ps_files import listed, write_ps

HERE = Path(__file__).parents[1]
FILES, GPUS = "frontend/test_hugectr_files.py", "lookup/test_gpu_serving.py"
CACHES, REFRESH = "lookup/test_cached_session.py", "lookup/test_refresh_and_fill.py"
LOADING, SHARED = "parameter_server/test_loading.py", "storage/test_shared_memory_store.py"
REDIS, SECURITY = "storage/test_redis_store.py", "storage/test_redis_security.py"
LISTED = (FILES, "test_the_models_that_a_ps_json_lists_are_served")
TIERS = (FILES, "test_the_tiers_that_a_ps_json_names_hold_the_rows")
DISABLED = (LOADING, "test_a_disabled_tier_is_not_opened")
HALF = (GPUS, "test_half_precision_is_near")
SEEN = {
    ("", "supportlonglong"): ("repository/test_repository.py", "test_a_folder_whose_key_type_contradicts_ps_json"),
    ("", "models"): LISTED,
    ("", "volatile_db"): DISABLED,
    ("", "persistent_db"): TIERS,
    ("models", "model"): ("config/test_ps_key_effects.py", "test_rows_are_looked_up_by_the_names_that_the_file_gives"),
    ("models", "sparse_files"): LISTED,
    ("models", "dense_file"): LISTED,
    ("models", "network_file"): LISTED,
    ("models", "max_batch_size"): ("test_batch.py", "test_a_wrong_value_is_named_with_its_tensor_and_position"),
    ("models", "gpucache"): (GPUS, "test_a_model_that_wants_no_cache_has_none"),
    ("models", "gpucacheper"): (GPUS, "test_a_ps_json_says_what_caches_are_like"),
    ("models", "hit_rate_threshold"): (
        "lookup/test_hit_rate_threshold.py",
        "test_an_exact_cache_is_given_what_it_lacked_where_its_hit_rate_was_below",
    ),
    ("models", "num_of_worker_buffer_in_pool"): (GPUS, "test_many_threads_have_workspaces_of_their_own"),
    ("models", "num_of_refresher_buffer_in_pool"): (
        REFRESH,
        "test_the_number_of_devices_refreshed_at_a_time_is_limited",
    ),
    ("models", "cache_refresh_percentage_per_iteration"): (
        REFRESH,
        "test_refresh_times_without_a_refresh_percentage_are_warned_about",
    ),
    ("models", "deployed_device_list"): (GPUS, "test_each_gpu_of_the_list_has_caches_and_all_answer_alike"),
    ("models", "maxnum_catfeature_query_per_table_per_sample"): (
        "test_batch.py",
        "test_a_wrong_value_is_named_with_its_tensor_and_position",
    ),
    ("models", "default_value_for_each_table"): (
        "test_session.py",
        "test_unknown_keys_get_the_default_value_of_the_table",
    ),
    ("models", "refresh_delay"): (REFRESH, "test_a_refresh_delay_alone_starts_one_refresh"),
    ("models", "refresh_interval"): (REFRESH, "test_the_refresh_interval_starts_refreshes"),
    ("models", "embedding_table_names"): (
        "config/test_ps_key_effects.py",
        "test_rows_are_looked_up_by_the_names_that_the_file_gives",
    ),
    ("models", "use_static_table"): (
        REFRESH,
        "test_a_static_cache_has_every_row_whatever_the_configuration_says_about_filling",
    ),
    ("models", "embedding_cache_type"): (GPUS, "test_a_ps_json_says_what_caches_are_like"),
    ("asynchronous", "thread_pool_size"): (
        "lookup/test_insertions.py",
        "test_two_tables_are_inserted_in_parallel_and_a_single_table_is_not",
    ),
    ("models", "init_ec"): (REFRESH, "test_a_cache_is_not_filled_if_the_configuration_says_so"),
    ("models", "mixed_precision"): HALF,
    ("models", "use_mixed_precision"): HALF,
    ("models", "use_cuda_graph"): (GPUS, "test_probabilities_are_those_of_numpy"),
    ("volatile_db", "type"): DISABLED,
    ("volatile_db", "overflow_margin"): (
        "storage/test_memory_overflow.py",
        "test_a_table_at_its_bound_evicts_down_to_the_target_and_takes_the_new_rows",
    ),
    ("volatile_db", "initialize_after_startup"): (
        LOADING,
        "test_a_ps_json_says_how_its_tiers_are_filled_and_how_long_they_are_waited_for",
    ),
    ("volatile_db", "initial_cache_rate"): (
        "parameter_server/test_first_rows.py",
        "test_the_initial_cache_rate_is_the_share_of_each_tables_rows_that_ram_starts_with",
    ),
    ("volatile_db", "cache_missed_embeddings"): (
        LOADING,
        "test_a_ps_json_says_how_its_tiers_are_filled_and_how_long_they_are_waited_for",
    ),
    ("shared", "shared_memory_size"): (SHARED, "test_tables_beyond_the_size_are_refused"),
    ("shared", "shared_memory_name"): (SHARED, "test_a_server_shares_its_memory_under_the_name_of_its_ps_json"),
    ("shared", "shared_memory_auto_remove"): (SHARED, "test_without_auto_remove_the_tables_stay"),
    ("shared", "row_dtype"): (SHARED, "test_a_table_of_another_form_is_loaded_again"),
    ("redis", "address"): (REDIS, "test_the_first_address_that_answers_is_enough"),
    ("redis", "user_name"): (SECURITY, "test_the_error_names_the_right_that_a_user_does_not_have"),
    ("redis", "password"): (SECURITY, "test_the_right_password_is_accepted"),
    ("redis", "num_partitions"): (
        "storage/test_redis_other_partitions.py",
        "test_a_process_with_the_old_number_changes_nothing",
    ),
    ("redis", "num_node_connections"): (
        "storage/test_redis_faults.py",
        "test_a_caller_waits_for_a_connection_no_longer_than_it_may",
    ),
    ("redis", "max_batch_size"): (REDIS, "test_however_many_keys_one_command_takes_the_rows_are_the_same"),
    ("redis", "enable_tls"): (SECURITY, "test_rows_come_through_an_encrypted_connection"),
    ("redis", "overflow_margin"): (
        "storage/test_redis_overflow.py",
        "test_a_partition_that_grows_beyond_its_margin_is_brought_down_to_the_target",
    ),
    ("persistent_db", "type"): TIERS,
    ("persistent_db", "path"): TIERS,
    ("persistent_db", "read_only"): ("cli/test_check_tiers.py", "test_a_read_only_database_must_exist"),
    ("persistent_db", "initialize_after_startup"): (LOADING, "test_a_database_is_served_as_it_is_and_fills_memory"),
}
# These keys change how the database works, but no answer and no file on the disk.
NOT_SEEN = {("persistent_db", "num_threads"), ("persistent_db", "max_batch_size")}
KEYS = sorted({(where, key) for where, key, _, outcome in ROWS if outcome == READ})


@pytest.mark.parametrize(("where", "key"), [pytest.param(*one, id=".".join(one)) for one in KEYS])
def test_a_test_sees_the_effect_of_every_key_that_is_read(where, key):
    if (where, key) in NOT_SEEN:
        return
    file, name = SEEN[where, key]

    assert f"def {name}(" in (HERE / file).read_text()


def test_every_listed_key_is_read():
    assert sorted(SEEN.keys() | NOT_SEEN) == KEYS


def test_rows_are_looked_up_by_the_names_that_the_file_gives(write_model, tmp_path):
    model = write_model(write_model.table(slots=3, dim=4), features=2)
    file = write_ps(tmp_path, [listed(model.config_file, "din", embedding_table_names=["user"])])
    keys = np.array(list(model.tables[0]))

    with ParameterServer.from_config(file) as server:
        rows, found = server.lookup("din.user", keys)

    assert found.all()
    assert (rows == np.array(list(model.tables[0].values()))).all()
