"""HugeCTR's Norm format: records with any number of keys per slot, in one file or in several.

All numbers are little-endian. A file is a header, then one record after another:

- header, 64 bytes: eight int64: 1 if the file has checksums, else 0; records; labels L; dense features F; slots S;
  three zeros.
- record: float32[L] labels, float32[F] dense features, then for each slot an int32 number of keys and the keys, uint32
  or int64.

With checksums, the header and every record are framed: their length as int32 before them, and the sum of their bytes
modulo 256 as one byte behind them.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kernels.host import decode_norm
from serving.model.atomic import atomic_write
from serving.model.regular_file import open_regular
from training.data.checks import checked
from training.data.file_list import is_file_list, read_file_list
from training.errors import DataError
from training.model.losses import Loss
from training.samples import Bags, Samples

_HEADER = struct.Struct("<8q")
_LENGTH = struct.Struct("<i")
_BLOCK_BYTES = 4 << 20
_RECORDS_PER_WRITE = 16_384
_MOST_COLUMNS = 1 << 24


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a file: its framing and its shapes."""

    has_sums: bool
    records: int
    labels: int
    dense: int
    slots: int

    def encode(self) -> bytes:
        header = _HEADER.pack(int(self.has_sums), self.records, self.labels, self.dense, self.slots, 0, 0, 0)
        return _LENGTH.pack(len(header)) + header + bytes([sum(header) % 256]) if self.has_sums else header

    @classmethod
    def read(cls, file: IO[bytes], path: Path) -> "_Header":
        start = file.read(_LENGTH.size)
        has_sums = start == _LENGTH.pack(_HEADER.size)
        rest = file.read(_HEADER.size + 1 if has_sums else _HEADER.size - len(start))
        data = rest[: _HEADER.size] if has_sums else start + rest
        if len(data) < _HEADER.size or (has_sums and len(rest) <= _HEADER.size):
            raise DataError(path, "not a Norm file: it is shorter than a header")
        if has_sums and rest[-1] != sum(data) % 256:
            raise DataError(path, "the checksum of the header is wrong")
        check, records, labels, dense, slots = _HEADER.unpack(data)[:5]
        if check != has_sums:
            raise DataError(path, "not a Norm file: the header's first number does not fit its framing")
        if records < 0 or not (
            1 <= labels < _MOST_COLUMNS and 0 <= dense < _MOST_COLUMNS and 1 <= slots < _MOST_COLUMNS
        ):
            shapes = f"{records} records, {labels} labels, {dense} dense features and {slots} slots"
            raise DataError(path, f"not a Norm file: the header says {shapes}")
        return cls(has_sums, records, labels, dense, slots)


def is_norm(path: Path) -> bool:
    """Return whether a file is a file list, or begins with a header."""
    try:
        if is_file_list(path):
            return True
        with open_regular(path) as file:
            _Header.read(file, path)
    except (OSError, DataError):
        return False
    return True


def read_norm(
    path: str | Path,
    key_dtype: DTypeLike = np.int64,
    batch_size: int = 4096,
    losses: Sequence[Loss] | None = None,
) -> Iterator[Samples]:
    """Yield the samples of a file, or of the files of a file list.

    Memory does not grow with the files.

    Args:
        path: a data file or a file list.
        key_dtype: of the keys, uint32 or int64. The files do not say.
        batch_size: the samples of a batch. The last batch of a file may be smaller.
        losses: a loss for each label, which says what the label may be; None: each is 0 or 1.

    Raises:
        DataError: a file is missing, cut short or damaged, or a value is wrong; see ``checked``. The message names the
            file and the record, counted from 0.
        ValueError: ``key_dtype`` is another dtype.
    """
    key_bytes = key_type_of(key_dtype).itemsize
    for file in read_file_list(Path(path)):
        first = 0
        for samples in _read_file(file, key_bytes, batch_size):
            yield checked(samples, file, first, losses=losses)
            first += len(samples)


def _read_file(path: Path, key_bytes: int, batch_size: int) -> Iterator[Samples]:
    try:
        with open_regular(path) as file:
            header = _Header.read(file, path)
            yield from _read_records(file, path, header, key_bytes, batch_size)
    except OSError as err:
        raise DataError(path, (err.strerror or str(err)).lower()) from err


def _read_records(file: IO[bytes], path: Path, header: _Header, key_bytes: int, batch_size: int) -> Iterator[Samples]:
    data, offset, done = b"", 0, 0
    numbers = header.labels + header.dense
    layout = (numbers, header.slots, key_bytes == np.int64().itemsize, header.has_sums)
    while done < header.records:
        most_records = min(batch_size, header.records - done)
        values, row_ptrs, keys, consumed, fault = decode_norm(data, offset, *layout, most_records)
        read = (len(row_ptrs) - 1) // header.slots
        if read < most_records and not fault:  # the batch is not whole yet
            more = file.read(_BLOCK_BYTES)
            if more:
                data, offset = data[offset:] + more, 0
                continue
            fault = f"the file ends, but its header says {header.records:,} records"
        if fault:
            raise DataError(path, fault, record=done + read)
        columns = values.reshape(read, numbers)
        bags = Bags(keys, row_ptrs, header.slots)
        yield Samples(columns[:, : header.labels].copy(), columns[:, header.labels :].copy(), bags)
        done, offset = done + read, offset + consumed
    if len(data) > offset or file.read(1):
        raise DataError(path, f"the header says {header.records:,} records, but more bytes follow them")


