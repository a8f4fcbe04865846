import gzip
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.criteo import COLUMNS, encode_rows, parse_lines, write_lines
from training.data.criteo_reader import read_criteo
from training.errors import DataError
from training.samples import Bags, Samples

COUNTS = ["1", "-3", "260.0", "", "17668", "0", "33.5", "", "1e2", "5", "-0", "12345678", "123456789"]
CATEGORIES = ["05db9164", "", "ffffffff", *(f"{value:08x}" for value in range(23))]
ROW = COUNTS + CATEGORIES
RAW_LINE = "\t".join(["1", *ROW])


def plain_encoding(row):
    """The documented encoding, one value at a time."""
    dense = [math.log(1 + max(float(x), 0)) if x else 0.0 for x in row[:13]]
    keys = [slot * 2**40 + (int(c, 16) if c else 2**32) for slot, c in enumerate(row[13:], start=1)]
    return np.array(dense, np.float32), keys


def write(path, text):
    path.write_text(text)
    return path


def test_a_row_is_encoded_as_documented():
    dense, keys = encode_rows([ROW])

    expected_dense, expected_keys = plain_encoding(ROW)
    np.testing.assert_array_equal(dense, [expected_dense])
    assert keys.tolist() == [expected_keys]


COUNT_TEXT = st.one_of(
    st.just(""),
    st.integers(-(10**12), 10**12).map(str),
    st.integers(-99, 10**9).map(lambda number: f"{number}.0"),
    st.floats(-1e6, 1e12, allow_nan=False).map(repr),
)
CATEGORY_TEXT = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map(lambda value: f"{value:08x}"))
ROWS = st.lists(
    st.tuples(st.lists(COUNT_TEXT, min_size=13, max_size=13), st.lists(CATEGORY_TEXT, min_size=26, max_size=26)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=25)
@given(rows=ROWS)
def test_rows_are_encoded_like_single_values(rows):
    rows = [counts + categories for counts, categories in rows]

    dense, keys = encode_rows(rows)

    for row, row_dense, row_keys in zip(rows, dense, keys, strict=True):
        expected_dense, expected_keys = plain_encoding(row)
        np.testing.assert_allclose(row_dense, expected_dense, rtol=1e-6, atol=1e-7)  # ln(1 + x) loses tiny x
        assert row_keys.tolist() == expected_keys


def test_no_key_occurs_in_two_slots_and_none_is_reserved():
    _, (lowest, highest) = encode_rows([[""] * 13 + ["00000000"] * 26, [""] * 39])

    assert (lowest[1:] > highest[:-1]).all()
    assert lowest[0] > 0
    assert highest[-1] < 2**62


def test_missing_values_may_be_none_and_rows_may_be_empty():
    dense, keys = encode_rows([[None] * 39])
    assert dense.tolist() == [[0.0] * 13]
    assert keys.tolist() == [[slot * 2**40 + 2**32 for slot in range(1, 27)]]

    dense, keys = encode_rows([])
    assert dense.shape == (0, 13)
    assert keys.shape == (0, 26)


CSV_LINE = RAW_LINE.replace("\t", ",")
HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"{RAW_LINE}\n" * 3, id="raw"),
        pytest.param(f"{RAW_LINE}\r\n" * 3, id="raw with Windows line ends"),
        pytest.param(f"{RAW_LINE}\n{RAW_LINE}\n{RAW_LINE}", id="raw without the last line end"),
        pytest.param(f"{HEADER}\n" + f"{CSV_LINE}\n" * 3, id="CSV with a header"),
        pytest.param(f"\ufeff{HEADER}\n" + f"{CSV_LINE}\n" * 3, id="CSV with a byte order mark"),
        pytest.param(f"{CSV_LINE}\n" * 3, id="CSV without a header"),
        pytest.param(
            "\n".join(",".join(f'"{field}"' for field in line.split(",")) for line in [HEADER, *[CSV_LINE] * 3]) + "\n",
            id="CSV with quotes",
        ),
        pytest.param(
            ",".join(reversed(COLUMNS)) + "\n" + (",".join(reversed(CSV_LINE.split(","))) + "\n") * 3,
            id="CSV with columns in another order",
        ),
    ],
)
@pytest.mark.parametrize("is_gzip", [False, True])
def test_every_form_of_a_file_reads_the_same(tmp_path, text, is_gzip):
    path = tmp_path / "train"
    path.write_bytes(gzip.compress(text.encode()) if is_gzip else text.encode())

    samples = read_criteo(path)

    dense, keys = encode_rows([ROW] * 3)
    assert samples.labels.tolist() == [[1.0]] * 3
    np.testing.assert_array_equal(samples.dense, dense)
    np.testing.assert_array_equal(samples.bags.keys.reshape(-1, 26), keys)


