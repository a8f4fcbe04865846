import pytest

from serving.config import GpuCacheConfig, GpuNetworkConfig, read_inference_config
from serving.config.inference import InferenceClause
from serving.errors import ConfigError, ModelFileError
from serving.model.capacity import rows_with_headroom
from serving.parameter_server.table_files import memory_needed


def test_a_v3_inference_json_becomes_one_record_per_table(write_model):
    table = write_model.table
    model = write_model(table(slots=3, dim=4, max_keys=9), table(slots=2, dim=6, combiner=1, layout="localized"))

    config = read_inference_config(model.config_file, "dcn")

    assert (config.name, config.version, config.key_type, config.dense_dim, config.label_dim) == ("dcn", 0, "I64", 2, 1)
    assert config.max_batchsize == 64
    first, second = config.tables
    assert (first.name, first.slots, first.dim, first.combiner, first.row_layout) == (
        "table0",
        3,
        4,
        "sum",
        "distributed",
    )
    assert (second.slots, second.dim, second.combiner, second.row_layout) == (2, 6, "mean", "localized")
    assert first.max_keys_per_sample == 9
    assert config.full_name(first) == "dcn.table0"


def test_relative_paths_start_from_the_folder_of_the_json(write_model, tmp_path, monkeypatch):
    model = write_model()
    monkeypatch.chdir(tmp_path)

    config = read_inference_config("model/model.json", "dcn")

    assert config.dense_file.resolve() == model.config_file.parent / "_dense_10.model"
    assert config.tables[0].file.resolve() == model.config_file.parent / "0_sparse_10.model"


def test_absent_keys_have_the_defaults_of_hugectr_v3(write_model):
    model = write_model(declare_key_type=False, key_type="I32")
    del model.document["inference"]["max_batchsize"]
    model.write_config()

    config = read_inference_config(model.config_file, "dcn")

    assert (config.max_batchsize, config.key_type) == (1024, "I32")
    assert config.gpu_cache == GpuCacheConfig(wanted=None, mode="exact", hit_rate_threshold=0.5, fill="below_threshold")
    assert config.gpu_network == GpuNetworkConfig(precision="fp32", captures_graphs=True)


@pytest.mark.parametrize(("given", "expected"), [(None, "I32"), (False, "I32"), (True, "I64")])
def test_the_caller_decides_the_key_type_if_the_file_does_not(write_model, given, expected):
    model = write_model(declare_key_type=False)

    assert read_inference_config(model.config_file, "dcn", given).key_type == expected


def test_an_argument_that_contradicts_the_key_type_of_the_file_is_refused(write_model):
    model = write_model(key_type="I64")

    with pytest.raises(ConfigError, match=r"inference\.input_key_type: the file says 'I64', .* i64_input_key=False"):
        read_inference_config(model.config_file, "dcn", False)


def test_gpu_settings_change_only_the_records_of_gpus(write_model):
    model = write_model()
    plain = read_inference_config(model.config_file, "dcn")
    said = {"hit_rate_threshold": 0.25, "mixed_precision": 1024, "algorithm_search": False, "cuda_graph": False}
    model.document["inference"] |= said
    model.write_config()

    config = read_inference_config(model.config_file, "dcn")

    assert config.gpu_cache == GpuCacheConfig(hit_rate_threshold=0.25, fill="below_threshold")
    assert config.gpu_network == GpuNetworkConfig(precision="fp16", captures_graphs=False)
    assert config.model_copy(update={"gpu_cache": plain.gpu_cache, "gpu_network": plain.gpu_network}) == plain


def test_products_on_a_gpu_may_use_tf32(write_model):
    model = write_model()
    model.document["inference"]["enable_tf32_compute"] = True
    model.write_config()

    assert read_inference_config(model.config_file, "dcn").gpu_network == GpuNetworkConfig(precision="tf32")


