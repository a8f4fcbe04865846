"""The rows of a table in a file: what is read is what was written, and every damage is named."""

import io

import numpy as np
import pytest

from serving.errors import ModelFileError
from training.row_file import BLOCK_ROWS, TableRows, read_rows, write_rows

FLOATS = (1, 1)  # of vectors and of states


def drawn(rows, states=1):
    rng = np.random.default_rng(rows)
    vectors, states = (rng.normal(size=(rows, floats)).astype(np.float32) for floats in (1, states))
    keys, steps, slots = (rng.integers(0, 2**62, rows) for _ in range(3))
    return TableRows(keys, vectors, states, steps, slots.astype(np.uint64))


def written(*parts, rule="adam", floats=FLOATS):
    file = io.BytesIO()
    write_rows(file, rule, *floats, parts)
    return file.getvalue()


def joined(parts, name):
    return np.concatenate([getattr(part, name) for part in parts])


@pytest.mark.parametrize("counts", [(), (1,), (0, 3, 0, 2), (BLOCK_ROWS - 1, 2), (2 * BLOCK_ROWS,)])
def test_rows_come_back_in_blocks_whatever_the_parts_were(tmp_path, counts):
    parts = [drawn(count) for count in counts]
    (tmp_path / "t.rows").write_bytes(written(*parts))

    found = list(read_rows(tmp_path / "t.rows", "adam", *FLOATS))

    assert all(len(part) == BLOCK_ROWS for part in found[:-1])
    for name in ("keys", "vectors", "states", "last_steps", "slot_ids") if found else ():
        np.testing.assert_array_equal(joined(found, name), joined(parts, name), strict=True)
    assert sum(map(len, found)) == sum(counts)


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    file, whole = tmp_path / "t.rows", written(drawn(3))
    for damaged in (
        *(whole[:end] for end in range(len(whole))),
        *(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))),
        whole + b"\n",
    ):
        file.write_bytes(damaged)
        with pytest.raises(ModelFileError, match=r"t\.rows: .*expected .* found "):
            list(read_rows(file, "adam", *FLOATS))


def test_blocks_in_another_order_are_noticed(tmp_path):
    file, first = tmp_path / "t.rows", drawn(2 * BLOCK_ROWS, 0)
    whole = written(first, floats=(1, 0))
    header, size = whole.index(b"\n") + 1, 8 + BLOCK_ROWS * 28
    blocks = whole[header : header + size], whole[header + size : header + 2 * size]
    file.write_bytes(whole[:header] + blocks[1] + blocks[0] + whole[header + 2 * size :])

    with pytest.raises(ModelFileError, match="the block that begins at row 0: expected CRC-32"):
        list(read_rows(file, "adam", 1, 0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"t\.rows: cannot be read: No such file"),
        (b"\x00\xff" * 40, r"expected a file that begins with the format 'hotrow rows 1', found b'\\x00\\xff"),
        (written(rule="ftrl"), "expected the states of adam, found those of ftrl"),
        (written(floats=(1, 2)), "expected vectors of 1 floats and 1 floats of states, found 1 and 2"),
        (written(floats=(2, 1)), "expected vectors of 1 floats and 1 floats of states, found 2 and 1"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t.rows").write_bytes(content)

    with pytest.raises(ModelFileError, match=message):
        next(read_rows(tmp_path / "t.rows", "adam", *FLOATS))