def test_a_file_of_many_blocks_reads_like_its_parts(tmp_path):
    lines = [RAW_LINE.replace("ffffffff", f"{number:08x}") + "\n" for number in range(30_000)]
    path = write(tmp_path / "big.txt", "".join(lines))
    assert path.stat().st_size > 3 * 2**21

    samples = read_criteo(path)

    assert (samples.bags.keys[2::26] - 3 * 2**40).tolist() == list(range(30_000))


def changed(column, value):
    fields = RAW_LINE.split("\t")
    fields[COLUMNS.index(column)] = value
    return "\t".join(fields) + "\n"


GOOD = RAW_LINE + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "no samples: the file is empty", id="empty"),
        pytest.param(HEADER + "\n", "no samples after the header", id="header only"),
        pytest.param(GOOD + "1\t2\n", "line 2: 2 columns, expected 40", id="too few columns"),
        pytest.param(GOOD * 2 + "\t" + GOOD, "line 3: 41 columns, expected 40", id="too many columns"),
        pytest.param(GOOD + "\n", "line 2: 1 columns, expected 40", id="blank line"),
        pytest.param(GOOD + changed("label", "2"), "line 2 column label: expected 0 or 1, got '2'", id="label"),
        pytest.param(changed("label", ""), "line 1 column label: expected 0 or 1, got ''", id="no label"),
        pytest.param(
            changed("I4", "abc"), "line 1 column I4: expected a number or nothing, got 'abc'", id="not a number"
        ),
        pytest.param(changed("I4", "nan"), "column I4: expected a number or nothing, got 'nan'", id="nan"),
        pytest.param(changed("I13", "inf"), "column I13: expected a number or nothing, got 'inf'", id="infinite"),
        pytest.param(changed("I1", "1_0"), "column I1: expected a number or nothing, got '1_0'", id="underscore"),
        pytest.param(changed("I1", "-"), "column I1: expected a number or nothing, got '-'", id="lone minus"),
        pytest.param(
            GOOD + changed("C26", "0123456g"),
            "line 2 column C26: expected 8 hexadecimal digits or nothing, got '0123456g'",
            id="bad hex",
        ),
        pytest.param(changed("C2", "1234567"), "column C2: expected 8 hexadecimal digits", id="short hex"),
        pytest.param(changed("C2", "123456789"), "column C2: expected 8 hexadecimal digits", id="long hex"),
        pytest.param(GOOD + RAW_LINE[:60], "line 2: the file is cut short: its last line has no line end", id="cut"),
        pytest.param(GOOD + RAW_LINE[:-3], "line 2 column C26: the file is cut short", id="cut in the last field"),
        pytest.param(
            HEADER.replace("I3", "J3") + "\n" + CSV_LINE,
            "line 1: 40 columns named, expected 40: label, I1 ... I13, C1 ... C26; absent: I3; unknown: J3",
            id="header with an unknown column",
        ),
        pytest.param("," + HEADER.replace("\t", ",") + "\n", "; unknown: the index of a pandas frame", id="an index"),
        pytest.param("x" * (3 << 20), "bytes without a line end", id="no lines at all"),
    ],
)
def test_a_wrong_file_is_refused_by_name_line_and_column(tmp_path, text, message):
    path = write(tmp_path / "train.csv", text)

    with pytest.raises(DataError) as caught:
        read_criteo(path)

    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)


