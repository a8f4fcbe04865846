"""Every format refuses values that training cannot learn from, and names their place."""

import dataclasses
import json
import re

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from training.data import ColumnMap, read_csv, read_norm, read_parquet, read_raw, write_norm, write_raw
from training.data.checks import checked
from training.data.columns import write_parquet_files
from training.data.opening import open_data
from training.errors import DataError
from training.model.document import open_document, read_document
from training.samples import Bags, Samples

BIG = 2**63 - 1
COLUMNS = ColumnMap(("label0",), ("I1", "I2"), ("C1", "C2"))


def samples_with(labels=(0, 1, 1), dense=(0, 0, 0), keys=(0, 0, 0)):
    """Three samples. The label, the second dense feature and the second slot's key are the arguments."""
    floats = [np.array(column, np.float32) for column in (labels, dense)]
    zeros = np.zeros(3, np.float32)
    bags = Bags.one_key_each(np.stack([np.array([1, 2, 3]), np.array(keys, np.int64)], axis=1))
    return Samples(floats[0][:, None], np.stack([zeros, floats[1]], axis=1), bags)


def norm(path, samples, sizes):
    write_norm(path / "data", samples.labels, samples.dense, samples.bags)
    return read_norm(path / "data", batch_size=2)


def raw(path, samples, sizes):
    write_raw(path / "data", samples.labels, samples.dense, samples.bags.keys.reshape(-1, 2), has_floats=True)
    return read_raw(path / "data", 1, 2, 2, slot_sizes=sizes, has_floats=True, batch_size=2)


def parquet(path, samples, sizes):
    [file] = write_parquet_files(path, [samples])
    return read_parquet(file, COLUMNS, slot_sizes=sizes)


def csv(path, samples, sizes):
    [file] = write_parquet_files(path, [samples])
    pyarrow.csv.write_csv(pq.read_table(file), path / "data.csv")
    return read_csv(path / "data.csv", COLUMNS, slot_sizes=sizes)


def memory(path, samples, sizes):
    yield checked(samples[:2], "data", 0, slot_sizes=sizes)
    yield checked(samples[2:], "data", 2, slot_sizes=sizes)


NAMES = {parquet: ("label0", "I2", "C2"), csv: ("label0", "I2", "C2")}
KEYS = f"expected a key from {-BIG + 1} to {BIG - 2}"
NAN = [norm, raw, parquet, memory]  # pyarrow reads "nan" in CSV as no value, see test_columns.py
EVERY, SIGNED, SIZED = [norm, raw, parquet, csv, memory], [norm, parquet, csv, memory], [raw, parquet, csv, memory]
WRONG = [
    (EVERY, {"labels": (0, 1, 5)}, 0, "expected 0 or 1, found 5"),
    (EVERY, {"labels": (0, 1, 0.5)}, 0, "expected 0 or 1, found 0.5"),
    (EVERY, {"labels": (0, 1, 0.9999999)}, 0, "expected 0 or 1, found 0.9999999"),
    (EVERY, {"labels": (0, 1, -1)}, 0, "expected 0 or 1, found -1"),
    (NAN, {"labels": (0, 1, np.nan)}, 0, "expected 0 or 1, found nan; leave out rows without a label"),
    (NAN, {"dense": (0, 1, np.nan)}, 1, "expected a finite number, found nan"),
    (EVERY, {"dense": (0, 1, -np.inf)}, 1, "expected a finite number, found -inf"),
    (SIGNED, {"keys": (0, 1, BIG)}, 2, f"{KEYS}, found {BIG}"),
    (SIGNED, {"keys": (0, 1, -BIG)}, 2, f"{KEYS}, found {-BIG}"),
    (SIZED, {"keys": (0, 1, 4), "sizes": (9, 4)}, 2, "expected a key from 0 to 3, found 4"),
    ([parquet, csv, memory], {"keys": (0, 1, -1), "sizes": (9, 4)}, 2, "expected a key from 0 to 3, found -1"),
]


@pytest.mark.parametrize(
    ("form", "values", "column", "reason"),
    [
        pytest.param(form, values, column, reason, id=f"{form.__name__}: {reason}")
        for forms, values, column, reason in WRONG
        for form in forms
    ],
)
def test_a_wrong_value_is_named_with_its_file_column_and_record(tmp_path, form, values, column, reason):
    name = NAMES.get(form, ("label[0]", "dense[1]", "slot[1]"))[column]
    place = f"line 4 column {name}" if form is csv else f"column {name} record 2"
    samples = samples_with(**{kind: of_kind for kind, of_kind in values.items() if kind != "sizes"})

    with pytest.raises(DataError, match=re.escape(f"{place}: {reason}")):
        list(form(tmp_path, samples, values.get("sizes")))


def test_a_key_of_a_ragged_bag_is_named_by_its_slot_and_record():
    bags = Bags(np.array([0, 1, 2, 3, 7]), np.array([0, 2, 2, 3, 5]), 2)
    samples = Samples(np.zeros((2, 1), np.float32), np.zeros((2, 0), np.float32), bags)

    shifted = checked(samples, "data", 0, slot_sizes=[4, 8]).bags

    assert shifted.keys.tolist() == [0, 1, 2, 7, 11]
    assert shifted.row_ptrs.tolist() == [0, 2, 2, 3, 5]
    with pytest.raises(DataError, match=r"data column slot\[1\] record 11: expected a key from 0 to 6, found 7"):
        checked(samples, "data", 10, slot_sizes=[4, 7])


def test_criteos_keys_are_held_against_the_sizes_of_the_slots(tmp_path):
    document = json.loads(json.dumps(open_document("dcn").document))
    document["layers"][0] |= {"format": "Parquet", "slot_size_array": [5] * 26}
    (tmp_path / "graph.json").write_text(json.dumps(document), encoding="utf-8")
    graph = read_document(tmp_path / "graph.json")
    (tmp_path / "data.txt").write_text("\t".join(["0", *["1"] * 13, *["0000000a"] * 26]) + "\n", encoding="utf-8")

    with pytest.raises(DataError, match=f"data.txt column C1 record 0: expected a key from 0 to 4, found {2**40 + 10}"):
        open_data(tmp_path / "data.txt", graph)
    few = dataclasses.replace(graph, data=dataclasses.replace(graph.data, slot_sizes=(5,)))
    assert len(open_data(tmp_path / "data.txt", few)) == 1
