"""Requests and rows are packed into one piece of memory, as the kernels read them."""

from collections import namedtuple

import numpy as np
import pytest

from gpu_cache.bag_layout import BagRows, most_request_bytes
from gpu_cache.request import RequestBuffer
from kernels.host import HostTable, RequestPacker, fetch_tables, pack_rows

Bags = namedtuple("Bags", ["keys", "row_ptrs"])
TABLES = [BagRows(2, "mean", 1.5), BagRows(1, "sqrtn")]


class Memory:
    """A device without a GPU."""

    @staticmethod
    def pinned(shape, dtype):
        return np.zeros(shape, dtype)


@pytest.fixture
def buffer():
    return RequestBuffer(Memory, TABLES, [4, 5], max_samples=8, max_keys=1000, dense_dim=3)


def draw(rng, samples, longest=4):
    """A request with a random number of keys per bag."""
    request = []
    for table in TABLES:
        sizes = rng.integers(0, longest + 1, samples * table.slots)
        row_ptrs = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        request.append(Bags(rng.integers(-(2**62), 2**62, row_ptrs[-1]), row_ptrs))
    return request


@pytest.mark.parametrize("samples", [2, 5, 8])
@pytest.mark.parametrize("weighted", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_each_head_says_where_its_table_is(buffer, samples, weighted, is_whole):
    rng = np.random.default_rng(samples)
    for has_dense in (True, False):
        bags = draw(rng, samples)
        dense = rng.standard_normal((samples, 3), dtype=np.float32) if has_dense else None
        weights = [rng.random(one.keys.size, dtype=np.float32) if t in weighted else None for t, one in enumerate(bags)]

        floats = buffer.pack(bags, weights if weighted else None, dense, is_whole)

        data, head = buffer.bytes.tobytes(), buffer.head
        used = [dense.tobytes()] if has_dense else []
        first_bag = first_position = first_item = 0
        for t, (of_table, table) in enumerate(zip(bags, TABLES, strict=True)):
            one = head[t]
            for at, part in (("row_ptrs_at", of_table.row_ptrs), ("keys_at", of_table.keys)):
                assert data[one[at] : one[at] + part.nbytes] == part.tobytes()
            if t in weighted:
                assert data[one["weights_at"] : one["weights_at"] + weights[t].nbytes] == weights[t].tobytes()
                used.append(weights[t].tobytes())
            else:
                assert one["weights_at"] == 0
            assert (one["bags"], one["keys"]) == (of_table.row_ptrs.size - 1, of_table.keys.size)
            assert (one["first_bag"], one["first_position"], one["first_item"]) == (
                first_bag,
                first_position,
                first_item,
            )
            assert (one["combiner"], one["max_norm"]) == (t + 1, table.max_norm)
            assert 1 <= one["item_bags"] <= 128
            assert one["first_float"] == floats[t]
            first_bag, first_position = first_bag + one["bags"], first_position + one["keys"]
            first_item += -(-int(one["bags"]) // int(one["item_bags"]))
        assert (buffer.samples, buffer.items) == (samples, first_item)
        sizes = sum(part.nbytes for of_table in bags for part in of_table) + sum(map(len, used)) + head.nbytes
        assert 0 <= buffer.used_bytes - sizes < 2 * 16  # each part is aligned
        if has_dense:
            assert data[buffer.dense_place][: dense.nbytes] == dense.tobytes()


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (3, 2)])
@pytest.mark.parametrize("samples", [1, 8])
def test_a_table_whose_bags_have_equal_sizes_has_no_offsets(buffer, sizes, samples):
    bags = []
    for table, size in zip(TABLES, sizes, strict=True):
        row_ptrs = size * np.arange(samples * table.slots + 1, dtype=np.int32)
        bags.append(Bags(np.arange(row_ptrs[-1], dtype=np.int64), row_ptrs))

    buffer.pack(bags, None)

    assert buffer.head["row_ptrs_at"].tolist() == [-size for size in sizes]
    data = buffer.bytes.tobytes()
    for one, of_table in zip(buffer.head, bags, strict=True):
        assert data[one["keys_at"] : one["keys_at"] + of_table.keys.nbytes] == of_table.keys.tobytes()
    assert buffer.used_bytes == buffer.head.nbytes + sum(of_table.keys.nbytes for of_table in bags)


def test_equal_sizes_at_first_are_not_enough(buffer):
    row_ptrs = np.array([0, 1, 2, 4, 4], np.int32)
    first = Bags(np.arange(4, dtype=np.int64), row_ptrs)

    buffer.pack([first, Bags(np.zeros(2, np.int64), np.array([0, 1, 2], np.int32))], None)

    at = buffer.head["row_ptrs_at"][0]
    assert buffer.bytes[at : at + row_ptrs.nbytes].tobytes() == row_ptrs.tobytes()


def test_arrays_with_gaps_are_packed_like_others(buffer):
    bags = draw(np.random.default_rng(0), 4)
    buffer.pack(bags, None, np.ones((4, 3), np.float32))
    expected = buffer.bytes[: buffer.used_bytes].tobytes()
    buffer.bytes[:] = 0

    apart = [Bags(np.repeat(bag.keys, 2)[::2], np.repeat(bag.row_ptrs, 2)[::2]) for bag in bags]
    buffer.pack(apart, None, np.ones((4, 6), np.float32)[:, ::2])

    assert buffer.bytes[: buffer.used_bytes].tobytes() == expected


