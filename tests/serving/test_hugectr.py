"""The calls of HugeCTR v3.0's inference API, on model files in v3.0's own formats."""

import inspect
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from serving.config import read_inference_config
from serving.errors import ConfigError, RequestError, UnknownModelError
from serving.hugectr import CreateEmbeddingCache, CreateParameterServer, InferenceSession


def write_requests(model, path, samples, rng):
    """Write the four lines of HugeCTR's inference notebook: labels, dense features, keys, row_ptrs."""
    dense, bags = model.draw_request(rng, samples)
    keys, row_ptrs, _ = model.flatten(bags)
    lines = [rng.integers(0, 2, samples).tolist(), dense.reshape(-1).tolist(), keys, row_ptrs]
    path.write_text("\n".join(" ".join(map(str, line)) for line in lines) + "\n")
    return dense, bags


@pytest.mark.parametrize("key_type", ["I32", "I64"])
@pytest.mark.parametrize("layout", ["distributed", "localized"])
@pytest.mark.parametrize("combiner", [0, 1], ids=["sum", "mean"])
@pytest.mark.parametrize("declare_key_type", [True, False])
def test_the_inference_sample_of_hugectr_v3_runs(write_model, tmp_path, key_type, layout, combiner, declare_key_type):
    table = write_model.table(slots=26, dim=16, combiner=combiner, layout=layout, rows=400, max_keys=80)
    model = write_model(table, features=13, key_type=key_type, declare_key_type=declare_key_type)
    data_path = tmp_path / "inputs.txt"
    dense, bags = write_requests(model, data_path, 20, np.random.default_rng(8))
    config_file, model_name, i64_input_key = str(model.config_file), "dcn", key_type == "I64"

    with data_path.open() as data_file:
        labels = [int(item) for item in data_file.readline().split(" ")]
        dense_features = [float(item) for item in data_file.readline().split(" ")]
        embedding_columns = [int(item) for item in data_file.readline().split(" ")]
        row_ptrs = [int(item) for item in data_file.readline().split(" ")]
    parameter_server = CreateParameterServer([config_file], [model_name], i64_input_key)
    embedding_cache = CreateEmbeddingCache(parameter_server, 0, False, 0.2, config_file, model_name, i64_input_key)
    inference_session = InferenceSession(config_file, 0, embedding_cache)
    output = inference_session.predict(dense_features, embedding_columns, row_ptrs, i64_input_key)

    assert len(output) == len(labels) == 20
    # Float32 against float64, for sums of 429 products.
    np.testing.assert_allclose(output, model.expected(dense, bags), rtol=1e-4, atol=1e-5)
    parameter_server.close()


def test_one_parameter_server_holds_several_models(write_model):
    models = {name: write_model(folder=name, seed=seed) for seed, name in enumerate(("first", "second"))}
    server = CreateParameterServer([one.config_file for one in models.values()], list(models), True)
    dense, bags = models["first"].draw_request(np.random.default_rng(9), 4)
    keys, row_ptrs, _ = models["first"].flatten(bags)

    for name, model in models.items():
        cache = CreateEmbeddingCache(server, 0, False, 1.0, model.config_file, name, True)
        output = InferenceSession(model.config_file, 0, cache, engine="numpy").predict(dense, keys, row_ptrs)
        np.testing.assert_allclose(output, model.expected(dense, bags), rtol=2e-5, atol=2e-6)
    server.close()


@pytest.fixture
def server(write_model):
    model = write_model()
    server = CreateParameterServer([model.config_file], ["dcn"], True)
    yield server
    server.close()


@pytest.fixture
def cache_arguments(server, tmp_path):
    return {
        "parameter_server": server,
        "cuda_dev_id": 0,
        "use_gpu_embedding_cache": False,
        "cache_size_percentage": 0.2,
        "model_config_path": tmp_path / "model" / "model.json",
        "model_name": "dcn",
        "i64_input_key": True,
    }


def test_a_cache_of_an_unknown_model_is_refused(cache_arguments):
    with pytest.raises(UnknownModelError, match="no model 'wdl' is loaded"):
        CreateEmbeddingCache(**cache_arguments | {"model_name": "wdl"})


def test_a_cache_of_another_key_type_than_the_server_is_refused(cache_arguments):
    with pytest.raises(ConfigError, match="i64_input_key: False, but the parameter server loaded 'dcn' with I64 keys"):
        CreateEmbeddingCache(**cache_arguments | {"i64_input_key": False})


def test_a_cache_of_another_configuration_than_the_server_is_refused(cache_arguments, write_model):
    other = write_model(write_model.table(slots=2), folder="other")

    with pytest.raises(ConfigError, match="model_config_path: has other tables than"):
        CreateEmbeddingCache(**cache_arguments | {"model_config_path": other.config_file})


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "0.2", None, True])
def test_a_cache_size_outside_zero_to_one_is_refused(cache_arguments, share):
    with pytest.raises(ConfigError, match="cache_size_percentage: expected 0 to 1"):
        CreateEmbeddingCache(**cache_arguments | {"cache_size_percentage": share})


@pytest.mark.parametrize("index", ["0", -1, None, 1.0, True, 1024])
@pytest.mark.parametrize("has_cache", [False, True])
def test_a_device_id_that_is_not_the_index_of_a_gpu_is_refused_by_name(cache_arguments, index, has_cache):
    arguments = {"cuda_dev_id": index, "use_gpu_embedding_cache": has_cache}
    with pytest.raises(ConfigError, match="cuda_dev_id: expected the index of a GPU, 0 to 1023, got"):
        CreateEmbeddingCache(**cache_arguments | arguments, device="runner")


