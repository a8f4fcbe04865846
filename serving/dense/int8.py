"""The engine int8: products with weights on 8-bit integers, measured before they are used."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.dense.calibration import SMALLEST_RATIO, Calibration, Quantization
from serving.dense.network import Floats
from serving.dense.onnx import OnnxNetwork
from serving.dense.runtime import one_line, refusals
from serving.errors import ConfigError, MissingExtraError
from serving.model.records import Graph, Output

if TYPE_CHECKING:
    from serving.dense.quantizing import Product

_log = logging.getLogger(__name__)

# A batch runs on integers if its values are at most this many times the calibration's largest value. The steps of the
# integers grow with the largest value of the batch, and so does the error of every sample in the batch.
_MOST_GROWTH = 2


class Int8Network:
    """Products on integers for batches like the calibration, float32 for others. See ``DenseNetwork``.

    One value far from the calibration's would reduce the precision of all samples in the batch. A NaN would become an
    ordinary integer, and the answer would not show it.
    """

    engine = "int8"

    def __init__(
        self,
        integers: OnnxNetwork,
        exact: OnnxNetwork,
        calibration: Calibration,
        quantization: Quantization,
        source: str,
    ) -> None:
        """Keep both networks and the sizes of the calibration's values; ``source`` is for messages."""
        self.quantization: Quantization | None = quantization
        self._integers = integers
        self._exact = exact
        self._source = source
        self._has_warned = False
        of_features = np.abs(calibration.dense).max(axis=0)
        smallest = SMALLEST_RATIO * of_features.max(initial=0)
        self._most_dense = _MOST_GROWTH * np.maximum(of_features, smallest)
        self._most_embeddings = [_MOST_GROWTH * np.abs(table).max() for table in calibration.embeddings]

    def __call__(self, dense: Floats, embeddings: Sequence[Floats], wanted: Sequence[Output] | None = None) -> Floats:
        """See ``DenseNetwork.__call__``."""
        if self._is_like_calibration(dense, embeddings):
            return self._integers(dense, embeddings)
        if not self._has_warned:  # without a lock: several threads may log it
            self._has_warned = True
            _log.warning("%s: a batch has values far from the calibration's; such batches run in float32", self._source)
        return self._exact(dense, embeddings)

    def _is_like_calibration(self, dense: Floats, embeddings: Sequence[Floats]) -> bool:
        if not len(dense):
            return True
        # A NaN becomes the minimum, and fails every comparison.
        return bool(np.all((dense.min(axis=0) >= -self._most_dense) & (dense.max(axis=0) <= self._most_dense))) and all(
            -most_values <= table.min() and table.max() <= most_values
            for table, most_values in zip(embeddings, self._most_embeddings, strict=True)
        )


def open_int8(
    graph: Graph, exact: OnnxNetwork, model: bytes | Path, calibration: Calibration | None, threads: int, source: str
) -> Int8Network:
    """Quantize a network and measure it on this machine: processors multiply integers in different ways.

    All products with a weight are tried first. While an answer exceeds the tolerance, one more product goes back to
    float32. The first to go back is the product with the largest error per multiplication saved, measured alone.

    Args:
        graph: the structure, or only the inputs.
        exact: the float32 network; it stays open for batches unlike the calibration.
        model: the network's ONNX model, or its file.
        calibration: the samples to measure on.
        threads: how many threads work on one call.
        source: the model's file, for messages.

    Raises:
        ConfigError: the network mixes samples, has no product with a weight, or exceeds the tolerance even with a
            single product; its answers to the calibration are not finite; or it cannot be quantized.
        MissingExtraError: a package of the extra ``onnx`` is not installed.
        ValueError: there is no calibration, or its arrays are not the graph's.
    """
    if calibration is None:
        raise ValueError("the engine int8 needs a calibration")
    quantizing = _import_quantizing()
    if graph.mixes_samples:
        # PReLU_Dice does this: it divides the values, and with them the error, by the deviation of the batch.
        reason = (
            "engine int8: the answer to a sample depends on the other samples of its batch, so an error measured on "
            "one batch does not hold for another; use the engine onnx"
        )
        raise ConfigError(source, "", reason)
    expected = exact(calibration.dense, calibration.embeddings)
    if not np.isfinite(expected).all():
        raise ConfigError(source, "", "engine int8: an answer to the calibration's samples is not a finite number")
    # Columns are balanced on every second sample, and the error is measured on all samples.
    feeds = exact.feeds(calibration.dense[::2], [table[::2] for table in calibration.embeddings])
    failures: tuple[type[Exception], ...] = (*refusals(), ValueError, RuntimeError)
    try:
        folded = quantizing.fold_constants(model)
        if (found := quantizing.opset(folded)) < (least := quantizing.LEAST_OPSET):
            raise ConfigError(source, "", f"engine int8: expected operators of opset {least} or newer, got {found}")
        products = quantizing.weight_products(folded)
        scales = quantizing.column_scales(folded, products, feeds)
        total = quantizing.count_products(folded)
        trials = _Trials(quantizing, graph, folded, scales, total, calibration, expected, threads, source)
        network, measured = trials.choose(products)
    except failures as err:
        raise ConfigError(source, "", f"engine int8: the network cannot be quantized: {one_line(err)}") from err
    return Int8Network(network, exact, calibration, measured, source)


