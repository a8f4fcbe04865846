"""Read Criteo files: tab-separated or CSV, with or without a header, plain or gzip. The content decides which."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from serving.model.regular_file import open_regular
from training.data.checks import ColumnMap, checked
from training.data.criteo import CATEGORY_NAMES, COLUMNS, COUNT_NAMES, SLOTS, parse_lines
from training.data.csv_faults import separator_advice
from training.errors import DataError
from training.samples import Samples

_BLOCK_BYTES = 2 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
CRITEO_COLUMNS = ColumnMap(COLUMNS[:1], COUNT_NAMES, CATEGORY_NAMES)


def read_criteo(path: Path) -> Samples:
    """Read a whole file into memory, 264 bytes per sample.

    Args:
        path: the file. Its first line determines the separator (a tab, else a comma) and may be a header. A header must
            name label, I1 ... I13 and C1 ... C26, in any order.

    Raises:
        DataError: the file is missing, empty or cut short, or a field does not fit its column. The message names the
            file, the line, the column, and what was expected.
    """
    return Samples.joined(list(read_criteo_blocks(path)))


def read_criteo_blocks(path: Path, slot_sizes: Sequence[int] | None = None) -> Iterator[Samples]:
    """Yield a file's samples in blocks of some ten thousand. See ``read_criteo``, and ``checked`` for ``slot_sizes``.

    ``slot_sizes`` of another length are ignored: the graph then has other slots, and the samples are refused later.
    """
    sizes = slot_sizes if slot_sizes is not None and len(slot_sizes) == SLOTS else None
    try:
        with open_regular(path) as file:
            first = 0
            for samples in _parse_blocks(path, _unzipped(file)):
                yield checked(samples, path, first, columns=CRITEO_COLUMNS, slot_sizes=sizes)
                first += len(samples)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(path, _reason(err)) from err


def _reason(err: Exception) -> str:
    if isinstance(err, OSError) and err.strerror:
        return err.strerror.lower()
    return "the gzip file is cut short or damaged"


def is_criteo(path: Path) -> bool:
    """Return whether the first line is Criteo's header, or data without a header."""
    try:
        with open_regular(path) as file:
            line = _unzipped(file).readline(_BLOCK_BYTES).removeprefix(_UTF8_MARK)
    except (OSError, EOFError, zlib.error):
        return True  # its reader says what is wrong
    names = _names(line)
    return bool(set(names) & (set(COLUMNS) - {"label"})) or names[0] in ("", "0", "1")


def _unzipped(file: IO[bytes]) -> IO[bytes]:
    magic = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    return gzip.open(file) if magic == _GZIP_MAGIC else file  # type: ignore[return-value]


def _names(line: bytes) -> list[str]:
    """Return the fields of a first line."""
    separator = b"\t" if b"\t" in line else b","
    return [name.strip().strip('"') for name in line.decode(errors="backslashreplace").split(separator.decode())]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of the lines: the separator, the position of each of ``COLUMNS``, and whether there is a header."""

    separator: bytes
    order: tuple[int, ...]
    has_header: bool

    @classmethod
    def read(cls, path: Path, first_line: bytes) -> "_Layout":
        separator = b"\t" if b"\t" in first_line else b","
        names = _names(first_line)
        if not set(names) & set(COLUMNS) and len(names) != len(COLUMNS):
            criteo = f"the {len(COLUMNS)} columns of Criteo's data, found {len(names)}"
            how = "To train on other columns, name the label: --label COLUMN"
            raise DataError(path, f"expected {criteo}{separator_advice(path)}. {how}", line=1)
        if not set(names) & set(COLUMNS):
            return cls(separator, tuple(range(len(COLUMNS))), has_header=False)
        if sorted(names) != sorted(COLUMNS):
            absent = [name for name in COLUMNS if name not in names]
            extra = sorted(name or "the index of a pandas frame" for name in set(names) - set(COLUMNS))
            reason = f"{len(names)} columns named, expected {len(COLUMNS)}: label, I1 ... I13, C1 ... C26"
            reason += f"; absent: {', '.join(absent)}" * bool(absent) + f"; unknown: {', '.join(extra)}" * bool(extra)
            raise DataError(path, reason, line=1)
        return cls(separator, tuple(names.index(name) for name in COLUMNS), has_header=True)


def _parse_blocks(path: Path, file: IO[bytes]) -> Iterator[Samples]:
    layout: _Layout | None = None
    line, samples_read = 1, 0
    for text in _whole_lines(path, file):
        if layout is None:
            text = text.removeprefix(_UTF8_MARK)
            layout = _Layout.read(path, text.partition(b"\n")[0])
            if layout.has_header:
                text, line = text.partition(b"\n")[2], 2
        if layout.separator == b",":
            text = text.replace(b'"', b"")  # Criteo's fields never need quotes
        if text:
            samples = _parse(path, text, layout, line)
            samples_read += len(samples)
            line += len(samples)
            yield samples
    if not samples_read:
        raise DataError(path, "no samples: the file is empty" if layout is None else "no samples after the header")


def _parse(path: Path, text: bytes, layout: _Layout, line: int) -> Samples:
    is_whole = text.endswith(b"\n")
    try:
        return parse_lines(
            text if is_whole else text + b"\n",
            separator=layout.separator,
            source=str(path),
            order=layout.order,
            first_line=line,
        )
    except DataError as err:
        if is_whole:
            raise
        reason = f"the file is cut short: its last line has no line end ({err.reason})"
        raise DataError(path, reason, line=err.line, column=err.column) from err


def _whole_lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield blocks of whole lines. Text after the last line end is a block without a line end."""
    rest = b""
    while chunk := file.read(_BLOCK_BYTES):
        head, line_end, tail = chunk.rpartition(b"\n")
        if line_end:
            yield (rest + head + line_end).replace(b"\r\n", b"\n")
            rest = tail
        elif len(chunk) == _BLOCK_BYTES:
            raise DataError(path, f"not a Criteo file: {len(chunk):,} bytes without a line end")
        else:
            rest += chunk
    if rest:
        yield rest