def test_without_a_gpu_the_tiers_answer_and_one_warning_says_so(cache_arguments, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupy", None)

    with_gpu = CreateEmbeddingCache(**cache_arguments | {"use_gpu_embedding_cache": True})
    without = CreateEmbeddingCache(**cache_arguments)

    [message] = caplog.messages
    assert message.startswith("CreateEmbeddingCache: model dcn has no GPU cache, and the tiers answer: cuda:0: ")
    keys = [np.arange(9)] * len(without.config.tables)
    for one, other in zip(with_gpu.lookup(keys).embeddings, without.lookup(keys).embeddings, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_arguments_have_the_names_of_hugectrs_documentation(cache_arguments):
    cache = CreateEmbeddingCache(**cache_arguments)
    file = cache_arguments["model_config_path"]

    session = InferenceSession(config_file=file, device_id=0, embedding_cache=cache)

    assert session.config == cache.config
    assert list(inspect.signature(session.predict).parameters) == [
        "dense_feature",
        "embeddingcolumns",
        "row_ptrs",
        "i64_input_key",
        "outputs",  # ours: after HugeCTR's, and only by name
    ]
    assert list(inspect.signature(CreateParameterServer).parameters) == [
        "model_config_path",
        "model_name",
        "i64_input_key",
    ]


@pytest.mark.parametrize("switch", ["use_gpu_embedding_cache", "i64_input_key"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_that_is_neither_true_nor_false_is_refused(cache_arguments, switch, value):
    with pytest.raises(ConfigError, match=f"CreateEmbeddingCache: {switch}: expected True or False, got {value!r}"):
        CreateEmbeddingCache(**cache_arguments | {switch: value})


def test_an_i64_input_key_that_is_neither_true_nor_false_is_refused(write_model):
    with pytest.raises(ConfigError, match="CreateParameterServer: i64_input_key: expected True or False, got 'yes'"):
        CreateParameterServer([write_model().config_file], ["dcn"], "yes")


@pytest.mark.parametrize("server", [None, "ps"])
def test_a_wrong_parameter_server_is_refused(cache_arguments, server):
    with pytest.raises(ConfigError, match="parameter_server: expected what CreateParameterServer returned, got"):
        CreateEmbeddingCache(**cache_arguments | {"parameter_server": server})


def test_a_configuration_may_be_named_by_another_path_to_the_same_file(cache_arguments, monkeypatch):
    file = cache_arguments["model_config_path"]
    monkeypatch.chdir(file.parents[1])

    cache = CreateEmbeddingCache(**cache_arguments | {"model_config_path": f"model/../model/{file.name}"})

    assert InferenceSession(f"model/{file.name}", 0, cache, engine="numpy").config.tables == cache.config.tables


def test_a_session_on_another_device_than_its_cache_is_refused(cache_arguments):
    cache = CreateEmbeddingCache(**cache_arguments | {"cuda_dev_id": 1})

    with pytest.raises(ConfigError, match="device_id 0, but the embedding cache was created for device 1"):
        InferenceSession(cache_arguments["model_config_path"], 0, cache)


def test_lists_of_different_lengths_are_refused(write_model):
    file = write_model().config_file

    with pytest.raises(ConfigError, match="model_name: 2 names for 1 configuration files"):
        CreateParameterServer([file], ["a", "b"], True)


@pytest.mark.parametrize(("files", "names"), [("model.json", ["a"]), (["model.json"], "a"), (None, [])])
def test_arguments_that_are_not_lists_are_refused(files, names):
    with pytest.raises(ConfigError, match="expected a list, got"):
        CreateParameterServer(files, names, True)


def test_a_name_that_is_not_text_is_refused(write_model):
    with pytest.raises(ConfigError, match="model name 1: expected"):
        CreateParameterServer([write_model().config_file], [1], True)


def test_one_name_for_two_models_is_refused(write_model):
    file = write_model().config_file

    with pytest.raises(ConfigError, match="CreateParameterServer: model_name: the name 'dcn' is given twice"):
        CreateParameterServer([file, file], ["dcn", "dcn"], True)


def test_a_key_type_that_contradicts_the_file_is_refused(write_model):
    file = write_model(key_type="I64").config_file

    with pytest.raises(ConfigError, match=r"inference\.input_key_type"):
        CreateParameterServer([file], ["dcn"], False)


def test_predict_with_the_wrong_key_type_is_refused(cache_arguments):
    cache = CreateEmbeddingCache(**cache_arguments)
    session = InferenceSession(cache_arguments["model_config_path"], 0, cache, engine="numpy")

    with pytest.raises(RequestError, match="i64_input_key=False"):
        session.predict([0.0, 0.0], [0], [0, 1, 1, 1], False)


def test_a_genuine_v3_inference_config_is_read_unchanged(tmp_path):
    default = Path(__file__).parents[3] / "shared" / "data"
    file = Path(os.environ.get("HOTROW_TEST_DATA", default)) / "hugectr_configs" / "simple_inference.json"
    if not file.exists():
        pytest.skip(f"{file} is absent; set HOTROW_TEST_DATA")

    config = read_inference_config(file, "simple")

    clause = json.loads(file.read_text())["inference"]
    expected = (clause["max_batchsize"], clause["hit_rate_threshold"])
    assert (config.max_batchsize, config.gpu_cache.hit_rate_threshold) == expected
    assert str(config.tables[0].file) == clause["sparse_model_file"]
    assert (config.tables[0].dim, config.tables[0].slots, config.tables[0].combiner) == (16, 26, "mean")
