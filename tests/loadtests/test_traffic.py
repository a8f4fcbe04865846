"""What a load test sends, and how many users send it, without Locust and without a server."""

import numpy as np
import pytest

from loadtests.checks import choose_model, refuse_remote
from loadtests.scenarios import SCENARIOS
from loadtests.traffic import Traffic
from serving import load_model
from serving.config import read_repository
from serving.errors import ModelFileError, ServingError
from serving.reading import read_batch
from tests.tools.tiny_model import NamedModel, TinyModel


def config_of(model, folder):
    model.write(folder, "tiny")
    [config] = read_repository(folder).models
    return config


@pytest.mark.parametrize(
    "model", [TinyModel(), TinyModel(tables={"only": 2}, dense_dim=0, key_type="I32")], ids=["int64", "uint32"]
)
def test_a_request_is_one_that_the_model_takes(model, tmp_path):
    config = config_of(model, tmp_path)

    arrays = Traffic(config, samples=16, skew=1, unknown=0.5).arrays()

    batch = read_batch(config, arrays.get("DES"), arrays["CATCOLUMN"], arrays["ROWINDEX"])
    assert batch.samples == 16


@pytest.mark.parametrize("skew", [0, 0.8, 1, 1.5])
def test_known_keys_are_the_tables_own(tmp_path, skew):
    config = config_of(TinyModel(rows=100), tmp_path)
    traffic = Traffic(config, samples=64, skew=skew, unknown=0)

    keys = np.concatenate([traffic.arrays()["CATCOLUMN"] for _ in range(200)])

    assert set(keys.ravel()) == set(range(100))


@pytest.mark.parametrize("key_type", ["I64", "I32"])
def test_unknown_keys_are_in_no_table(tmp_path, key_type):
    config = config_of(TinyModel(rows=1000, key_type=key_type), tmp_path)

    keys = Traffic(config, samples=64, skew=1, unknown=1).arrays()["CATCOLUMN"]

    assert not set(keys.ravel()) & set(range(1000))


def test_a_share_of_the_keys_is_unknown(tmp_path):
    config = config_of(TinyModel(rows=1000), tmp_path)
    traffic = Traffic(config, samples=64, skew=1, unknown=0.2)

    keys = np.concatenate([traffic.arrays()["CATCOLUMN"] for _ in range(100)])

    assert np.mean(keys >= 1000) == pytest.approx(0.2, abs=0.02)


def test_a_higher_skew_sends_fewer_different_keys(tmp_path):
    config = config_of(TinyModel(rows=1000), tmp_path)

    different = [
        len(np.unique(Traffic(config, samples=64, skew=skew, unknown=0).arrays()["CATCOLUMN"])) for skew in (0, 1, 2)
    ]

    assert different == sorted(different, reverse=True)
    assert len(set(different)) == 3


def test_the_most_frequent_key_follows_zipfs_law(tmp_path):
    config = config_of(TinyModel(tables={"only": 1}, rows=1000), tmp_path)
    traffic = Traffic(config, samples=64, skew=1, unknown=0)

    keys = np.concatenate([traffic.arrays()["CATCOLUMN"] for _ in range(300)])

    _, counts = np.unique(keys, return_counts=True)
    # With the density 1 / (rank * ln 1001), rank 1 has this share.
    assert counts.max() / keys.size == pytest.approx(np.log(2) / np.log(1001), rel=0.1)


def test_a_request_has_no_more_samples_than_the_model_allows(tmp_path):
    config = config_of(TinyModel(max_batchsize=8), tmp_path)

    assert Traffic(config, samples=64, skew=1, unknown=0).arrays()["CATCOLUMN"].shape == (8, 3)


def test_a_request_has_one_user_and_many_candidates(tmp_path):
    model = NamedModel(tables={"t": 4}, names=("a", "b", "c", "shown"), dense_names=("x", "y", "z"), max_batchsize=64)
    with load_model(model.write(tmp_path)) as session:
        arrays = Traffic(session.config, samples=500, skew=1, unknown=0, has_candidates=True).arrays()

        assert {name: array.shape for name, array in arrays.items()} == {
            **dict.fromkeys(("a", "b", "c", "x", "y", "z"), (1,)),
            "shown": (500,),
        }
        assert session.predict(arrays).shape == (500, 1)


def test_candidates_of_a_model_without_names_are_an_error(tmp_path):
    with pytest.raises(ServingError, match="candidates need names of slots and dense features, but 'tiny' has none"):
        Traffic(config_of(TinyModel(), tmp_path), samples=500, skew=1, unknown=0, has_candidates=True)


def test_a_missing_table_is_an_error(tmp_path):
    config = config_of(TinyModel(), tmp_path)
    (tmp_path / "tiny" / "1" / "user" / "key").unlink()

    with pytest.raises(ModelFileError, match="key"):
        Traffic(config, samples=64, skew=1, unknown=0)


@pytest.mark.parametrize(
    ("scenario", "users"),
    [
        ("steady", [20, 20, 20, 20, 20, 20]),
        ("ramp", [1, 5, 10, 15, 20, 20]),
        ("spike", [2, 2, 20, 2, 2, 2]),
        ("soak", [20, 20, 20, 20, 20, 20]),
        ("candidates", [20, 20, 20, 20, 20, 20]),
    ],
)
def test_a_scenario_has_its_users_over_time(scenario, users):
    assert [SCENARIOS[scenario].users(elapsed, 20) for elapsed in (0.0, 0.2, 0.4, 0.6, 0.8, 0.99)] == users


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_always_has_a_user(scenario):
    assert all(SCENARIOS[scenario].users(step / 100, 1) == 1 for step in range(100))


@pytest.mark.parametrize("host", ["http://127.0.0.1:8000", "127.0.0.2:8001", "http://localhost:8000", "[::1]:8001"])
def test_this_machine_may_get_load(host):
    refuse_remote(host)


@pytest.mark.parametrize(
    "host", ["http://192.0.2.1:8000", "0.0.0.0:8000", "http://localhost.example.org", "[2001:db8::1]:8001", "8000", ""]
)
def test_another_machine_gets_no_load(host):
    with pytest.raises(ServingError, match="is not this machine"):
        refuse_remote(host)


def test_the_only_model_needs_no_name(tmp_path):
    config = config_of(TinyModel(), tmp_path)

    assert choose_model([config], None) is config
    assert choose_model([config, config.model_copy(update={"name": "b"})], "tiny") is config


def test_the_newest_version_of_a_model_is_chosen(tmp_path):
    TinyModel().write(tmp_path, "tiny", 1)
    TinyModel(rows=10).write(tmp_path, "tiny", 2)
    (tmp_path / "tiny" / "config.pbtxt").write_text("version_policy: { all {} }")

    models = read_repository(tmp_path).models

    assert {model.version for model in models} == {1, 2}
    assert choose_model(models, None).version == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "several models: choose one of tiny, b with --model"), ("c", "no model 'c'; expected tiny, b")],
)
def test_a_model_that_cannot_be_chosen_is_refused(tmp_path, name, message):
    config = config_of(TinyModel(), tmp_path)

    with pytest.raises(ServingError, match=message):
        choose_model([config, config.model_copy(update={"name": "b"})], name)
