"""The two YAML files: what is read, and that everything else is refused with its place."""

import os

import pytest

from serving.errors import ConfigError
from training.persia.config import read_embedding_config, read_global_config

EMBEDDING = """
feature_index_prefix_bit: 12
slots_config:
  age: {dim: 8}
  user: &user
    dim: 16
    sqrt_scaling: true
    hash_stack_config: {hash_stack_rounds: 2, embedding_size: 500}
  friend: *user
  history:
    <<: *user
    dim: 4
    embedding_summation: false
    sample_fixed_size: 5
    hash_stack_config: {hash_stack_rounds: 0, embedding_size: 0}
feature_groups:
  people: [user, friend]
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "config.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_features_get_defaults_and_the_prefixes_of_their_groups(write):
    config = read_embedding_config(write(EMBEDDING))

    age, user, friend, history = config.features.values()
    assert list(config.features) == ["age", "user", "friend", "history"]
    assert (age.dim, age.is_summed, age.has_sqrt_scaling, age.rows_per_sign) == (8, True, False, 1)
    assert (user.hash_stack_rounds, user.hash_stack_size, user.has_sqrt_scaling) == (2, 500, True)
    assert (history.is_summed, history.sample_fixed_size, history.dim) == (False, 5, 4)
    # groups of feature_groups come first, then the other features
    assert [one.prefix >> 52 for one in (user, friend, age, history)] == [1, 1, 2, 3]
    assert {feature.spacing for feature in config.features.values()} == {2**52 - 1}
    assert config.dims == [4, 8, 16]
    assert sorted(config.groups) == ["age", "history", "people"]


def test_the_prefix_has_8_bits_unless_the_file_says_otherwise(write):
    assert read_embedding_config(write("slots_config: {a: {dim: 1}}")).features["a"].prefix == 1 << 56


def test_a_number_is_the_name_of_a_feature(write):
    assert list(read_embedding_config(write("slots_config: {7: {dim: 1}}")).features) == ["7"]


SLOTS = "slots_config: {a: {dim: 1}, b: {dim: 2}, c: {dim: 1}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "slots_config: missing"),
        ("slots_config: {}", "slots_config: expected at least one feature, got none"),
        ("slots_config: [1]", "slots_config: expected an object, got a list"),
        ("slot_config: {}", "slot_config: unknown key; did you mean 'slots_config'?"),
        ("slots_config: {a: {dims: 1}}", "slots_config.a.dims: unknown key; did you mean 'dim'?"),
        ("slots_config: {a: {}}", "slots_config.a.dim: missing"),
        ("slots_config: {a: {dim: 0}}", "slots_config.a.dim: expected an integer from 1 to 65536, got 0"),
        ("slots_config: {a: {dim: 1e3}}", 'slots_config.a.dim: expected an integer, got "1e3"'),
        ("slots_config: {a: {dim: 1, index_prefix: 3}}", "slots_config.a.index_prefix: unknown key"),
        ("slots_config: {a: {dim: 1, sqrt_scaling: 1}}", "slots_config.a.sqrt_scaling: expected one of true, false"),
        ("slots_config: {'': {dim: 1}}", "expected a name for each feature and each group, got an empty one"),
        ("slots_config: {a: {dim: 2020-01-01}}", "expected values that JSON has too: Object of type date is not JSON"),
        ("slots_config: {a: {dim: 2020-13-01}}", "expected values that JSON has too: month must be in 1..12"),
        ("slots_config: {a: {dim: .nan}}", "NaN is not a finite number"),
        ("[]", "expected an object, got an empty list"),
        ("slots_config: !!python/name:os.system", "could not determine a constructor"),
        ("slots_config: {a: {dim: 1}", "line 1 column 27: expected ',' or '}'"),
        (b"slots_config: \xff", "not UTF-8: byte 14 is 0xff"),
        ("slots_config: {a: {dim: 1}}\nfeature_index_prefix_bit: 0", "expected an integer from 2 to 32, got 0"),
        (SLOTS + "feature_index_prefix_bit: 2", "feature_index_prefix_bit: expected at most 2 groups, got 3"),
        (SLOTS + "feature_groups: {g: [a, x]}", "feature_groups.g: expected features of slots_config, got 'x'"),
        (SLOTS + "feature_groups: {g: [a], h: [a]}", "expected feature 'a' in one group, got it in several"),
        (SLOTS + "feature_groups: {b: [a]}", "'b' is a group and a feature outside groups; rename one"),
        (
            SLOTS + "feature_groups: {g: [a, b]}",
            "g: expected one dim in the group, because its features share rows, got {'a': 1, 'b': 2}",
        ),
        (
            "slots_config: {a: {dim: 1, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 0}}}",
            "hash_stack_config.embedding_size: expected an integer from 1",
        ),
        (
            "feature_index_prefix_bit: 32\n"
            "slots_config: {a: {dim: 1, hash_stack_config: {hash_stack_rounds: 3, embedding_size: 2000000000}}}",
            "expected at most 4294967295 buckets in all rounds, got 6000000000",
        ),
    ],
)
def test_an_embedding_config_that_is_wrong_is_refused(write, text, message):
    path = write(text)

    with pytest.raises(ConfigError) as raised:
        read_embedding_config(path)

    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yml: cannot be read: no such file"):
        read_embedding_config(tmp_path / "none.yml")


GLOBAL = """
common_config:
  num_embedding_io_workers: 4
  metrics_config: {enable_metrics: false, push_interval_seconds: 10}
  job_type: Train
embedding_parameter_server_config:
  capacity: 1000
  num_hashmap_internal_shards: 1
  enable_incremental_update: false
embedding_worker_config:
  forward_buffer_size: 1000
"""


@pytest.mark.parametrize(("text", "capacity"), [("", 10**9), (GLOBAL, 1000)])
def test_the_global_config_has_the_capacity_of_a_server(write, text, capacity):
    assert read_global_config(write(text)) == capacity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("common_config: {job_type: Infer}", 'common_config.job_type: expected one of "Train", got "Infer"'),
        (
            "common_config: {metrics_config: {enable_metrics: true}}",
            "common_config.metrics_config.enable_metrics: expected one of false, got true",
        ),
        (
            "embedding_parameter_server_config: {enable_incremental_update: true}",
            "enable_incremental_update: expected one of false, got true",
        ),
        (
            "embedding_parameter_server_config: {capacity: 10000000000}",
            "capacity: expected an integer from 1 to 3500000000",
        ),
        ("middleware_config: {}", "middleware_config: unknown key; did you mean 'embedding_worker_config'?"),
        (
            "embedding_worker_config: {forward_buffer: 1}",
            "embedding_worker_config.forward_buffer: unknown key; did you mean 'forward_buffer_size'?",
        ),
    ],
)
def test_a_global_config_that_is_wrong_is_refused(write, text, message):
    with pytest.raises(ConfigError) as raised:
        read_global_config(write(text))

    assert message in str(raised.value)


@pytest.mark.parametrize("read", [read_embedding_config, read_global_config])
def test_a_pipe_is_refused(tmp_path, read):
    os.mkfifo(tmp_path / "config.yml")

    with pytest.raises(ConfigError, match=r"config\.yml: cannot be read: not a regular file"):
        read(tmp_path / "config.yml")
