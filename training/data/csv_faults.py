"""The line and the column of a fault in a CSV file: pyarrow does not name the line, so the file is read again."""

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

from training.errors import DataError

_USUAL_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]*)?")


def with_line(pa: Any, err: DataError) -> DataError:
    """Return an error that names a record as one that names the record's line; without a record, the header's."""
    path, place = Path(err.source), 0 if err.record is None else err.record + 1
    line, _ = next(islice(_records(pa, path), place, None), (None, []))
    return DataError(path, err.reason, line=line, column=err.column)


def first_fault(pa: Any, path: Path, types: Mapping[str, Any]) -> DataError | None:
    """Return the first fault of a file, or None if there is none that this function finds.

    Args:
        pa: pyarrow.
        path: the file.
        types: pyarrow's types of the columns that are read, float32 or int64.

    Raises:
        OSError: the file cannot be read or decompressed.
    """
    nulls = frozenset(pa.csv.ConvertOptions().null_values)
    records = _records(pa, path)
    line, names = next(records, (None, []))
    if line is None:
        return DataError(path, "the file is empty, expected a header with the names of the columns")
    if not all(map(_is_text, names)):
        return DataError(path, f"the header is not in UTF-8: {_shown(','.join(names))}", line=line)
    for line, fields in records:
        if len(fields) != len(names):
            reason = f"expected {len(names)} fields, as the header has, found {len(fields)}"
            return DataError(path, reason, line=line)
        for name, field in zip(names, fields, strict=True):
            if name in types and field not in nulls and not _is_a(pa, types[name], field.strip(" \t")):
                expected = "an integer of 64 bits" if types[name] == pa.int64() else "a number"
                return DataError(path, f"expected {expected}, found {_shown(field)}", line=line, column=name)
    return None


def _records(pa: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and the records of a file, each with the line on which it begins, counted from 1.

    Bytes that are not UTF-8 become surrogates.
    """
    with pa.input_stream(str(path), compression="detect") as stream:
        text = TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        reader, line = csv.reader(text), 1
        with suppress(csv.Error):  # such as a field of more than 128 KiB; the lines after it are not known
            for fields in reader:
                if fields:  # pyarrow leaves out empty lines, too
                    yield line, fields
                line = reader.line_num + 1


def _is_a(pa: Any, kind: Any, value: str) -> bool:
    if usual := _USUAL_NUMBER.fullmatch(value):
        return usual[1] is None or kind != pa.int64()
    if not _is_text(value):
        return False
    try:
        pa.scalar(value).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in value)


def _shown(value: str) -> str:
    """Return a field for a message, and a field that is not in UTF-8 as its bytes."""
    return repr(value if _is_text(value) else value.encode("utf-8", "surrogateescape"))
