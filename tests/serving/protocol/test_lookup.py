"""The tensors of a model that is only looked up."""

from pathlib import Path

import numpy as np
import pytest

from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError
from serving.protocol.lookup import answer_of, keys_of, signature_of, triton_config


def config(key_type="I64", limits=(2, None)):
    tables = (("user", 2), ("item", 4))
    return ModelConfig(
        name="m",
        graph_file=None,
        dense_file=None,
        tables=tuple(
            TableConfig(
                name=name, dim=dim, slots=1, combiner="sum", file=Path("x"), max_keys_per_sample=max_keys_per_sample
            )
            for (name, dim), max_keys_per_sample in zip(tables, limits, strict=True)
        ),
        key_type=key_type,
        max_batchsize=3,
        dense_dim=0,
        label_dim=0,
    )


def inputs(keys=(5, 6, 7, 5), counts=(1, 3), key_dtype=np.int64):
    return {"KEYS": np.array(keys, key_dtype), "NUMKEYS": np.array(counts, np.int32)}


def test_metadata_shows_the_tensors_of_the_hps_backend():
    signature = signature_of(config())

    assert [spec.metadata() for spec in signature.inputs] == [
        {"name": "KEYS", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "NUMKEYS", "datatype": "INT32", "shape": [-1, -1]},
    ]
    assert signature.outputs[0].metadata() == {"name": "OUTPUT0", "datatype": "FP32", "shape": [-1]}
    assert signature_of(config("I32")).inputs[0].datatypes == ("UINT32", "INT64")


@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
def test_keys_come_table_after_table_as_clients_of_the_hps_backend_send_them(shape):
    given = {name: tensor.reshape(shape) for name, tensor in inputs().items()}

    assert [keys.tolist() for keys in keys_of(config(), given)] == [[5], [6, 7, 5]]


@pytest.mark.parametrize(("keys", "counts"), [([], (0, 0)), ([7], (0, 1)), ([7], (1, 0))])
def test_a_table_may_have_no_keys(keys, counts):
    by_table = keys_of(config(), inputs(keys, counts))

    assert [of_table.size for of_table in by_table] == list(counts)
    assert all(of_table.dtype == np.int64 for of_table in by_table)


def test_uint32_keys_are_widened():
    by_table = keys_of(config("I32"), inputs([2**32 - 1], (1, 0), np.uint32))

    assert by_table[0].tolist() == [2**32 - 1]


def test_the_answer_has_the_rows_of_all_tables_one_after_the_other():
    answer = answer_of([np.array([[1, 2]], np.float32), np.arange(8, dtype=np.float32).reshape(2, 4)])

    assert answer.dtype == np.float32
    assert answer.tolist() == [1, 2, 0, 1, 2, 3, 4, 5, 6, 7]
    assert answer_of([np.empty((0, 2), np.float32), np.empty((0, 4), np.float32)]).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": [[5, 6], [7, 5]]}, r"KEYS: expected the shape \[n\] or \[1, n\], got \[2, 2\]"),
        ({"keys": [5.0, 6.0, 7.0, 5.0], "key_dtype": np.float32}, "KEYS: expected integers, got an array of float32"),
        ({"keys": [5, 6, 2**63 - 1, 5]}, "KEYS: 9223372036854775807 at position 2: is reserved"),
        ({"counts": [[1], [3]]}, r"NUMKEYS: expected the shape \[n\] or \[1, n\], got \[2, 1\]"),
        ({"counts": [4]}, "NUMKEYS: expected 2 numbers, one per table; got 1"),
        ({"counts": [1, 3, 0]}, "NUMKEYS: expected 2 numbers, one per table; got 3"),
        ({"counts": [5, -1]}, "NUMKEYS: expected 0 or more at position 1, got -1"),
        ({"counts": [1, 2]}, "NUMKEYS: the tables have 3 keys, but KEYS has 4"),
        ({"counts": [1, 4]}, "NUMKEYS: the tables have 5 keys, but KEYS has 4"),
        (
            {"keys": [1] * 7, "counts": [7, 0]},
            "NUMKEYS: 7 keys, but table 'user' takes at most 6: 3 samples of 2 keys",
        ),
    ],
)
def test_a_wrong_tensor_is_refused_with_its_name(change, message):
    with pytest.raises(RequestError, match=message):
        keys_of(config(), inputs(**change))


def test_a_key_beyond_uint32_is_refused_if_the_model_has_uint32_keys():
    with pytest.raises(RequestError, match=f"KEYS: {2**32} at position 1: a uint32 key is in 0..{2**32 - 1}"):
        keys_of(config("I32"), inputs([1, 2**32], (1, 1)))


def test_a_table_without_a_limit_takes_any_number_of_keys():
    assert keys_of(config(), inputs(range(100), (0, 100)))[1].size == 100


def test_the_configuration_is_in_tritons_words():
    document = triton_config("hps", config())

    assert [(entry["name"], entry["data_type"], entry["dims"]) for entry in document["input"]] == [
        ("KEYS", "TYPE_INT64", [-1, -1]),
        ("NUMKEYS", "TYPE_INT32", [-1, -1]),
    ]
    assert document["output"] == [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
    assert document["parameters"] == {
        "max_batchsize": {"string_value": "3"},
        "tables": {"string_value": "user item"},
        "dims": {"string_value": "2 4"},
    }
