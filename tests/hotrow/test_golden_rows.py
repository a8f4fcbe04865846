"""One file of rows goes through every way into training and serving, and gives equal bits."""

import datetime
import importlib.util
import json
from bisect import bisect_right
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from serving.config import ModelConfig, TableConfig
from serving.features import columns_of_frame, open_features
from serving.protocol.ctr import batch_of
from serving.protocol.samples import decode_samples
from serving.reading import read_columns
from tests.serving.protocol.raw_tensors import decode_grpc, decode_http
from training.data.opening import open_data
from training.features import FeatureFile
from training.model.document import open_document

GOLDEN = json.loads(Path(__file__).with_name("golden_rows.json").read_text(encoding="utf-8"))
FEATURES = GOLDEN["features"]["features"]
ROWS = [{name: value for name, value in row.items() if name != "label"} for row in GOLDEN["rows"]]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
SAMPLES = len(ROWS)
#: FarmHash Fingerprint64 modulo 1,000,003, of TensorFlow.
HASHES = {"a": 291400, "68fd1e64": 409058, "語": 46352, "Hello": 184354, "日本": 912016, "89": 52828}
TYPES = {
    **dict.fromkeys(("item", "age", "hour"), pa.int64()),
    **dict.fromkeys(("user", "country"), pa.string()),
    **{"tags": pa.list_(pa.string()), "seen": pa.list_(pa.int64()), "is_new": pa.bool_()},
    **dict.fromkeys(("price", "score"), pa.float64()),
}


def key_lists():
    """The keys of each slot of each row, without the offsets in the table, by hand."""
    values = ["de", "Zürich", "日本"]
    for row in ROWS:
        country = row["country"] or "de"
        yield [
            [] if row["user"] is None else [HASHES[row["user"]]],
            [1 + values.index(country) if country in values else 0],
            [] if row["item"] is None else [row["item"]],
            [HASHES[tag] for tag in (row["tags"] or [])[:3]],
            row["seen"] or [],
            [] if row["age"] is None else [bisect_right([18, 40], row["age"])],
            [] if row["is_new"] is None else [int(row["is_new"])],
            [] if row["hour"] is None else [row["hour"]],
        ]


def dense_numbers():
    for row in ROWS:
        price = min(max(0.0 if row["price"] is None else row["price"], 0.0), 1000.0)
        score = np.float32(1 if row["score"] is None else row["score"])
        yield np.log1p(np.float32(price)), (float(score) - 0.25) / 0.5


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    (folder / "definition.json").write_text(json.dumps(GOLDEN["features"]))
    features = FeatureFile(folder / "definition.json", open_document("dcn"))
    features.write(folder)  # as an export does
    return features, folder


@pytest.fixture(scope="module")
def config(features):
    [embedding] = features[0].document.graph.embeddings
    table = TableConfig(name=embedding.table, dim=16, slots=embedding.slots, combiner="sum", file=Path("x"))
    return ModelConfig(
        name="golden",
        graph_file=features[1] / "graph.json",
        dense_file=Path("d"),
        tables=(table,),
        key_type="I64",
        max_batchsize=8,
        dense_dim=2,
        label_dim=1,
    )


@pytest.fixture(scope="module")
def expected(features):
    offsets = {feature.name: feature.offset for feature in features[0].definition.features}
    of_slots = [offsets[name] for name in features[0].slots]
    bags = [[key + at for key in keys] for row in key_lists() for keys, at in zip(row, of_slots, strict=True)]
    return np.array(list(dense_numbers()), np.float32).tobytes(), list(chain(*bags)), [len(bag) for bag in bags]


def bits_of_samples(samples):
    return samples.dense.tobytes(), samples.bags.keys.tolist(), np.diff(samples.bags.row_ptrs).tolist()


def bits(batch):
    [(keys, row_ptrs)] = batch.tables
    return batch.dense.tobytes(), keys.tolist(), np.diff(row_ptrs).tolist()


def arrow_table(**changed):
    labels = {"label": pa.array([row["label"] for row in GOLDEN["rows"]])}
    arrays = {name: pa.array(values, TYPES[name]) for name, values in COLUMNS.items()}
    return pa.table({**labels, **arrays, **changed})


def joined(name, separator):
    return pa.array(["" if values is None else separator.join(map(str, values)) for values in COLUMNS[name]])


DAYS = [None if day is None else datetime.datetime(1970, 1, 1, 23) + datetime.timedelta(day) for day in COLUMNS["hour"]]

TIMES = pa.array(DAYS, pa.timestamp("us", "UTC"))


@pytest.mark.parametrize(
    ("suffix", "changed"),
    [
        ("csv", {"tags": joined("tags", "|"), "seen": joined("seen", " ")}),
        (
            "csv",
            {
                "tags": joined("tags", "|"),
                "seen": joined("seen", " "),
                "hour": pa.array(DAYS, pa.timestamp("us", "UTC")),
            },
        ),
        ("parquet", {}),
        ("parquet", {"hour": TIMES}),
    ],
    ids=["CSV", "CSV with times", "Parquet", "Parquet with times"],
)
def test_files_of_training_data(features, expected, tmp_path, suffix, changed):
    file = tmp_path / f"rows.{suffix}"
    write = pa.csv.write_csv if suffix == "csv" else pq.write_table
    write(arrow_table(**changed), file)

    samples = open_data(file, features[0].document, features=features[0])

    assert bits_of_samples(samples) == expected
    assert samples.labels[:, 0].tolist() == [row["label"] for row in GOLDEN["rows"]]


def frame_of(library):
    table = arrow_table().drop_columns("label")
    if library == "pandas":
        return table.to_pandas()
    return importlib.import_module("polars").from_arrow(table) if library == "polars" else table


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is absent"))
        for name in ("pandas", "polars", "pyarrow")
    ],
)
def test_data_frames(config, expected, library):
    reader = open_features(config)
    assert bits(read_columns(config, reader, *columns_of_frame(reader, frame_of(library)))) == expected


def test_pythons_values_and_json(config, expected):
    reader = open_features(config)
    assert bits(read_columns(config, reader, reader.columns(COLUMNS, SAMPLES), SAMPLES)) == expected
    assert (
        bits(decode_samples(json.dumps({"samples": ROWS}).encode(), config, features_for=lambda _: reader)[0])
        == expected
    )


def tensors():
    """The datatype and the array of each tensor. A missing value is an empty text, so integers come as text too."""
    given = {}
    for name, values in COLUMNS.items():
        if pa.types.is_list(TYPES[name]):
            lists = [value or [] for value in values]
            given[f"{name}.offsets"] = "INT32", np.cumsum([0, *map(len, lists)]).astype(np.int32)
            values = list(chain(*lists))
        if name in ("price", "score"):
            given[name] = "FP32", np.array([float("nan") if value is None else value for value in values], np.float32)
        elif name == "seen":
            given[name] = "INT64", np.array(values)
        else:
            texts = ["" if value is None else str(value) for value in values]
            given[name] = "BYTES", np.array([text.encode() for text in texts], object)
    return given


def for_triton(config, reader, given):
    """As Triton's Python backend gives them: every tensor is [1, n]."""
    return batch_of(config, {name: array[None] for name, (_, array) in given.items()}, reader)


CARRIERS = {
    "http": partial(decode_http, binary=True),
    "grpc raw": partial(decode_grpc, raw=True),
    "grpc contents": partial(decode_grpc, raw=False),
    "triton": for_triton,
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_tensors(config, expected, carrier):
    assert bits(CARRIERS[carrier](config, open_features(config), tensors())) == expected
