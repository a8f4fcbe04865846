"""Open data of any format, keep it in memory or read it again, and train from a stream."""

import json
import os
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.model.graph import name_inputs, parse_graph
from training.data import (
    ColumnMap,
    read_csv,
    read_hugectr_parquet,
    read_keyset,
    read_norm,
    read_parquet,
    read_raw,
    write_data_set,
)
from training.data.criteo_reader import read_criteo, read_criteo_blocks
from training.data.npz import read_npz
from training.data.opening import columns_of, default_columns, open_data, read_column_map
from training.data.source import FileSource, shuffled_batches
from training.errors import DataError
from training.model.ctr_model import CtrModel
from training.model.document import open_document, read_document
from training.model.trainer import train
from training.optimizers.learning_rate import LearningRateSchedule
from training.samples import Bags, Samples
from training.synthetic.criteo_like import generate


@pytest.fixture
def opened(tmp_path, document):
    """Open data for the graph with two tables, whose inputs are wide (6 slots) and deep (20 slots)."""

    def open_for(path, changes=None, **options):
        document["layers"][0] |= changes or {}
        graph = tmp_path / "graph.json"
        graph.write_text(json.dumps(document), encoding="utf-8")
        return open_data(path, read_document(graph), **options)

    return open_for


@pytest.fixture
def samples():
    return generate(500, seed=1).samples


def all_of(source):
    return Samples.joined(list(source.parts()))


def same(found, expected):
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.dense, expected.dense)
    np.testing.assert_array_equal(found.bags.keys, expected.bags.keys)
    np.testing.assert_array_equal(found.bags.row_ptrs, expected.bags.row_ptrs)


def column_table(samples, names):
    keys = samples.bags.keys.reshape(len(samples), 26)
    return pa.table([*samples.labels.T, *samples.dense.T, *keys.T], names=names)


NAMES = [
    "label",
    *(f"dense_{index}" for index in range(13)),
    *(f"wide_{index}" for index in range(6)),
    *(f"deep_{index}" for index in range(20)),
]


@pytest.mark.parametrize("window_rows", [10, 500])
@pytest.mark.parametrize("form", ["Norm", "Parquet", "parquet", "csv"])
def test_every_format_has_the_same_samples(tmp_path, opened, samples, form, window_rows):
    path = tmp_path / "data.txt"
    if form in ("Norm", "Parquet"):
        write_data_set(path, [samples], form, samples_per_file=90)
    elif form == "parquet":
        path = tmp_path / "data.parquet"
        pq.write_table(column_table(samples, NAMES), path)
    else:
        path = tmp_path / "data.csv"
        pa.csv.write_csv(column_table(samples, NAMES), path)

    source = opened(path, window_rows=window_rows)

    assert type(source) is (Samples if window_rows == 500 else FileSource)
    assert len(source) == 500
    same(all_of(source), samples)
    same(all_of(source[450:]), all_of(source)[450:])


@pytest.mark.parametrize("name", ["data.txt", "data.csv"])
def test_criteos_files_are_streamed(tmp_path, opened, name):
    separator = "," if name.endswith("csv") else "\t"
    rng = np.random.default_rng(0)
    lines = [
        separator.join([str(label), *map(str, dense), *(f"{key:08x}" for key in keys)])
        for label, dense, keys in zip(
            rng.integers(0, 2, 300), rng.integers(0, 99, (300, 13)), rng.integers(0, 2**32, (300, 26)), strict=True
        )
    ]
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    source = opened(tmp_path / name, window_rows=100)

    assert isinstance(source, FileSource)
    same(all_of(source), read_criteo(tmp_path / name))


