"""The tensors of a click-through model."""

from pathlib import Path

import numpy as np
import pytest

from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError
from serving.protocol.ctr import batch_of, signature_of, triton_config


def config(key_type="I64", dense_dim=2):
    return ModelConfig(
        name="m",
        graph_file=Path("g"),
        dense_file=Path("d"),
        tables=(TableConfig(name="user", dim=4, slots=2, combiner="sum", file=Path("x")),),
        key_type=key_type,
        max_batchsize=8,
        dense_dim=dense_dim,
        label_dim=3,
    )


def inputs(dense_shape=(1, 4), keys=(5, 6, 7), key_dtype=np.int64):
    return {
        "DES": np.arange(4, dtype=np.float32).reshape(dense_shape),
        "CATCOLUMN": np.array(keys, key_dtype),
        "ROWINDEX": np.array([0, 1, 1, 3, 3], np.int32),
    }


def test_metadata_shows_the_declared_key_type_first_and_the_samples_as_any_extent():
    signature = signature_of(config("I32"))

    assert [spec.metadata() for spec in signature.inputs] == [
        {"name": "DES", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "CATCOLUMN", "datatype": "UINT32", "shape": [-1, -1]},
        {"name": "ROWINDEX", "datatype": "INT32", "shape": [-1, -1]},
    ]
    assert signature.outputs[0].metadata() == {"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 3]}
    assert signature_of(config("I64")).inputs[1].datatypes == ("INT64", "UINT32")


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 2)])
def test_dense_features_may_come_flat_as_hugectr_clients_send_them_or_by_sample(shape):
    assert batch_of(config(), inputs(shape)).dense.tolist() == [[0, 1], [2, 3]]


def test_dense_features_may_be_left_out_only_if_the_model_has_none():
    without = {name: array for name, array in inputs().items() if name != "DES"}

    assert signature_of(config(dense_dim=0)).inputs[0].optional
    assert not signature_of(config()).inputs[0].optional
    assert batch_of(config(dense_dim=0), without).dense.shape == (2, 0)


def test_keys_by_slot_need_no_offsets():
    arrays = {"DES": inputs()["DES"], "CATCOLUMN": np.array([[1, 2], [3, 4]])}

    assert batch_of(config(), arrays).joined.row_ptrs.tolist() == [0, 1, 2, 3, 4]


def test_dense_features_of_another_width_are_refused_even_if_the_count_fits():
    with pytest.raises(RequestError, match="DES"):
        batch_of(config(), inputs((4, 1)))


def test_uint32_keys_are_widened():
    keys = batch_of(config(), inputs(keys=[1, 2, 2**32 - 1], key_dtype=np.uint32)).tables[0].keys

    assert keys.dtype == np.int64
    assert keys.tolist() == [1, 2, 2**32 - 1]


def test_int64_keys_of_a_uint32_model_must_fit():
    assert batch_of(config("I32"), inputs(keys=[1, 2, 2**32 - 1])).samples == 2
    with pytest.raises(RequestError, match="CATCOLUMN"):
        batch_of(config("I32"), inputs(keys=[1, 2, 2**32]))


def test_the_configuration_is_in_tritons_words():
    document = triton_config("dcn", config())

    assert document["name"] == "dcn"
    assert document["max_batch_size"] == 0
    assert [(entry["name"], entry["data_type"], entry["dims"]) for entry in document["input"]] == [
        ("DES", "TYPE_FP32", [-1, -1]),
        ("CATCOLUMN", "TYPE_INT64", [-1, -1]),
        ("ROWINDEX", "TYPE_INT32", [-1, -1]),
    ]
    assert [entry["optional"] for entry in document["input"]] == [False, False, True]
    assert document["output"] == [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1, 3]}]
    assert document["parameters"]["max_batchsize"] == {"string_value": "8"}
    assert "kinds" not in document["parameters"]
