"""Write a stream of samples as a data set of HugeCTR, in any of its formats."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from serving.model.slot_sizes import slot_ranges
from training.data.columns import write_parquet_files
from training.data.file_list import write_file_list
from training.data.norm import write_norm
from training.data.raw import write_raw_parts
from training.data.streams import batches_of
from training.samples import Bags, Samples

DataFormat = Literal["Norm", "Raw", "Parquet"]


def write_data_set(
    path: str | Path,
    parts: Iterable[Samples],
    data_format: DataFormat,
    *,
    key_dtype: DTypeLike = np.int64,
    check: Literal["Sum", "None"] = "Sum",
    slot_sizes: Sequence[int] | None = None,
    has_floats: bool = True,
    samples_per_file: int = 40_960,
) -> None:
    """Write samples, such as those of another format's reader. Memory does not grow with the data.

    Args:
        path: the file list to write; Raw data is this file itself. The files of a list ``train.txt`` are in the folder
            ``train`` beside it. Files with the same names are replaced.
        parts: at least one sample.
        data_format: what to write.
        key_dtype: of the keys of Norm files, uint32 or int64.
        check: whether Norm files have checksums.
        slot_sizes: S numbers for Raw and Parquet files: the sizes of the slots before are subtracted from the keys, and
            a reader with the same ``slot_sizes`` adds them again. None: keys are written as they are.
        has_floats: labels and dense features of Raw files are float32; otherwise they are integers.
        samples_per_file: of Norm and Parquet files.

    Raises:
        ValueError: a value does not fit the format, such as a slot without exactly one key in Raw files.
        OSError: the disk refuses.
        MissingExtraError: Parquet needs pyarrow, which is not installed.
    """
    path = Path(path)
    folder = path.parent if data_format == "Raw" else path.with_suffix("")
    if folder == path:
        raise ValueError(f"{path}: the name of a file list needs a suffix, such as .txt")
    folder.mkdir(parents=True, exist_ok=True)
    files = batches_of(parts, samples_per_file, keeps_rest=True)
    if data_format == "Norm":
        names = []
        for number, samples in enumerate(files):
            names.append(folder / f"{number}.norm")
            write_norm(names[-1], samples.labels, samples.dense, samples.bags, key_dtype, check)
        write_file_list(path, names)
        return
    from_zero = (_from_zero(samples, slot_sizes) for samples in files)
    if data_format == "Raw":
        write_raw_parts(path, from_zero, has_floats=has_floats)
    else:
        write_file_list(path, write_parquet_files(folder, from_zero))


def _from_zero(samples: Samples, slot_sizes: Sequence[int] | None) -> Samples:
    """Return samples whose keys begin at 0 in each slot."""
    bags = samples.bags
    if slot_sizes is None:
        return samples
    counts = bags.sizes.reshape(-1)
    offsets, sizes = (
        np.repeat(np.tile(of_slots, len(bags)), counts) for of_slots in slot_ranges(slot_sizes, bags.slots)
    )
    keys = bags.keys - offsets
    if ((keys < 0) | (keys >= sizes)).any():
        at = int(np.argmax((keys < 0) | (keys >= sizes)))
        bounds = f"{offsets[at]} to {offsets[at] + sizes[at] - 1}"
        raise ValueError(f"keys: slot_sizes say that a slot has the keys {bounds}, got {bags.keys[at]}")
    return Samples(samples.labels, samples.dense, Bags(keys, bags.row_ptrs, bags.slots))