def test_a_column_map_names_columns(tmp_path, opened, samples, document):
    names = [f"c{index}" for index in range(40)]
    for suffix, write in (("parquet", pq.write_table), ("csv", pa.csv.write_csv)):
        folder = tmp_path / suffix
        folder.mkdir()
        for part in range(2):
            write(column_table(samples[250 * part : 250 * part + 250], names), folder / f"{part}.{suffix}")
    columns = tmp_path / "columns.json"
    inputs = {"label": "c0", "dense": names[1:14], "wide": names[14:20], "deep": names[20:]}
    columns.write_text(json.dumps(inputs), encoding="utf-8")

    for suffix in ("parquet", "csv"):
        same(opened(tmp_path / suffix, columns=columns), samples)
    with pytest.raises(DataError, match=r"0.csv line 1 column label: missing"):
        opened(tmp_path / "csv")

    for change, message in (
        ({"dense": ["c1"]}, "dense: expected 13 columns, got 1"),
        ({"more": "c1"}, "more: "),
        ({"wide": 3}, "wide: "),
    ):
        columns.write_text(json.dumps(inputs | change), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"columns.json: {message}"):
            opened(tmp_path / "csv", columns=columns)
    del inputs["deep"]
    columns.write_text(json.dumps(inputs), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"columns.json: deep: "):
        opened(tmp_path / "csv", columns=columns)


def test_default_columns_are_the_names_of_the_inputs(tmp_path, document):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document), encoding="utf-8")

    assert default_columns(read_document(path)).names == NAMES
    inputs = {"label": "label", "dense": NAMES[1:14], "wide": NAMES[14:20], "deep": NAMES[20:]}
    (tmp_path / "columns.json").write_text(json.dumps(inputs), encoding="utf-8")
    assert read_column_map(tmp_path / "columns.json", read_document(path)).names == NAMES


def test_the_names_in_a_graph_are_its_default_columns(tmp_path, document):
    names = [f"c{index}" for index in range(39)]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(name_inputs(document, names[13:], names[:13])), encoding="utf-8")

    assert default_columns(read_document(path)).names == ["label", *names]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("Norm", None),
        ("npz", None),
        ("Parquet", ["label0", *(f"I{place}" for place in range(1, 14)), *(f"C{place}" for place in range(1, 27))]),
        ("parquet", NAMES),
        ("csv", NAMES),
        ("criteo", ["label", *(f"I{place}" for place in range(1, 14)), *(f"C{place}" for place in range(1, 27))]),
    ],
)
def test_the_columns_of_every_format_that_has_names(tmp_path, samples, document, form, expected):
    path = tmp_path / f"data.{form if form in ('parquet', 'csv', 'npz') else 'txt'}"
    if form in ("Norm", "Parquet"):
        write_data_set(path, [samples[:90]], form)
    elif form == "criteo":
        path.write_text("0" + "\t1" * 13 + "\t00000001" * 26 + "\n", encoding="utf-8")
    elif form != "npz":
        write = pq.write_table if form == "parquet" else pa.csv.write_csv
        write(column_table(samples[:2], NAMES), path)
    (tmp_path / "graph.json").write_text(json.dumps(document), encoding="utf-8")

    found = columns_of(path, read_document(tmp_path / "graph.json"), None)

    assert (found and found.names) == expected


def test_a_sample_that_does_not_fit_is_named_by_its_number_in_the_data(tmp_path, opened, samples):
    sizes = np.ones(500 * 26, np.int64)
    sizes[321 * 26] = 99
    row_ptrs = np.concatenate([[0], np.cumsum(sizes)])
    wide = Samples(samples.labels, samples.dense, Bags(np.arange(row_ptrs[-1]), row_ptrs, 26))
    write_data_set(tmp_path / "data.txt", [wide], "Norm", samples_per_file=100)

    with pytest.raises(ConfigError, match="at most 40 keys are allowed, but sample 321 has 104"):
        opened(tmp_path / "data.txt")


def test_files_without_samples(tmp_path, opened, samples):
    pq.write_table(column_table(samples[:0], NAMES), tmp_path / "data.parquet")

    with pytest.raises(DataError, match=r"data.parquet: no samples"):
        opened(tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"absent.txt: no such file"):
        opened(tmp_path / "absent.txt")


