"""Find the faults in CSV files that pyarrow does not report, and the lines of all faults."""

import csv
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from threading import Event
from typing import Any

from serving.features import MISSING_WORDS
from serving.model.regular_file import open_regular
from training.errors import DataError

#: What pyarrow reads as null in columns of numbers.
NULLS = ("", *MISSING_WORDS)
NULL = "null"
OPEN_QUOTE = "a quoted field has no closing quote"
_FIRST_BYTES = 1 << 20
_MOST_NAMES = 8  # of columns, in advice
_ENDING = re.compile(r"\.(csv|dat|feather|jsonl?|orc|tsv|txt|xlsx?)(\.\w+)?$")
_LINES = "pandas.read_json({}, lines=True)"
#: How pandas reads files, by the endings of their names.
_READERS = {
    ".feather": "pandas.read_feather({})",
    ".json": _LINES,
    ".jsonl": _LINES,
    ".orc": "pandas.read_orc({})",
    ".xls": "pandas.read_excel({})",
    ".xlsx": "pandas.read_excel({})",
    ".zip": "pandas.read_csv({})",
}
_END, _TOO_LONG = "\0end of file", "\0too long"
_READ_AS = re.compile(rf"\bfound ({NULL}|-?inf)(?=;|$)")
_USUAL_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]*)?")


class EndedStream:
    """A stream with one more line at its end.

    pyarrow reads everything after an open quote as one field, and drops the field if its column is not read. The last
    line is then dropped too, so its absence reveals the open quote.

    Attributes:
        released: set when nothing refers to this object. A thread of pyarrow reads it, and drops it some time after the
            reader is gone. If Python ends before that, the thread aborts the process.
        faults: what reading has raised. The stream then ends, because an error in pyarrow's hands would refer to this
            object.
    """

    def __init__(self, stream: Any, last_line: bytes) -> None:
        """Take a stream with the method ``read``."""
        self.released = Event()
        self.faults: list[BaseException] = []
        self._stream = stream
        self._last_line = last_line
        self._read_bytes = b""  # not returned yet
        self.closed = False

    def __del__(self) -> None:
        """Say that no thread reads this object."""
        self.released.set()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end.

        The last line comes with what is before it, because pyarrow refuses a header that comes alone.
        """
        content, is_ended = self._read_bytes, False
        while len(content) < size and not is_ended:
            try:
                more = self._stream.read(size - len(content))
            except BaseException as err:  # noqa: BLE001  # KeyboardInterrupt too; the reader of ``faults`` raises it
                self.faults.append(err.with_traceback(None))
                return b""
            if not more:
                more, self._last_line, is_ended = self._last_line, b"", True
            content += more
        content, self._read_bytes = content[:size], content[size:]
        return content

    def close(self) -> None:
        """Do nothing: the stream has another owner."""
        self.closed = True


def header_of(pa: Any, path: Path) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: there is no header, or it is not in UTF-8.
        OSError: the file cannot be read or decompressed.
    """
    line, names = next(_records(pa, path), (None, []))
    if line is None:
        raise DataError(path, "the file is empty, expected a header with the names of the columns")
    if fault := _quote_fault(path, line, names):
        raise fault
    if not all(map(_is_text, names)):
        raise DataError(
            path, f"the header is not in UTF-8: {_shown(','.join(names))}{_encoding_advice(path)}", line=line
        )
    return names


def separator_advice(path: Path) -> str:
    """Say how a text file with another separator becomes Parquet; empty if its first line has none."""
    try:
        with open_regular(path) as file:
            content = file.read(_FIRST_BYTES)
    except OSError:
        return ""
    line = content.partition(b"\n")[0].decode("utf-8", "replace")
    found = next((separator for separator in ("::", "\t", ";", "|") if separator in line), None)
    if found is None:
        return ""
    columns = 1 + line.count(found)
    names = ", ".join(repr(f"column{number}") for number in range(1, 1 + min(columns, _MOST_NAMES)))
    names += ", ..." * (columns > _MOST_NAMES)
    encoding = "" if _is_utf8(content) else ", encoding='latin-1'"
    decimal = ", decimal=','" if re.search(rb"(^|[;\t|])-?\d+,\d+([;\t|\r\n]|$)", content) else ""
    read = f"pandas.read_csv({path.name!r}, sep={found!r}, engine='python'{encoding}{decimal})"
    header = f"without a header, name the columns: names=[{names}]"
    return f"; its columns are separated by {found!r}, so convert it: {read}{_written(path)}; {header}"


