"""Generated data: HugeCTR's power law, and files that a session trains on."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from training.data import read_hugectr_parquet, read_norm, read_raw
from training.hugectr import (
    Check_t,
    DataGenerator,
    DataGeneratorParams,
    DataReaderType_t,
    Distribution_t,
    PowerLaw_t,
    Session,
    solver_parser_helper,
)
from training.hugectr.data_generator import power_law
from training.samples import Samples

SIZES = [30, 20, 50, 10, 40]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def params(**settings):
    return DataGeneratorParams(
        **{
            "format": "Norm",
            "label_dim": 1,
            "dense_dim": 2,
            "num_slot": 5,
            "i64_input_key": False,
            "source": "file_list.txt",
            "eval_source": "file_list_test.txt",
            "slot_size_array": SIZES,
            "num_files": 3,
            "eval_num_files": 1,
            "num_samples_per_file": 1000,
            "num_samples": 3000,
            "eval_num_samples": 1000,
        }
        | settings
    )


def test_the_power_law_is_hugectrs():
    keys = power_law(np.array([0, 0.25, 0.5, 0.75, 0.9, 0.99, 1]), 100_000, 1.2)

    assert keys.tolist() == [0, 3, 19, 275, 4038, 64992, 99999]


@given(st.floats(0, 1), st.integers(1, 2**40), st.sampled_from([0.3, 0.9, 1.1, 1.2, 1.3, 3.0]))
def test_keys_are_those_of_the_slot(u, size, alpha):
    [key] = power_law(np.array([u]), size, alpha)

    assert 0 <= key < size


def test_norm_files():
    DataGenerator(params(nnz_array=[1, 2, 1, 1, 3], i64_input_key=True)).generate()

    training = Samples.joined(list(read_norm("file_list.txt", "int64")))
    assert len(training) == 3000
    assert len(Samples.joined(list(read_norm("file_list_test.txt", "int64")))) == 1000
    assert (training.bags.sizes == [1, 2, 1, 1, 3]).all()
    bounds = np.cumsum([0, *SIZES])
    for slot, bags in enumerate(training.bags.split([1] * 5)):
        assert bounds[slot] <= bags.keys.min() <= bags.keys.max() < bounds[slot + 1]
    counts = np.bincount(training.bags.split([1] * 5)[2].keys - bounds[2])
    assert counts[0] > 3 * counts[5] > 3 * counts[40]
    assert sorted(path.name for path in Path("file_list").iterdir()) == ["0.norm", "1.norm", "2.norm"]


def test_uniform_keys_without_check_sums():
    DataGenerator(params(dist_type=Distribution_t.Uniform, check_type=Check_t.Non)).generate()

    training = Samples.joined(list(read_norm("file_list.txt", "uint32")))
    counts = np.bincount(training.bags.split([1] * 5)[0].keys)
    assert counts.min() > 60  # 100 on average
    record = 4 * (1 + 2) + 5 * (4 + 4)
    assert Path("file_list/0.norm").stat().st_size == 64 + 1000 * record


@pytest.mark.parametrize("has_floats", [True, False])
def test_raw_files(has_floats):
    DataGenerator(
        params(format=DataReaderType_t.Raw, source="train.bin", eval_source="test.bin", float_label_dense=has_floats)
    ).generate()

    training = Samples.joined(list(read_raw("train.bin", 1, 2, 5, slot_sizes=SIZES, has_floats=has_floats)))
    assert (len(training), Path("test.bin").stat().st_size) == (3000, 1000 * 4 * 8)
    assert set(np.unique(training.labels)) == {0, 1}
    assert training.bags.keys.max() < sum(SIZES)


def test_parquet_files():
    DataGenerator(params(format="Parquet", i64_input_key=True, nnz_array=[1, 2, 1, 1, 1])).generate()

    training = Samples.joined(list(read_hugectr_parquet("file_list.txt", slot_sizes=SIZES)))
    assert len(training) == 3000
    assert (training.bags.sizes == [1, 2, 1, 1, 1]).all()
    assert Path("file_list/_metadata.json").exists()


def test_the_same_seed_gives_the_same_files():
    contents = []
    for seed in (0, 0, 1):
        DataGenerator(params(seed=seed)).generate()
        contents.append(Path("file_list/1.norm").read_bytes())

    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("data_format", ["Norm", "Raw", "Parquet"])
def test_a_session_learns_from_generated_data(graph, write_graph, data_format):
    is_parquet = data_format == "Parquet"
    DataGenerator(params(format=data_format, i64_input_key=is_parquet, float_label_dense=True)).generate()
    graph["layers"][0] |= {"format": data_format, "source": "file_list.txt", "eval_source": "file_list_test.txt"}
    if data_format != "Norm":
        graph["layers"][0] |= {"slot_size_array": SIZES, "float_label_dense": True}
    solver = solver_parser_helper(batchsize=100, repeat_dataset=False, i64_input_key=is_parquet)
    session = Session(solver, write_graph(graph))
    for _ in range(3):
        session.get_data_reader_train().set_source()
        while session.train():
            pass

    [(_, area)] = session.evaluation()

    assert area > 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "CSV"}, "format: expected Norm or Raw or Parquet, got 'CSV'"),
        ({"check_type": "sum"}, "check_type: expected Sum or None"),
        ({"dist_type": "Zipf"}, "dist_type: expected PowerLaw or Uniform"),
        ({"power_law_type": 1}, "power_law_type: expected Long or Medium or Short or Specific"),
        ({"label_dim": 0}, "label_dim: expected a whole number of at least 1"),
        ({"num_files": True}, "num_files: expected a whole number"),
        ({"dense_dim": -1}, "dense_dim: expected a whole number of at least 0"),
        ({"slot_size_array": [1, 2]}, "slot_size_array: expected 5 numbers of at least 1"),
        ({"nnz_array": [1, 1, 1, 1, 0]}, "nnz_array: expected 5 numbers of at least 1"),
        ({"format": "Raw", "nnz_array": [1, 1, 1, 1, 2]}, "nnz_array: expected 1 key per slot in Raw files"),
        ({"format": "Raw", "i64_input_key": True}, "i64_input_key: expected True for Parquet and False for Raw"),
        ({"format": "Parquet"}, "i64_input_key: expected True for Parquet and False for Raw"),
        ({"slot_size_array": [2**31] * 5}, "slot_size_array: expected at most .* keys of uint32"),
        ({"alpha": 1.0}, "alpha: expected a number above 0 that is not 1"),
        ({"alpha": -1.2}, "alpha: expected a number above 0"),
    ],
)
def test_parameters_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=f"DataGeneratorParams: {message}"):
        params(**settings)


def test_named_power_laws():
    exponents = {kind: params(power_law_type=kind, alpha=2.0).exponent for kind in PowerLaw_t}

    assert list(exponents.values()) == [0.9, 1.1, 1.3, 2.0]