def test_files_that_are_added_later_are_not_read_in_later_epochs(tmp_path, opened, samples, caplog):
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(column_table(samples, NAMES), folder / "1.parquet")
    (folder / "_SUCCESS").touch()
    source = opened(folder, window_rows=10)
    pq.write_table(column_table(samples, NAMES), folder / "0.parquet")

    same(all_of(source), samples)
    assert len(caplog.messages) == 1


def test_a_pipe_is_refused_without_waiting(tmp_path, opened):
    os.mkfifo(tmp_path / "data.csv")

    with pytest.raises(DataError, match="not a regular file or a folder"):
        opened(tmp_path / "data.csv")


@pytest.mark.parametrize(
    "read",
    [
        read_norm,
        partial(read_raw, labels=1, dense=0, slots=1),
        partial(read_parquet, columns=ColumnMap(("label",), (), ("user",))),
        partial(read_csv, columns=ColumnMap(("label",), (), ("user",))),
        read_hugectr_parquet,
        read_criteo_blocks,
        partial(read_npz, document=open_document("ncf")),
        partial(read_keyset, key_dtype="int64"),
    ],
    ids=lambda read: getattr(read, "func", read).__name__,
)
def test_every_reader_refuses_a_pipe_without_waiting(tmp_path, read):
    os.mkfifo(tmp_path / "data")

    with pytest.raises(DataError, match="data: not a regular file"):
        list(read(tmp_path / "data"))


def test_a_stream_learns_what_memory_learns(tmp_path, opened, document):
    """With one window over all samples, the batches are the same too."""
    samples = generate(900, seed=1).samples
    write_data_set(tmp_path / "data.txt", [samples], "Norm", samples_per_file=100)
    stream = opened(tmp_path / "data.txt", window_rows=899)
    options = {"epochs": 2, "batch_size": 64, "schedule": LearningRateSchedule(0.01), "seed": 0}
    results = []
    for source, window_rows in ((samples, 1_000_000), (stream, 1_000_000), (stream, 200)):
        model = CtrModel(parse_graph(document, "graph.json"), seed=0)
        *_, last = train(model, source[:800], source[800:], window_rows=window_rows, **options)
        results.append((last.loss, last.figures))

    assert results[0] == results[1]
    assert results[2] != results[0]
    assert results[2][0] == pytest.approx(results[0][0], abs=0.05)
    assert results[2][1][0]["ones"] == pytest.approx(samples[800:].labels.mean())


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 20), st.integers(1, 60), st.integers(0, 9))
def test_batches_are_shuffled_within_windows(counts, batch_size, window_rows, seed):
    total = sum(counts)
    numbers = Samples(
        np.arange(total, dtype=np.float32)[:, None],
        np.zeros((total, 0), np.float32),
        Bags.one_key_each(np.arange(total)[:, None]),
    )
    bounds = np.cumsum([0, *counts])
    source = FileSource(lambda: (numbers[begin:end] for begin, end in pairwise(bounds)), total, "")

    batches = list(shuffled_batches(source, batch_size, window_rows, np.random.default_rng(seed)))

    assert [len(batch) for batch in batches] == [batch_size] * (total // batch_size) + [total % batch_size] * (
        total % batch_size > 0
    )
    found = Samples.joined(batches)
    window = max(window_rows // batch_size, 1) * batch_size
    for first in range(0, total, window):
        expected = np.arange(first, min(first + window, total))
        assert sorted(found.labels[first : first + window, 0].tolist()) == expected.tolist()
    np.testing.assert_array_equal(found.labels[:, 0], found.bags.keys)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_slices_of_sources_are_those_of_lists(counts, begin, end, other):
    total = sum(counts)
    numbers = Samples(
        np.arange(total, dtype=np.float32)[:, None],
        np.zeros((total, 0), np.float32),
        Bags.one_key_each(np.arange(total)[:, None]),
    )
    bounds = np.cumsum([0, *counts])
    source = FileSource(lambda: (numbers[a:b] for a, b in pairwise(bounds)), total, "")

    expected = list(range(total))[begin:][:end][other:]
    found = source[begin:][:end][other:]

    assert [int(label) for part in found.parts() for label in part.labels[:, 0]] == expected
    assert len(found) == len(expected)