def write_norm(
    path: str | Path,
    labels: Any,
    dense: Any,
    slots: Bags | Sequence[Sequence[Sequence[int]]],
    key_dtype: DTypeLike = np.int64,
    check: Literal["Sum", "None"] = "Sum",
) -> None:
    """Write one data file. A reader sees the whole file or none.

    Args:
        path: the file; an existing file is replaced.
        labels: numbers [B, L].
        dense: numbers [B, F].
        slots: the keys: for each sample, for each slot, a sequence; or ``Bags``.
        key_dtype: uint32 or int64.
        check: ``"Sum"`` writes checksums.

    Raises:
        ValueError: an array has another shape, a key does not fit ``key_dtype``, or an argument is unknown.
        OSError: the file cannot be written.
    """
    dtype = key_type_of(key_dtype)
    if check not in ("Sum", "None"):
        raise ValueError(f"check: expected 'Sum' or 'None', got {check!r}")
    bags = slots if isinstance(slots, Bags) else _bags_of(slots)
    label_rows = _matrix("labels", labels, len(bags))
    dense_rows = _matrix("dense", dense, len(bags))
    limits = np.iinfo(dtype)
    if bags.keys.size and not limits.min <= bags.keys.min() <= bags.keys.max() <= limits.max:
        raise ValueError(f"slots: a key does not fit {dtype.name}")
    header = _Header(check == "Sum", len(bags), label_rows.shape[1], dense_rows.shape[1], bags.slots)
    with atomic_write(path) as file:
        file.write(header.encode())
        for first in range(0, len(bags), _RECORDS_PER_WRITE):
            part = slice(first, first + _RECORDS_PER_WRITE)
            numbers = np.concatenate([label_rows[part], dense_rows[part]], axis=1)
            file.write(_encode(numbers, bags[part], dtype, header.has_sums))


def _encode(numbers: NDArray[np.float32], bags: Bags, dtype: np.dtype[Any], has_sums: bool) -> bytes:
    """Return records; ``numbers`` has the labels and the dense features."""
    words_per_key = dtype.itemsize // 4
    sizes, row_ptrs = bags.sizes.reshape(-1), bags.row_ptrs
    columns, samples = numbers.shape[1], len(numbers)
    # Every number before a bag's keys is one 32-bit word: the numbers of the samples so far, and one count per bag.
    sample_of_bag = np.arange(sizes.size) // bags.slots
    count_at = columns * (sample_of_bag + 1) + np.arange(sizes.size) + words_per_key * row_ptrs[:-1]
    words = np.empty(samples * columns + sizes.size + words_per_key * bags.keys.size, np.uint32)
    words[count_at] = sizes
    begins = count_at[:: bags.slots] - columns
    words[begins[:, None] + np.arange(columns)] = numbers.astype("<f4").view(np.uint32)
    key_at = np.repeat(count_at + 1 - words_per_key * row_ptrs[:-1], sizes) + words_per_key * np.arange(bags.keys.size)
    key_words = bags.keys.astype(dtype).view(np.uint32).reshape(-1, words_per_key)
    words[key_at[:, None] + np.arange(words_per_key)] = key_words
    payload = words.astype("<u4").view(np.uint8)
    if not has_sums:
        return payload.tobytes()
    lengths = 4 * np.diff(np.append(begins, words.size))
    framed = np.empty(payload.size + 5 * samples, np.uint8)
    framed[np.arange(payload.size) + np.repeat(5 * np.arange(samples) + 4, lengths)] = payload
    frames = 4 * begins + 5 * np.arange(samples)
    framed[frames[:, None] + np.arange(4)] = lengths.astype("<i4").view(np.uint8).reshape(-1, 4)
    framed[frames + 4 + lengths] = np.add.reduceat(payload, 4 * begins, dtype=np.uint8)
    return framed.tobytes()


def key_type_of(key_dtype: DTypeLike) -> np.dtype[Any]:
    """Return the dtype. Raise ValueError unless it is uint32 or int64."""
    dtype = np.dtype(key_dtype)
    if dtype not in (np.dtype(np.uint32), np.dtype(np.int64)):
        raise ValueError(f"key_dtype: expected uint32 or int64, got {dtype.name}")
    return dtype


def _matrix(name: str, values: Any, rows: int) -> NDArray[np.float32]:
    matrix = np.asarray(values, np.float32)
    if matrix.ndim != 2 or len(matrix) != rows:
        raise ValueError(f"{name}: expected numbers of shape [{rows}, columns], got {list(matrix.shape)}")
    return matrix


def _bags_of(slots: Sequence[Sequence[Sequence[int]]]) -> Bags:
    counts = {len(sample) for sample in slots}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"slots: expected samples with the same number of slots, got {sorted(counts)}")
    bags = [bag for sample in slots for bag in sample]
    row_ptrs = np.cumsum([0, *map(len, bags)], dtype=np.int64)
    return Bags(np.array([key for bag in bags for key in bag], np.int64), row_ptrs, counts.pop())
