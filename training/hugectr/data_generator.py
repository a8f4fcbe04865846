"""Generated data sets in HugeCTR's formats, with keys that follow a power law."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError
from serving.model.slot_sizes import slot_ranges
from training.arguments import is_whole
from training.data.convert import write_data_set
from training.samples import Bags, Samples
from training.synthetic.keyed_random import keyed_uniform

_PART_SAMPLES = 8192


class DataReaderType_t(StrEnum):  # noqa: N801 - HugeCTR's name
    """The formats."""

    Norm = "Norm"
    Raw = "Raw"
    Parquet = "Parquet"


class Check_t(StrEnum):  # noqa: N801 - HugeCTR's name
    """Whether Norm files have checksums."""

    Sum = "Sum"
    Non = "None"


class Distribution_t(StrEnum):  # noqa: N801 - HugeCTR's name
    """How often keys occur."""

    PowerLaw = "PowerLaw"
    Uniform = "Uniform"


class PowerLaw_t(StrEnum):  # noqa: N801 - HugeCTR's name
    """The exponent of a power law: 0.9, 1.1, 1.3, or ``alpha``."""

    Long = "Long"
    Medium = "Medium"
    Short = "Short"
    Specific = "Specific"


_EXPONENTS = {PowerLaw_t.Long: 0.9, PowerLaw_t.Medium: 1.1, PowerLaw_t.Short: 1.3}


@dataclass(frozen=True, slots=True)
class DataGeneratorParams:
    """What to generate, with HugeCTR's names and defaults. The types may also be texts: ``format="Norm"``.

    Attributes:
        format: of the files.
        label_dim: L.
        dense_dim: F.
        num_slot: S.
        i64_input_key: whether the keys of Norm files are int64. Parquet has int64, Raw uint32.
        source: the file list of the training data, or the Raw file.
        eval_source: that of the evaluation data.
        slot_size_array: S numbers, how many keys each slot has. In Norm files they begin where those of the slot before
            end; in Raw and Parquet files they begin at 0.
        nnz_array: S numbers, the keys of each slot in every sample. Empty: one.
        check_type: of Norm files.
        dist_type: how often keys occur. Small keys are frequent in a power law.
        power_law_type: which power law.
        alpha: the exponent of "Specific", above 0 and not 1.
        num_files: of Norm and Parquet training data.
        eval_num_files: of Norm and Parquet evaluation data.
        num_samples_per_file: of Norm and Parquet data.
        num_samples: of Raw training data.
        eval_num_samples: of Raw evaluation data.
        float_label_dense: whether labels and dense features of Raw files are float32.
        num_threads: has no effect: one thread generates the files one after another.
        seed: Hotrow's own parameter; the same seed gives the same files.

    Raises:
        ConfigError: a parameter is out of range, or does not fit the others.
    """

    format: DataReaderType_t | str
    label_dim: int
    dense_dim: int
    num_slot: int
    i64_input_key: bool
    source: str
    eval_source: str
    slot_size_array: Sequence[int]
    nnz_array: Sequence[int] = ()
    check_type: Check_t | str = Check_t.Sum
    dist_type: Distribution_t | str = Distribution_t.PowerLaw
    power_law_type: PowerLaw_t | str = PowerLaw_t.Specific
    alpha: float = 1.2
    num_files: int = 128
    eval_num_files: int = 32
    num_samples_per_file: int = 40_960
    num_samples: int = 5_242_880
    eval_num_samples: int = 1_310_720
    float_label_dense: bool = False
    num_threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every parameter."""
        _check_choices_and_counts(self)
        for name, numbers in (("slot_size_array", self.slot_size_array), ("nnz_array", self.keys_per_slot)):
            if len(numbers) != self.num_slot or min(numbers) < 1:
                raise _error(name, f"expected {self.num_slot} numbers of at least 1", list(numbers))
        if self.format == DataReaderType_t.Raw and max(self.keys_per_slot) > 1:
            raise _error("nnz_array", "expected 1 key per slot in Raw files", list(self.nnz_array))
        if self.format != DataReaderType_t.Norm and self.i64_input_key != (self.format == DataReaderType_t.Parquet):
            raise _error("i64_input_key", "expected True for Parquet and False for Raw", self.i64_input_key)
        if not self.i64_input_key and sum(self.slot_size_array) > 2**32:
            raise _error("slot_size_array", "expected at most 2^32 keys of uint32", sum(self.slot_size_array))
        if not 0 < self.exponent < math.inf or self.exponent == 1:
            raise _error("alpha", "expected a number above 0 that is not 1", self.alpha)

    @property
    def keys_per_slot(self) -> tuple[int, ...]:
        """S numbers."""
        return tuple(self.nnz_array) or (1,) * self.num_slot

    @property
    def exponent(self) -> float:
        """The exponent of the power law."""
        return _EXPONENTS.get(PowerLaw_t(self.power_law_type), self.alpha)


