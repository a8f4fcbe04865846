"""Dumps as ``DynamicEmbDump`` writes them: a folder per collection, a pair of files per table and rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ModelFileError
from serving.sources import open_checkpoint, open_table

COLLECTION = "model.sparse_arch._embedding_bag_collection"


def write_rank(folder, table, rank, world_size, keys, dim=3):
    """Write one rank's part. Every float of a key's vector is half the key."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = np.array(keys, "<i8")
    keys.tofile(folder / f"{table}_emb_keys.rank_{rank}.world_size_{world_size}")
    np.repeat(keys / 2, dim).astype("<f4").tofile(folder / f"{table}_emb_values.rank_{rank}.world_size_{world_size}")
    keys.tofile(folder / f"{table}_emb_scores.rank_{rank}.world_size_{world_size}")


def everything(rows, batch_rows):
    table = {}
    for keys, vectors in rows.batches(batch_rows):
        assert keys.size <= batch_rows
        assert vectors.dtype == np.float32
        table.update(zip(keys.tolist(), vectors.tolist(), strict=True))
    return table


@settings(deadline=None, max_examples=25)
@given(
    ranks=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    batch_rows=st.integers(1, 7),
    dim=st.integers(1, 3),
)
def test_the_rows_of_all_ranks_are_one_table(tmp_path_factory, ranks, batch_rows, dim):
    dump = tmp_path_factory.mktemp("dump")
    for rank, count in enumerate(ranks):  # row-wise sharding: a rank has the keys with its remainder
        write_rank(dump / COLLECTION, "ads", rank, len(ranks), [rank + len(ranks) * i for i in range(count)], dim)

    rows = open_table("ads", dump).as_dtype("fp32")

    expected = {rank + len(ranks) * i for rank, count in enumerate(ranks) for i in range(count)}
    assert (rows.rows, rows.dim) == (len(expected), dim)
    assert everything(rows, batch_rows) == {key: [key / 2] * dim for key in expected}
    rows.check_keys()


def test_more_than_nine_ranks_are_one_table(tmp_path):
    for rank in range(12):
        write_rank(tmp_path, "ads", rank, 12, [rank])

    assert sorted(everything(open_table("ads", tmp_path).as_dtype("fp32"), 5)) == list(range(12))


def test_tables_are_found_in_the_dump_its_collection_and_by_their_whole_name(tmp_path):
    write_rank(tmp_path / COLLECTION, "ads", 0, 1, [1])
    write_rank(tmp_path / COLLECTION, "ads_emb", 0, 1, [2])
    write_rank(tmp_path / "model.other", "users", 0, 1, [3])

    assert everything(open_table("ads", tmp_path).as_dtype("fp32"), 9).keys() == {1}
    assert everything(open_table("ads_emb", tmp_path / COLLECTION).as_dtype("fp32"), 9).keys() == {2}
    assert everything(open_table("anything", f"{tmp_path}#model.other/users").as_dtype("fp32"), 9).keys() == {3}
    assert len(open_checkpoint(tmp_path).tables()) == 3


@pytest.mark.parametrize(
    ("sizes", "row_bytes", "fitting"),
    [
        pytest.param((8,), 16, ["fp32", "fp16", "bf16"], id="1 slot of 8 halves, or 2 slots of 4 floats"),
        pytest.param((8,), 32, ["fp32"], id="1 slot of 8 floats"),
        pytest.param((2, 8), 16, ["fp16", "bf16"], id="2 slots of 8 halves"),
        pytest.param((2, 8), 32, ["fp32"], id="2 slots of 8 floats"),
        pytest.param((3,), 6, ["fp16", "bf16"], id="no whole floats"),
        pytest.param((3,), 7, [], id="no whole numbers"),
    ],
)
def test_the_bytes_of_a_row_and_the_input_show_which_types_fit(tmp_path, sizes, row_bytes, fitting):
    write_rank(tmp_path, "ads", 0, 1, [1, 2])
    (tmp_path / "ads_emb_values.rank_0.world_size_1").write_bytes(b"x" * 2 * row_bytes)

    assert open_table("ads", tmp_path).fitting(sizes) == fitting


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_of_every_type_are_read(tmp_path, dtype):
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    vectors = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(torch_dtype)
    for rank in range(2):
        write_rank(tmp_path, "ads", rank, 2, [rank, rank + 2])
        stored = vectors[rank::2].contiguous().view(torch.uint8).numpy()
        stored.tofile(tmp_path / f"ads_emb_values.rank_{rank}.world_size_2")

    rows = open_table("ads", tmp_path).as_dtype(dtype)

    assert everything(rows, 3) == dict(enumerate(vectors.float().tolist()))


