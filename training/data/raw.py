"""HugeCTR's Raw format: one key per slot, every record of the same size, no header.

A record is L labels, F dense features and S keys, each of 32 bits, little-endian. Keys are uint32. Labels and dense
features are float32, or int32: then training reads a dense feature ``v`` as ``ln(v + 1)``. The keys of each slot begin
at 0. ``slot_sizes`` makes them keys of one table: the sizes of the slots before are added.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.model.atomic import atomic_write
from serving.model.regular_file import open_regular
from training.data.checks import checked
from training.errors import DataError
from training.model.losses import Loss
from training.samples import Bags, Samples


def read_raw(
    path: str | Path,
    labels: int,
    dense: int,
    slots: int,
    *,
    slot_sizes: Sequence[int] | None = None,
    losses: Sequence[Loss] | None = None,
    has_floats: bool = False,
    batch_size: int = 4096,
) -> Iterator[Samples]:
    """Yield the samples of a file. Memory does not grow with the file.

    Args:
        path: the file.
        labels: L.
        dense: F.
        slots: S.
        slot_sizes: S numbers, how many keys each slot has; None: keys are used as they are.
        losses: a loss for each label, which says what the label may be; None: each is 0 or 1.
        has_floats: labels and dense features are float32 (``float_label_dense``).
        batch_size: the samples of a batch; the last batch may be smaller.

    Raises:
        DataError: the file is missing or cut short, or a value is wrong; see ``checked``. The message names the
            file and the record, counted from 0.
        ValueError: ``slot_sizes`` has another length.
    """
    path = Path(path)
    words = labels + dense + slots
    try:
        with open_regular(path) as file:
            done = 0
            while data := file.read(4 * words * batch_size):
                read, left = divmod(len(data), 4 * words)
                if left:
                    reason = f"the file ends after {left} of its {4 * words} bytes"
                    raise DataError(path, reason, record=done + read)
                records = np.frombuffer(data, "<u4").reshape(read, words)
                numbers = _numbers(path, records[:, : labels + dense], labels, has_floats, done)
                bags = Bags.one_key_each(records[:, labels + dense :].astype(np.int64))
                samples = Samples(numbers[:, :labels].copy(), numbers[:, labels:].copy(), bags)
                yield checked(samples, path, done, slot_sizes=slot_sizes, losses=losses)
                done += read
    except OSError as err:
        raise DataError(path, (err.strerror or str(err)).lower()) from err


def _numbers(
    path: Path, words: NDArray[np.uint32], labels: int, has_floats: bool, first_record: int
) -> NDArray[np.float32]:
    words = np.ascontiguousarray(words)
    if has_floats:
        return words.view("<f4").astype(np.float32)
    integers = words.view("<i4")
    wrong = np.argwhere(integers[:, labels:] < 0)
    if len(wrong):
        record, column = wrong[0].tolist()
        value = integers[record, labels + column]
        reason = f"expected at least 0, because training reads ln(v + 1), found {value}"
        raise DataError(path, reason, column=f"dense[{column}]", record=first_record + record)
    numbers = integers.astype(np.float32)
    numbers[:, labels:] = np.log1p(numbers[:, labels:])
    return numbers


def write_raw(path: str | Path, labels: Any, dense: Any, keys: Any, *, has_floats: bool = False) -> None:
    """Write one file. A reader sees the whole file or none.

    Args:
        path: the file; an existing file is replaced.
        labels: numbers [B, L].
        dense: numbers [B, F]; integers unless ``has_floats``.
        keys: integers [B, S], below 2^32.
        has_floats: write labels and dense features as float32.

    Raises:
        ValueError: an array has another shape, or a number does not fit.
        OSError: the file cannot be written.
    """
    with atomic_write(path) as file:
        file.write(_records(labels, dense, keys, has_floats))


def write_raw_parts(path: Path, parts: Iterable[Samples], *, has_floats: bool) -> None:
    """Write samples part by part. Every slot must have one key. See ``write_raw``."""
    with atomic_write(path) as file:
        for samples in parts:
            bags = samples.bags
            if (bags.sizes != 1).any():
                raise ValueError(f"keys: expected one key per slot, got {bags.sizes[bags.sizes != 1][0]}")
            file.write(_records(samples.labels, samples.dense, bags.keys.reshape(-1, bags.slots), has_floats))


def _records(labels: Any, dense: Any, keys: Any, has_floats: bool) -> bytes:
    integers = np.asarray(keys)
    if integers.ndim != 2 or integers.dtype.kind not in "iu":
        raise ValueError(f"keys: expected integers [B, S], got {integers.dtype.name}{list(integers.shape)}")
    if integers.size and not 0 <= integers.min() <= integers.max() < 2**32:
        raise ValueError("keys: expected numbers from 0 to 4294967295")
    parts = [_part("labels", labels, len(integers), has_floats), _part("dense", dense, len(integers), has_floats)]
    return np.concatenate([*parts, integers.astype("<u4")], axis=1).tobytes()


def _part(name: str, values: Any, rows: int, has_floats: bool) -> NDArray[np.uint32]:
    numbers = np.asarray(values)
    if numbers.ndim != 2 or len(numbers) != rows:
        raise ValueError(f"{name}: expected numbers of shape [{rows}, columns], got {list(numbers.shape)}")
    written = numbers.astype("<f4" if has_floats else "<i4")
    if not has_floats and (written != numbers).any():
        raise ValueError(f"{name}: a number is not an int32; has_floats writes float32")
    return np.ascontiguousarray(written).view("<u4")