@dataclass(frozen=True, slots=True)
class _Trials:
    """Quantizes any choice of a model's products and measures the result."""

    quantizing: ModuleType
    graph: Graph
    model: Any
    scales: Mapping[str, Floats]
    total: int
    calibration: Calibration
    expected: Floats
    threads: int
    source: str

    def choose(self, products: "Sequence[Product]") -> tuple[OnnxNetwork, Quantization]:
        """Put as many of ``products`` on integers as the tolerance allows; return the network and its error."""
        if not products:
            reason = f"engine int8: the network has {self.total} matrix products, but none with a weight"
            raise ConfigError(self.source, "", reason)
        network, result = self._measure(products)
        if self._is_close(result):
            return self._logged(network, result)
        alone = [self._measure([product])[1].max_error for product in products]
        worst_first = sorted(zip(alone, products, strict=True), key=_error_of_a_multiplication, reverse=True)
        # A product that exceeds the tolerance alone also exceeds it together with others. A large product must go too,
        # although its error per multiplication is small.
        fitting = [product for error, product in worst_first if error <= self.calibration.tolerance]
        for dropped in range(len(fitting) == len(products), len(fitting)):
            network, measured = self._measure(fitting[dropped:])
            if self._is_close(measured):
                return self._logged(network, measured)
        least = f" ({np.nanmin([*alone, inf]):.2g} with a single product)" if len(products) > 1 else ""
        reason = f"engine int8: {result}{least}; the tolerance is {self.calibration.tolerance:g}"
        raise ConfigError(self.source, "", reason)

    def _logged(self, network: OnnxNetwork, result: Quantization) -> tuple[OnnxNetwork, Quantization]:
        _log.info("%s: %s", self.source, result)
        return network, result

    def _measure(self, products: "Sequence[Product]") -> tuple[OnnxNetwork, Quantization]:
        """Return the network with these products on integers, and its error."""
        model = self.quantizing.quantize(self.model, products, self.scales)
        network = OnnxNetwork(self.graph, model, self.threads, self.source)
        differences = network(self.calibration.dense, self.calibration.embeddings) - self.expected
        errors = np.abs(differences) / np.array(self.graph.units)
        largest, mean = float(errors.max()), float(errors.mean())
        has_scores = "score" in self.graph.label_kinds
        return network, Quantization(largest, mean, len(self.expected), len(products), self.total, has_scores)

    def _is_close(self, result: Quantization) -> bool:
        return result.max_error <= self.calibration.tolerance  # False for NaN


def _import_quantizing() -> ModuleType:
    try:
        import serving.dense.quantizing as quantizing
    except ImportError as err:
        raise MissingExtraError((err.name or "onnx").partition(".")[0], "onnx", "the engine int8") from err
    return quantizing


def _error_of_a_multiplication(measured: "tuple[float, Product]") -> float:
    error, product = measured
    return error / product.weight.size if isfinite(error) else inf