def test_hidden_folders_hold_no_tables_and_the_log_says_so(tmp_path, caplog):
    write_rank(tmp_path / "_collection", "ads", 0, 1, [1])
    write_rank(tmp_path / ".trash", "ads", 0, 1, [2])

    assert open_checkpoint(tmp_path).tables() == ["_collection/ads"]
    [line] = caplog.messages
    assert "skipped, because a name begins with '.': 1 ('.trash/ads_emb_keys.rank_0.world_size_1')" in line


class TestRefused:
    def test_rows_with_a_fraction_of_a_number(self, tmp_path):
        write_rank(tmp_path, "ads", 0, 1, [1, 2])
        (tmp_path / "ads_emb_values.rank_0.world_size_1").write_bytes(b"x" * 12)

        with pytest.raises(ModelFileError, match="expected rows of fp32, 4 bytes per number, found 6 bytes per key"):
            open_table("ads", tmp_path).as_dtype("fp32")

    def test_a_rank_whose_files_are_missing(self, tmp_path):
        for rank in (0, 2):
            write_rank(tmp_path, "ads", rank, 4, [rank])

        with pytest.raises(
            ModelFileError, match="#ads: expected the files of 4 ranks: the files of rank 1, 3 are missing"
        ):
            open_table("ads", tmp_path)

    def test_a_huge_world_size_in_a_name(self, tmp_path):
        write_rank(tmp_path, "ads", 0, 10**15, [1])

        with pytest.raises(ModelFileError, match="000 ranks: the files of rank 1, 2, 3, 4, 5 are missing"):
            open_table("ads", tmp_path)

    def test_a_rank_beyond_the_last(self, tmp_path):
        for rank in (0, 1, 2):
            write_rank(tmp_path, "ads", rank, 2, [rank])

        with pytest.raises(ModelFileError, match="expected the files of 2 ranks: found those of rank 0, 1, 2"):
            open_table("ads", tmp_path)

    def test_files_of_two_dumps(self, tmp_path):
        write_rank(tmp_path, "ads", 0, 1, [1])
        write_rank(tmp_path, "ads", 0, 2, [1])

        with pytest.raises(ModelFileError, match=r"expected the files of one dump, found world sizes \[1, 2\]"):
            open_table("ads", tmp_path)

    def test_keys_without_their_vectors(self, tmp_path):
        write_rank(tmp_path, "ads", 0, 1, [1])
        (tmp_path / "ads_emb_values.rank_0.world_size_1").unlink()

        with pytest.raises(ModelFileError, match=r"ads_emb_values\.rank_0\.world_size_1: cannot be read: No such file"):
            open_table("ads", tmp_path)

    @pytest.mark.parametrize(("keys", "floats"), [([1, 2, 4], 5), ([], 3)])
    def test_vectors_that_do_not_divide_among_the_keys(self, tmp_path, keys, floats):
        write_rank(tmp_path, "ads", 0, 1, keys)
        np.ones(floats, "<f4").tofile(tmp_path / "ads_emb_values.rank_0.world_size_1")

        expected = f"for each of {len(keys)} keys .*" if keys else "expected no vector, as .* has no key"
        with pytest.raises(ModelFileError, match=rf"{expected}, found {4 * floats} bytes"):
            open_table("ads", tmp_path)

    def test_ranks_of_different_dimensions(self, tmp_path):
        write_rank(tmp_path, "ads", 0, 2, [1], dim=3)
        write_rank(tmp_path, "ads", 1, 2, [2], dim=4)

        with pytest.raises(
            ModelFileError, match=r"expected rows of one dimension in all files, found rows of 12 and 16 bytes"
        ):
            open_table("ads", tmp_path)

    def test_a_table_without_rows(self, tmp_path):
        write_rank(tmp_path, "ads", 0, 1, [])

        with pytest.raises(ModelFileError, match="expected at least one row, found none"):
            open_table("ads", tmp_path)

    def test_vectors_of_no_floats(self, tmp_path):
        write_rank(tmp_path, "ads", 0, 1, [1], dim=0)

        with pytest.raises(ModelFileError, match=r"for each of 1 keys .*, found 0 bytes"):
            open_table("ads", tmp_path)

    def test_a_key_that_two_ranks_have(self, tmp_path):
        for rank in (0, 1):
            write_rank(tmp_path, "ads", rank, 2, [5, rank])

        with pytest.raises(ModelFileError, match="#ads: key 5 is in row 0 and again in row 2"):
            open_table("ads", tmp_path).as_dtype("fp32").check_keys()