def test_arrays_that_are_not_aligned_are_packed_like_others(buffer):
    bags = draw(np.random.default_rng(0), 4)
    buffer.pack(bags, None)
    expected = buffer.bytes[: buffer.used_bytes].tobytes()

    askew = [Bags(*[np.frombuffer(b"x" + part.tobytes(), part.dtype, offset=1) for part in bag]) for bag in bags]
    buffer.pack(askew, None)

    assert buffer.bytes[: buffer.used_bytes].tobytes() == expected


@pytest.mark.parametrize(
    ("row_ptrs", "message"),
    [
        ([1, 1, 1], "table 1: row_ptrs: expected offsets from 0 to 1, got 1 to 1"),
        ([0, 1, 2], "table 1: row_ptrs: expected offsets from 0 to 1, got 0 to 2"),
        ([0, 2, 1], "table 1: row_ptrs: falls from 2 to 1 at 2"),
        ([0, -(2**31), 1], "table 1: row_ptrs: falls from 0 to -2147483648 at 1"),
        ([0, 1], r"table 1: row_ptrs: expected int32\[3\], got int32\[2\]"),
    ],
)
def test_offsets_that_are_no_csr_are_refused_and_change_no_head(buffer, row_ptrs, message):
    buffer.pack(draw(np.random.default_rng(0), 2), None)
    before = buffer.head.tobytes()
    first = Bags(np.zeros(4, np.int64), np.arange(5, dtype=np.int32))

    with pytest.raises(ValueError, match=message):
        buffer.pack([first, Bags(np.zeros(1, np.int64), np.array(row_ptrs, np.int32))], None)

    assert buffer.head.tobytes() == before


def test_a_buffer_that_is_too_small_is_refused():
    size = most_request_bytes(TABLES, 8, 1000, 3)
    for missing in (0, 1):
        arguments = [2, 1], [0, 1], [0.0, 0.0], 8, 1000, 3
        if missing:
            with pytest.raises(ValueError, match="bytes: too small for the largest request"):
                RequestPacker(np.zeros(size - missing, np.uint8), *arguments)
        else:
            RequestPacker(np.zeros(size, np.uint8), *arguments)
    with pytest.raises(ValueError, match="of the same tables"):
        RequestPacker(np.zeros(size, np.uint8), [2, 1], [0], [0.0, 0.0], 8, 1000, 3)


@pytest.mark.parametrize("dims", [(4, 8), (1, 7, 4), (3,)])
def test_rows_are_packed_at_multiples_of_16_bytes(dims):
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((count, dim), dtype=np.float32) for count, dim in zip((3, 0, 2), dims, strict=False)]
    memory, places = np.zeros(1024, np.uint8), np.zeros(sum(map(len, rows)), np.int32)

    pack_rows(memory, 32, rows, places)

    packed = [row.tobytes() for of_table in rows for row in of_table]
    assert [memory[16 * at :].tobytes()[: len(row)] for at, row in zip(places, packed, strict=True)] == packed
    sizes = [-(-len(row) // 16) for row in packed]
    assert places.tolist() == (2 + np.cumsum(sizes) - sizes).tolist()


def test_rows_without_room_are_refused():
    rows, places = [np.zeros((2, 3), np.float32)], np.zeros(2, np.int32)

    pack_rows(np.zeros(48, np.uint8), 16, rows, places)
    for size, at in ((47, 16), (48, 17), (48, -16)):
        with pytest.raises(ValueError, match="at: expected a multiple of 16 with room"):
            pack_rows(np.zeros(size, np.uint8), at, rows, places)
    with pytest.raises(ValueError, match=r"places: expected int32\[M\] of shape \[2\]"):
        pack_rows(np.zeros(48, np.uint8), 16, rows, places[:1])


def test_rows_of_several_tables_are_those_of_each_table():
    rng = np.random.default_rng(1)
    tables = [HostTable(dim, 100, row_dtype) for dim, row_dtype in ((3, "fp32"), (5, "fp16"), (4, "int8"))]
    for table in tables:
        table.insert(np.arange(60), rng.standard_normal((60, table.dim), dtype=np.float32))
    keys = [rng.integers(0, 100, count) for count in (40, 0, 90)]
    out, expected = (
        [np.ones((of.size, table.dim), np.float32) for of, table in zip(keys, tables, strict=True)] for _ in "ab"
    )

    found = fetch_tables(tables, keys, out)

    masks = [table.fetch(of_table, rows) for table, of_table, rows in zip(tables, keys, expected, strict=True)]
    assert found.tolist() == np.concatenate(masks).tolist()
    assert [rows.tobytes() for rows in out] == [rows.tobytes() for rows in expected]


def test_keys_or_rows_that_do_not_fit_the_tables_are_refused():
    table, key, row = HostTable(3, 10), np.zeros(1, np.int64), np.zeros((1, 3), np.float32)

    with pytest.raises(ValueError, match="expected keys and out of each table"):
        fetch_tables([table], [key, key], [row])
    with pytest.raises(ValueError, match=r"out: expected float32\[N, D\] of shape \[1, 3\]"):
        fetch_tables([table], [key], [np.zeros((1, 4), np.float32)])
    with pytest.raises(TypeError, match="keys"):
        fetch_tables([table], [key.astype(np.int32)], [row])
