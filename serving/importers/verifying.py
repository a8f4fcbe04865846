"""Compare an imported model's answers with the answers that the original model gave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from serving.batch import INT32_MAX, Batch
from serving.config import ModelConfig, read_inference_config
from serving.errors import ConfigError, ModelFileError, RequestError
from serving.model.names import DENSE, KEYS, ROW_PTRS
from serving.model.records import default_outputs
from serving.model.version_writer import GRAPH_FILE
from serving.opening import open_model
from serving.parameter_server import ParameterServer
from serving.reading import read_batch
from serving.routes import Prediction
from serving.session import InferenceSession
from serving.sources.numpy_files import arrays_in
from serving.storage import MemoryStore

_NO_KEY = -1  # pads CATCOLUMN where there is no ROWINDEX


class Comparison(NamedTuple):
    """The number of samples, the largest absolute difference, and the number of keys that no table has."""

    samples: int
    difference: float
    defaulted_keys: int


class NamedSamples(NamedTuple):
    """Raw features of samples by name, and the right answers by the names of the outputs."""

    columns: Mapping[str, Any]
    answers: Mapping[str, NDArray[Any]]


def check_tolerance(call: str, tolerance: Any) -> None:
    """Refuse the tolerance of a call if it is no number from 0 to 1."""
    if not isinstance(tolerance, int | float | np.number) or not 0 <= tolerance <= 1:
        raise ConfigError(call, "tolerance", f"expected 0 to 1, got {tolerance!r}")


@dataclass(frozen=True, slots=True)
class ExpectedAnswers:
    """Samples and their right answers.

    Attributes:
        source: the ``.npz``, or what the samples are, for messages.
        arrays: its arrays: ``CATCOLUMN``, the answers by the names of the outputs, and ``DES`` and ``ROWINDEX`` if the
            file has them.
        named: samples that are compared too; None: there are none.
    """

    source: str
    arrays: Mapping[str, NDArray[Any]]
    named: NamedSamples | None = None

    def compare(self, folder: Path, name: str, tolerance: float) -> Comparison:
        """Open the version in ``folder``, ask it for every sample, and compare the answers.

        Raises:
            ModelFileError: an answer differs by more than ``tolerance``, or the arrays do not fit the model.
        """
        config = read_inference_config(folder / GRAPH_FILE, name)
        self._check_names([output.name for output in default_outputs(config.outputs)])
        try:
            batch = self._batch(config)
            with ParameterServer([MemoryStore()]) as server:  # not the repository's tiers: the model may be refused
                server.load_model(config)
                with cast(InferenceSession, open_model(server, config)) as session:
                    answer = session.predict_batch(batch)
                    difference = self._largest_difference(config, answer, tolerance)
                    if self.named is not None:
                        self._compare_named(session, self.named, tolerance)
        except RequestError as err:
            raise ModelFileError(self.source, str(err)) from err
        return Comparison(batch.samples, difference, answer.defaulted_keys)

    def _compare_named(self, session: InferenceSession, named: NamedSamples, tolerance: float) -> None:
        """Compare the answers to raw features."""
        try:
            answer = session.predict_batch(session.read(named.columns))
        except RequestError as err:
            raise ModelFileError("the example", str(err)) from err
        ExpectedAnswers("the example", named.answers)._largest_difference(session.config, answer, tolerance)

    def _check_names(self, outputs: Sequence[str]) -> None:
        """Refuse arrays that are missing or have other names."""
        missing = [name for name in (KEYS, *outputs) if name not in self.arrays]
        if missing or not self.arrays.keys() <= {DENSE, KEYS, ROW_PTRS, *outputs}:
            expected = f"expected the arrays {DENSE}, {KEYS}, {ROW_PTRS} and {', '.join(outputs)}"
            reason = f"{expected}, found {', '.join(self.arrays) or 'none'}"
            raise ModelFileError(self.source, f"missing: {', '.join(missing)}; {reason}" if missing else reason)

    def _batch(self, config: ModelConfig) -> Batch:
        """Return all samples as one request; the model's ``max_batchsize`` is no limit here."""
        if config.dense_dim and DENSE not in self.arrays:
            raise ModelFileError(self.source, f"missing: {DENSE}, [B, {config.dense_dim}]")
        keys, row_ptrs = self.arrays[KEYS], self.arrays.get(ROW_PTRS)
        if row_ptrs is None:
            keys, row_ptrs = self._without_padding(keys, sum(table.slots for table in config.tables))
        unlimited = config.model_copy(update={"max_batchsize": INT32_MAX})
        return read_batch(unlimited, self.arrays.get(DENSE), keys, row_ptrs)

    def _without_padding(self, keys: NDArray[Any], slots: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the keys of [B, S] or [B, S, nnz] without -1, and their offsets."""
        if keys.ndim not in (2, 3) or keys.shape[1] != slots:
            expected = f"[B, {slots}] or [B, {slots}, nnz] as there is no {ROW_PTRS}"
            raise ModelFileError(self.source, f"{KEYS}: expected {expected}, got {list(keys.shape)}")
        is_key = keys != _NO_KEY
        counts = is_key.reshape(len(keys) * slots, -1).sum(axis=1) if is_key.size else np.zeros(len(keys) * slots, int)
        return keys[is_key], np.concatenate([[0], np.cumsum(counts)])

    def _expected(self, config: ModelConfig, got: NDArray[np.float32]) -> tuple[NDArray[np.float64], ...]:
        """Return the right answers, float64[B, L], and their sizes.

        The size of a score or a vector is its largest number, and at least 1.
        """
        expected, sizes = np.empty(got.shape), np.ones(got.shape)
        for output in default_outputs(config.outputs):
            array, shape = self.arrays[output.name], (len(got), output.width)
            shapes = [shape, shape[:1]] if output.width == 1 else [shape]
            if array.dtype.kind not in "fiu" or array.shape not in shapes:
                came = f"{array.dtype} {list(array.shape)}"
                raise ModelFileError(self.source, f"{output.name}: expected numbers {list(shape)}, got {came}")
            expected[:, output.columns] = array.reshape(shape)
            if output.kind != "probability":
                sizes[:, output.columns] = np.maximum(np.abs(array).reshape(shape).max(axis=1, keepdims=True), 1)
        return expected, sizes

    def _largest_difference(self, config: ModelConfig, answer: Prediction, tolerance: float) -> float:
        """Return the largest difference. Differences of answers above 1 are relative to the answer."""
        got = answer.values
        expected, sizes = self._expected(config, got)
        differences = np.nan_to_num(np.abs(got - expected) / sizes, nan=np.inf).max(axis=1)
        worst = int(np.argmax(differences))
        if differences[worst] > tolerance:
            wrong = int(np.count_nonzero(differences > tolerance))
            raise ModelFileError(
                self.source,
                f"sample {worst}: expected {_shown(expected[worst])}, got {_shown(got[worst])}, a difference of "
                f"{differences[worst]:.3g}; samples that differ by more than {tolerance:g}: {wrong} of "
                f"{len(got)}; keys in no table: {answer.defaulted_keys}",
            )
        return float(differences[worst])


def read_expected_answers(path: Path) -> ExpectedAnswers:
    """Read a ``.npz`` of samples and their right answers.

    Raises:
        ModelFileError: the file cannot be read.
    """
    return ExpectedAnswers(str(path), arrays_in(path))


def _shown(answer: NDArray[Any]) -> list[float]:
    return [float(f"{value:.7g}") for value in answer]