def test_other_keys_of_genuine_files_are_accepted_and_change_nothing(write_model):
    model = write_model()
    plain = read_inference_config(model.config_file, "dcn")
    model.document["inference"]["label"] = 1  # in the samples of HugeCTR's Triton backend
    model.document["model_name"] = "dcn"  # in exported graphs
    model.document["solver"] = None  # it is ignored
    model.write_config()

    assert read_inference_config(model.config_file, "dcn") == plain


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"max_batchsize": 0}, "inference.max_batchsize"),
        ({"max_batchsize": "64"}, "inference.max_batchsize"),
        ({"max_batchsize": True}, "inference.max_batchsize"),
        ({"max_batchsize": 64.0}, "inference.max_batchsize"),
        ({"hit_rate_threshold": -0.1}, "inference.hit_rate_threshold"),
        ({"hit_rate_threshold": 1.01}, "inference.hit_rate_threshold"),
        ({"input_key_type": "i64"}, "inference.input_key_type"),
        ({"dense_model_file": ""}, "inference.dense_model_file"),
        ({"dense_model_file": "a\0"}, "inference.dense_model_file"),
        ({"sparse_model_file": "a\0"}, "inference.sparse_model_file[0]"),
        ({"dense_model_file": ["a"]}, "inference.dense_model_file"),
        ({"sparse_model_file": [1]}, "inference.sparse_model_file[0]"),
        ({"sparse_model_file": ["a", "b"]}, "inference.sparse_model_file"),
        ({"sparse_model_file": []}, "inference.sparse_model_file"),
        ({"mixed_precision": 100}, "inference.mixed_precision"),
        ({"mixed_precision": 128.0}, "inference.mixed_precision"),
        ({"algorithm_search": 1}, "inference.algorithm_search"),
        ({"cuda_graph": "true"}, "inference.cuda_graph"),
        ({"max_batch_size": 64}, "inference.max_batch_size"),
        ({"label": "click"}, "inference.label"),
        *(({key: None}, f"inference.{key}") for key in InferenceClause.model_fields),
        ({"embedding_cache_key_bits": 32}, "inference.embedding_cache_key_bits"),  # of int64 keys
        ({"embedding_cache_key_bits": "64"}, "inference.embedding_cache_key_bits"),
        ({"embedding_cache_key_bits": 64.0}, "inference.embedding_cache_key_bits"),
        ({"enable_tf32_compute": "true"}, "inference.enable_tf32_compute"),
        ({"enable_tf32_compute": True, "mixed_precision": 128}, "inference.enable_tf32_compute"),
    ],
)
def test_a_wrong_or_unknown_value_is_refused_with_its_json_path(write_model, change, path):
    model = write_model()
    model.document["inference"] |= change
    model.write_config()

    with pytest.raises(ConfigError) as caught:
        read_inference_config(model.config_file, "dcn")

    assert (caught.value.source, caught.value.path) == (str(model.config_file), path)


@pytest.mark.parametrize("key", ["dense_model_file", "sparse_model_file"])
def test_a_missing_model_file_key_is_named(write_model, key):
    model = write_model()
    del model.document["inference"][key]
    model.write_config()

    with pytest.raises(ConfigError, match=rf"inference\.{key}: required, but absent"):
        read_inference_config(model.config_file, "dcn")


def test_a_file_without_an_inference_clause_is_refused(write_model):
    model = write_model()
    del model.document["inference"]
    model.write_config()

    with pytest.raises(ConfigError, match="inference: required, but absent"):
        read_inference_config(model.config_file, "dcn")


def test_an_unknown_key_at_the_top_is_refused(write_model):
    model = write_model()
    model.document["inferences"] = {}
    model.write_config()

    with pytest.raises(ConfigError, match="inferences: unknown key"):
        read_inference_config(model.config_file, "dcn")


@pytest.mark.parametrize("name", ["", "a.b", "a b", "ä", "stats", "x" * 121])
def test_an_invalid_model_name_is_refused(write_model, name):
    model = write_model()

    with pytest.raises(ConfigError, match="model name"):
        read_inference_config(model.config_file, name)


def test_memory_needed_covers_rows_keys_headroom_and_dense_weights(write_model):
    table = write_model.table
    model = write_model(table(rows=3000, dim=16), table(rows=50, dim=4))
    config = read_inference_config(model.config_file, "dcn")

    needed = memory_needed(config)

    assert list(needed) == ["table0", "table1", "dense"]
    assert 3000 * (16 * 4 + 8) < needed["table0"] < 4 * 3000 * (16 * 4 + 8)
    assert needed["dense"] == config.dense_file.stat().st_size


@pytest.mark.parametrize(("rows", "room"), [(0, 64), (3200, 3400), (4_000_000_000, 3_500_000_000)])
def test_headroom_is_a_sixteenth_up_to_the_limit_of_a_host_table(rows, room):
    assert rows_with_headroom(rows) == room


def test_memory_needed_names_a_missing_table_file(write_model):
    model = write_model()
    config = read_inference_config(model.config_file, "dcn")
    config.tables[0].file.unlink()

    with pytest.raises(ModelFileError, match=r"0_sparse_10\.model: no such file"):
        memory_needed(config)