_KINDS: dict[str, type[StrEnum]] = {
    "format": DataReaderType_t,
    "check_type": Check_t,
    "dist_type": Distribution_t,
    "power_law_type": PowerLaw_t,
}
_COUNTS = (
    "label_dim",
    "dense_dim",
    "num_slot",
    "num_files",
    "eval_num_files",
    "num_samples_per_file",
    "num_samples",
    "eval_num_samples",
    "num_threads",
    "seed",
)


class DataGenerator:
    """Writes training data and evaluation data.

    A label is 1 with a probability that depends on the keys and the first dense feature, so a model can learn it.
    HugeCTR's labels are random.
    """

    def __init__(self, params: DataGeneratorParams) -> None:
        """Take the parameters."""
        self._params = params

    def generate(self) -> None:
        """Write the data of ``source`` and of ``eval_source``. Existing files are replaced.

        Raises:
            OSError: the disk refuses.
            MissingExtraError: Parquet needs pyarrow, which is not installed.
        """
        params = self._params
        for number, (path, files, samples) in enumerate(
            (
                (params.source, params.num_files, params.num_samples),
                (params.eval_source, params.eval_num_files, params.eval_num_samples),
            )
        ):
            rows = samples if params.format == DataReaderType_t.Raw else files * params.num_samples_per_file
            write_data_set(
                path,
                self._parts(np.random.default_rng([params.seed, number]), rows),
                DataReaderType_t(params.format).value,
                key_dtype=np.int64 if params.i64_input_key else np.uint32,
                check=Check_t(params.check_type).value,
                slot_sizes=None if params.format == DataReaderType_t.Norm else params.slot_size_array,
                has_floats=params.float_label_dense,
                samples_per_file=params.num_samples_per_file,
            )

    def _parts(self, rng: np.random.Generator, rows: int) -> Iterator[Samples]:
        for first in range(0, rows, _PART_SAMPLES):
            yield self._samples(rng, min(_PART_SAMPLES, rows - first))

    def _samples(self, rng: np.random.Generator, rows: int) -> Samples:
        params = self._params
        offsets, sizes = slot_ranges(params.slot_size_array, params.num_slot)
        columns = [
            offset + self._keys(rng.random((rows, count)), int(size))
            for offset, size, count in zip(offsets, sizes, params.keys_per_slot, strict=True)
        ]
        keys = np.concatenate(columns, axis=1)
        row_ptrs = np.concatenate([[0], np.cumsum(np.tile(params.keys_per_slot, rows))]).astype(np.int64)
        dense = rng.random((rows, params.dense_dim), np.float32)
        if params.format == DataReaderType_t.Raw and not params.float_label_dense:
            dense = np.floor(100 * dense)
        weights = keyed_uniform(keys.reshape(-1), params.label_dim, params.seed).reshape(*keys.shape, -1) * 4 - 2
        scores = weights.sum(axis=1) / math.sqrt(keys.shape[1]) * 2 + dense[:, :1] / (dense.max(initial=1)) - 0.5
        labels = (rng.random(scores.shape) < 1 / (1 + np.exp(-scores))).astype(np.float32)
        return Samples(labels, dense, Bags(keys.reshape(-1), row_ptrs, params.num_slot))

    def _keys(self, u: NDArray[np.float64], size: int) -> NDArray[np.int64]:
        if self._params.dist_type == Distribution_t.Uniform:
            return (u * size).astype(np.int64)
        return power_law(u, size, self._params.exponent)


def power_law(u: NDArray[np.float64], size: int, alpha: float) -> NDArray[np.int64]:
    """Turn uniform numbers of [0, 1] into keys 0 to ``size - 1``, whose density falls with the power ``alpha``.

    HugeCTR's formula: the inverse of the distribution function, ``((M^(1-a) - 1) u + 1)^(1/(1-a))``, rounded.
    """
    power = 1 - alpha
    y = ((float(size) ** power - 1) * u + 1) ** (1 / power)
    keys: NDArray[np.int64] = np.rint(y).astype(np.int64) - 1
    return keys.clip(0, size - 1)


def _check_choices_and_counts(params: DataGeneratorParams) -> None:
    for name, kind in _KINDS.items():
        if getattr(params, name) not in list(kind):
            raise _error(name, f"expected {' or '.join(kind)}", getattr(params, name))
    for name in _COUNTS:
        least = 0 if name in ("dense_dim", "seed") else 1
        value = getattr(params, name)
        if not is_whole(value, least):
            raise _error(name, f"expected a whole number of at least {least}", value)


def _error(name: str, expected: str, value: Any) -> ConfigError:
    return ConfigError("DataGeneratorParams", name, f"{expected}, got {value!r}")
