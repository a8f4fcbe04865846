"""The Criteo form of a sample: a label, 13 counts and 26 categories, and their encoding for a model.

Training reads files with this module, and a client with raw rows calls ``encode_rows``, so both see the same numbers:

- A dense feature is ln(1 + max(x, 0)) of the count x, and 0 if the count is missing.
- The key of category C<s> (s = 1 ... 26) is s * 2^40 + v. v is the category's 8 hexadecimal digits as a number, and
  2^32 if the category is missing. Nothing is hashed: two categories never share a key, two slots have no key in common,
  and a client in any language needs only a shift and an addition.

Source of the columns: the Criteo Display Advertising Challenge data set (Kaggle, 2014).
"""

from collections.abc import Sequence
from typing import IO, NoReturn

import numpy as np
from numpy.typing import NDArray

from training.data.fields import FieldBlock, UnevenLine, read_hex, read_numbers
from training.errors import DataError
from training.samples import Bags, Samples

DENSE_FEATURES = 13
SLOTS = 26
COUNT_NAMES = tuple(f"I{i}" for i in range(1, DENSE_FEATURES + 1))
CATEGORY_NAMES = tuple(f"C{i}" for i in range(1, SLOTS + 1))
COLUMNS = ("label", *COUNT_NAMES, *CATEGORY_NAMES)

_SLOT_SHIFT = 40
_MISSING_CATEGORY = 1 << 32
_SLOT_KEYS = np.arange(1, SLOTS + 1, dtype=np.int64) << _SLOT_SHIFT


def encode_rows(rows: Sequence[Sequence[str | None]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Turn raw Criteo rows into the dense features and keys of a request.

    Args:
        rows: B rows of 39 strings, I1 ... I13 then C1 ... C26. ``None`` or an empty string means missing.

    Returns:
        dense: float32[B, 13].
        keys: int64[B, 26], one key per slot.

    Raises:
        DataError: a row has another number of values, a count is not a number, or a category is not 8 hexadecimal
            digits. The message names the row (as line, from 1) and the column.
    """
    lines = []
    for line, row in enumerate(rows, start=1):
        values = ["" if value is None else value for value in row]
        if len(values) != len(COLUMNS) - 1 or any("\t" in value or "\n" in value for value in values):
            raise DataError(
                "rows", f"{len(values)} values, expected 39 (I1 ... I13, C1 ... C26) without tabs", line=line
            )
        lines.append("\t".join(["0", *values]))
    if not lines:
        return np.empty((0, DENSE_FEATURES), np.float32), np.empty((0, SLOTS), np.int64)
    samples = parse_lines(("\n".join(lines) + "\n").encode(), separator=b"\t", source="rows")
    return samples.dense, samples.bags.keys.reshape(-1, SLOTS)


def encode_counts(counts: NDArray[np.float64]) -> NDArray[np.float32]:
    """Turn counts, NaN if missing, into dense features of the same shape."""
    return np.log1p(np.maximum(np.nan_to_num(counts, nan=0.0), 0.0)).astype(np.float32)


def encode_categories(values: NDArray[np.uint32], missing: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Turn categories uint32[B, 26] into keys. ``missing`` is bool[B, 26]."""
    return _SLOT_KEYS + np.where(missing, _MISSING_CATEGORY, values.astype(np.int64))


def parse_lines(
    text: bytes, *, separator: bytes, source: str, order: Sequence[int] = range(len(COLUMNS)), first_line: int = 1
) -> Samples:
    """Turn whole lines of text into samples. ``order`` is the position of each of ``COLUMNS`` in a line."""
    block = FieldBlock.cut(text, separator, len(COLUMNS))
    if isinstance(block, UnevenLine):
        reason = f"{block.columns} columns, expected {len(COLUMNS)}"
        raise DataError(source, reason, line=first_line + block.row)
    place = _Place(source, first_line)
    block = block.take(list(order))
    labels, counts, categories = block.take(slice(0, 1)), block.take(slice(1, 14)), block.take(slice(14, 40))

    label_values, _ = read_numbers(labels)
    place.check(labels, (label_values == 0) | (label_values == 1), COLUMNS[:1], "0 or 1")
    count_values, readable = read_numbers(counts)
    place.check(counts, readable, COUNT_NAMES, "a number or nothing")
    category_values, readable = read_hex(categories)
    missing = categories.starts == categories.ends
    place.check(categories, readable | missing, CATEGORY_NAMES, "8 hexadecimal digits or nothing")

    return Samples(
        labels=label_values.astype(np.float32),
        dense=encode_counts(count_values),
        bags=Bags.one_key_each(encode_categories(category_values, missing)),
    )


def write_lines(file: IO[str], samples: Samples, counts: NDArray[np.float64]) -> None:
    """Append samples in Criteo's raw form, tab-separated without a header. Missing values are empty."""
    categories_of = (samples.bags.keys.reshape(-1, SLOTS) - _SLOT_KEYS).tolist()
    for label, row, values in zip(samples.labels[:, 0].tolist(), counts.tolist(), categories_of, strict=True):
        numbers = ["" if count != count else str(int(count)) for count in row]
        categories = ["" if value == _MISSING_CATEGORY else f"{value:08x}" for value in values]
        file.write("\t".join([str(int(label)), *numbers, *categories]) + "\n")


class _Place:
    """The place of a block of lines, for the message about a wrong field."""

    def __init__(self, source: str, first_line: int) -> None:
        self._source = source
        self._first_line = first_line

    def check(self, block: FieldBlock, good: NDArray[np.bool_], names: Sequence[str], expected: str) -> None:
        bad = np.argwhere(~good)
        if bad.size:
            row, column = bad[0].tolist()
            self._refuse(row, names[column], f"expected {expected}, got {block.field(row, column)!r}")

    def _refuse(self, row: int, name: str, reason: str) -> NoReturn:
        raise DataError(self._source, reason, line=self._first_line + row, column=name)
