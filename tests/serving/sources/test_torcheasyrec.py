"""Deltas as TorchEasyRec writes them: Parquet files with the columns of its schema."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.errors import ModelFileError
from serving.sources import open_checkpoint, open_table

SCHEMA = pa.schema(
    [
        ("global_step", pa.int64()),
        ("rank", pa.int32()),
        ("world_size", pa.int32()),
        ("embedding_name", pa.string()),
        ("embedding_role", pa.string()),
        ("feature_name", pa.string()),
        ("table_fqn", pa.string()),
        ("key_id", pa.int64()),
        ("embedding", pa.list_(pa.float32())),
    ]
)


def write(file, rows):
    """Write rows of (step, table, key, vector)."""
    steps, names, keys, vectors = zip(*rows, strict=True)
    columns = {name: [None] * len(rows) for name in SCHEMA.names}
    columns |= {"global_step": steps, "embedding_name": names, "key_id": keys, "embedding": vectors}
    pq.write_table(pa.table(columns, schema=SCHEMA), file)


def everything(rows):
    [(keys, vectors)] = rows.batches(100)
    rows.check_keys()
    return dict(zip(keys.tolist(), vectors.tolist(), strict=True))


def test_of_equal_keys_the_row_of_the_last_step_counts(tmp_path):
    write(tmp_path / "rank1.parquet", [(20, "ads", 7, [2, 2]), (10, "ads", 9, [9, 9]), (10, "users", 1, [1])])
    write(tmp_path / "rank0.parquet", [(10, "ads", 7, [1, 1]), (30, "ads", -4, [4, 4])])

    assert open_checkpoint(tmp_path).tables() == ["ads", "users"]
    assert everything(open_table("ads", tmp_path)) == {7: [2, 2], 9: [9, 9], -4: [4, 4]}
    assert everything(open_table("users", tmp_path / "rank1.parquet")) == {1: [1]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"key_id": [1]}), "expected the columns embedding_name, .*; embedding_name is missing"),
        ([(1, "t", 1, [1, 2]), (1, "t", 2, [1])], "table 't': expected rows of one dimension, found 1 and more"),
        ([(1, "t", None, [1, 2])], "expected a value in each row, found null"),
    ],
)
def test_a_file_with_other_rows_is_named(tmp_path, table, message):
    if isinstance(table, list):
        write(tmp_path / "a.parquet", table)
    else:
        pq.write_table(table, tmp_path / "a.parquet")

    with pytest.raises(ModelFileError, match=f"a.parquet: {message}"):
        open_table("t", tmp_path)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no file")

    with pytest.raises(ModelFileError, match=r"a.parquet: is no Parquet file"):
        open_table("t", tmp_path)


def test_files_of_several_dimensions_are_named(tmp_path):
    write(tmp_path / "a.parquet", [(1, "t", 1, [1, 2])])
    write(tmp_path / "b.parquet", [(1, "t", 2, np.ones(3))])

    with pytest.raises(ModelFileError, match="#t: expected rows of one dimension, found 2 and 3"):
        open_table("t", tmp_path)