def test_line_numbers_count_the_header_and_continue_over_blocks(tmp_path):
    text = HEADER + "\n" + (CSV_LINE + "\n") * 20_000 + CSV_LINE.replace("05db9164", "?") + "\n"

    with pytest.raises(DataError, match="line 20002 column C1: expected 8 hex"):
        read_criteo(write(tmp_path / "train.csv", text))


def test_a_missing_file_a_folder_and_a_damaged_gzip_file_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt: no such file"):
        read_criteo(tmp_path / "absent.txt")
    with pytest.raises(DataError, match="not a regular file"):
        read_criteo(tmp_path)
    damaged = tmp_path / "train.gz"
    damaged.write_bytes(gzip.compress((GOOD * 1000).encode())[:-20])
    with pytest.raises(DataError, match="cut short or damaged"):
        read_criteo(damaged)


@settings(deadline=None, max_examples=66)
@given(
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.sampled_from(b"\t\n\r,-.019afgX\0\xff\x1f\x8b")), max_size=4),
    kept=st.integers(0, 2**16),
    header=st.booleans(),
)
def test_damaged_bytes_are_read_or_refused_by_name_but_never_crash(tmp_path_factory, changes, kept, header):
    content = bytearray(((HEADER + "\n" + CSV_LINE + "\n") if header else GOOD).encode() * 2)
    for position, byte in changes:
        content[position % len(content)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content[: kept % (len(content) + 1)])

    try:
        samples = read_criteo(path)
    except DataError as err:
        assert str(err).startswith(str(path))  # noqa: PT017
    else:
        assert np.isfinite(samples.dense).all()
        assert set(samples.labels[:, 0].tolist()) <= {0.0, 1.0}
        assert (samples.bags.keys.reshape(-1, 26) >> 40 == np.arange(1, 27)).all()


@pytest.mark.parametrize(
    "row", [ROW[:-1], [*ROW, ""], ["1\t2", *ROW[2:]], [*ROW[:-1], "zzzzzzzz"], ["1,5", *ROW[1:]], ["1\n", *ROW[1:]]]
)
def test_a_wrong_row_is_refused_at_serving_time(row):
    with pytest.raises(DataError, match="rows line 2"):
        encode_rows([ROW, row])


def test_written_lines_read_back(tmp_path):
    counts = np.array([[1, np.nan, 3, *range(10)]], dtype=np.float64)
    dense, keys = encode_rows([ROW])
    written = Samples(np.ones((1, 1), np.float32), dense, Bags.one_key_each(keys))
    with (tmp_path / "raw.txt").open("w") as file:
        write_lines(file, written, counts)

    samples = read_criteo(tmp_path / "raw.txt")

    assert samples.labels.tolist() == [[1.0]]
    np.testing.assert_allclose(samples.dense, np.log1p(np.nan_to_num(counts)), rtol=1e-6)
    np.testing.assert_array_equal(samples.bags.keys.reshape(-1, 26), keys)


def test_parse_lines_uses_the_order_of_columns():
    order = list(reversed(range(40)))
    text = (",".join(reversed(CSV_LINE.split(","))) + "\n").encode()

    samples = parse_lines(text, separator=b",", source="x", order=order)

    assert samples.bags.keys.tolist() == plain_encoding(ROW)[1]


DATA = Path(os.environ.get("HOTROW_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))


def test_the_genuine_sample_reads_like_the_csv_module():
    path = DATA / "criteo_sample.csv"
    if not path.exists():
        pytest.skip(f"no real data: {path} is absent (HOTROW_TEST_DATA)")

    samples = read_criteo(path)

    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert len(samples) == len(rows) == 200
    assert samples.labels[:, 0].tolist() == [float(row[0]) for row in rows]
    for row, dense, keys in zip(rows, samples.dense, samples.bags.keys.reshape(-1, 26), strict=True):
        expected_dense, expected_keys = plain_encoding(row[1:])
        np.testing.assert_allclose(dense, expected_dense, rtol=1e-6)
        assert keys.tolist() == expected_keys


def test_a_client_can_encode_rows_without_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['tqdm'] = None; import training.data.criteo"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