def conversion_advice(path: Path) -> str:
    """Say how a file of another format becomes Parquet or CSV; empty if its format is not known."""
    if path.suffix in _READERS:
        return f"; convert it: {_READERS[path.suffix].format(repr(path.name))}{_written(path)}"
    if advice := separator_advice(path):
        return advice
    try:
        with open_regular(path) as file:
            line = file.readline(_FIRST_BYTES)
    except OSError:
        return ""
    is_csv = b"," in line and b"\0" not in line and _is_utf8(line)
    return "; if its columns are separated by commas, let its name end in .csv" if is_csv else ""


def _written(path: Path) -> str:
    return f".to_parquet({_ENDING.sub('', path.name) + '.parquet'!r})"


def _is_utf8(content: bytes) -> bool:
    """Whether the beginning of a text is in UTF-8. Its last character may be cut."""
    try:
        getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError:
        return False
    return True


def _encoding_advice(path: Path) -> str:
    """Say how a file in another encoding than UTF-8 becomes Parquet."""
    with open_regular(path) as file:
        encoding = "utf-16" if file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "latin-1"
    read = f"pandas.read_csv({path.name!r}, encoding={encoding!r})"
    return f"; if it is in {encoding}, convert it: {read}{_written(path)}"


def with_line(pa: Any, err: DataError) -> DataError:
    """Return an error that names a record as one that names the record's line; without a record, the header's.

    pyarrow reads some words as null, such as ``nan``, and large numbers as infinite. The error then says what the file
    has.
    """
    path, place = Path(err.source), 0 if err.record is None else err.record + 1
    records = _records(pa, path)
    _, names = header = next(records)
    line, fields = next(islice(chain([header], records), place, None), (None, names))
    reason, read_as = err.reason, _READ_AS.search(err.reason)
    if read_as is not None and err.column in names and (field := fields[names.index(err.column)]) != read_as[1]:
        reason = reason.replace(read_as[0], f"found {_shown(field)}")
    return DataError(path, reason, line=line, column=err.column)


def first_fault(pa: Any, path: Path, types: Mapping[str, Any]) -> DataError | None:
    """Return the first fault of a file, or None if there is none that this function finds.

    Args:
        pa: pyarrow.
        path: the file.
        types: pyarrow's types of the columns that are read: float32, int64 or string.

    Raises:
        OSError: the file cannot be read or decompressed.
    """
    records = _records(pa, path)
    _, names = next(records)
    for line, fields in records:
        if fault := _quote_fault(path, line, fields):
            return fault
        if len(fields) != len(names):
            reason = f"expected {len(names)} fields, as the header has, found {len(fields)}"
            return DataError(path, reason, line=line)
        for name, field in zip(names, fields, strict=True):
            if name in types and field not in NULLS and not _is_a(pa, types[name], field.strip(" \t")):
                expected = {pa.int64(): "an integer of 64 bits", pa.string(): "text in UTF-8"}.get(
                    types[name], "a number"
                )
                advice = "" if _is_text(field) else _encoding_advice(path)
                return DataError(path, f"expected {expected}, found {_shown(field)}{advice}", line=line, column=name)
    return None


def _quote_fault(path: Path, line: int, fields: list[str]) -> DataError | None:
    """Return the error of a record that does not end, or is so long that a quote may be open."""
    if fields[-1].endswith(_END):
        return DataError(path, OPEN_QUOTE, line=line)
    if fields == [_TOO_LONG]:
        reason = f"a field has more than {csv.field_size_limit():,} characters; is a closing quote missing?"
        return DataError(path, reason, line=line)
    return None


def _records(pa: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and the records of a file, each with the line on which it begins, counted from 1.

    Bytes that are not UTF-8 become surrogates. If a quote is open at the end, the last field ends with ``_END``. A
    record with a field that is too long for Python is ``[_TOO_LONG]``, and the last one.
    """
    with pa.input_stream(str(path), compression="detect") as stream:
        text = TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        reader, line = csv.reader(chain(text, [_END])), 1
        try:
            for fields in reader:
                if fields and fields != [_END]:  # pyarrow leaves out empty lines, too
                    yield line, fields
                line = reader.line_num + 1
        except csv.Error:
            yield line, [_TOO_LONG]


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
