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
from serving.model.records import Graph

if TYPE_CHECKING:
    from serving.dense.quantizing import Product

_log = logging.getLogger(__name__)

# How many times the calibration's largest value a batch may have on integers: their steps grow with the largest value
# of the whole batch, and so does the error of every sample in it.
_MOST_GROWTH = 2


class Int8Network:
    """Products on integers for batches like the calibration, float32 for others. See ``DenseNetwork``.

    One value far from the calibration's would cost all samples of its batch their precision, and a NaN would become an
    integer like any other, with an answer that shows nothing of it.
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
        """Keep both networks, and how large the calibration's values are; ``source`` is for messages."""
        self.quantization: Quantization | None = quantization
        self._integers = integers
        self._exact = exact
        self._source = source
        self._told = False
        of_features = np.abs(calibration.dense).max(axis=0)
        smallest = SMALLEST_RATIO * of_features.max(initial=0)
        self._most_dense = _MOST_GROWTH * np.maximum(of_features, smallest)
        self._most_embeddings = [_MOST_GROWTH * np.abs(table).max() for table in calibration.embeddings]

    def __call__(self, dense: Floats, embeddings: Sequence[Floats]) -> Floats:
        """See ``DenseNetwork.__call__``."""
        if self._is_like_calibration(dense, embeddings):
            return self._integers(dense, embeddings)
        if not self._told:  # once, or as often as threads meet here first
            self._told = True
            _log.warning(
                "%s: a batch has values far from the calibration's; such are answered in float32", self._source
            )
        return self._exact(dense, embeddings)

    def _is_like_calibration(self, dense: Floats, embeddings: Sequence[Floats]) -> bool:
        if not len(dense):
            return True
        # NaN is in the minimum, and within no bounds
        return bool(np.all((dense.min(axis=0) >= -self._most_dense) & (dense.max(axis=0) <= self._most_dense))) and all(
            -most <= table.min() and table.max() <= most
            for table, most in zip(embeddings, self._most_embeddings, strict=True)
        )


def open_int8(
    graph: Graph, exact: OnnxNetwork, model: bytes | Path, calibration: Calibration | None, threads: int, source: str
) -> Int8Network:
    """Quantise a network on this machine and measure it there: how integers are multiplied depends on the processor.

    All products with a weight are tried first. While an answer is off by more than the tolerance, the product that
    errs most, alone, for each multiplication that it saves goes back to float32.

    Args:
        graph: the structure, or the inputs alone.
        exact: the float32 network, which stays open for batches unlike the calibration.
        model: its ONNX model, or the file.
        calibration: what to measure on.
        threads: how many threads work on one call.
        source: the model's file, for messages.

    Raises:
        ConfigError: the network mixes samples, has no product with a weight, or errs beyond the tolerance even with one
            of them; its answers to the calibration are not finite; or it cannot be quantised.
        MissingExtraError: a package of the extra ``onnx`` is not installed.
        ValueError: there is no calibration, or its arrays are not the graph's.
    """
    if calibration is None:
        raise ValueError("the engine int8 needs a calibration")
    quantizing = _import_quantizing()
    if graph.mixes_samples:
        # as by PReLU_Dice, which divides by the deviation of the batch at hand, and the error with it
        reason = (
            "engine int8: the answer to a sample depends on the others of its batch, so that what is measured on one "
            "batch says nothing of another; take the engine onnx"
        )
        raise ConfigError(source, "", reason)
    expected = exact(calibration.dense, calibration.embeddings)
    if not np.isfinite(expected).all():
        raise ConfigError(source, "", "engine int8: not all answers to the calibration's samples are finite numbers")
    # columns are balanced on every second sample, so that the error is measured on others too
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
        raise ConfigError(source, "", f"engine int8: the network cannot be quantised: {one_line(err)}") from err
    return Int8Network(network, exact, calibration, measured, source)


@dataclass(frozen=True, slots=True)
class _Trials:
    """A model of which any choice of products can be quantised and measured."""

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
        """Return the network with as many of ``products``, those with a weight, on integers as the tolerance allows.

        Returns:
            the network, and how far off it is.
        """
        if not products:
            reason = f"engine int8: the network has {self.total} products of matrices, none with a weight"
            raise ConfigError(self.source, "", reason)
        network, result = self._measure(products)
        if self._is_close(result):
            return self._told(network, result)
        alone = [self._measure([product])[1].max_error for product in products]
        worst_first = sorted(zip(alone, products, strict=True), key=_error_of_a_multiplication, reverse=True)
        # What is beyond the tolerance by itself is so in company, and would outlast all others where it is large.
        fitting = [product for error, product in worst_first if error <= self.calibration.tolerance]
        for dropped in range(len(fitting) == len(products), len(fitting)):
            network, one = self._measure(fitting[dropped:])
            if self._is_close(one):
                return self._told(network, one)
        least = f" ({np.nanmin([*alone, inf]):.2g} with a single product)" if len(products) > 1 else ""
        reason = f"engine int8: {result}{least}; the tolerance is {self.calibration.tolerance:g}"
        raise ConfigError(self.source, "", reason)

    def _told(self, network: OnnxNetwork, result: Quantization) -> tuple[OnnxNetwork, Quantization]:
        _log.info("%s: %s", self.source, result)
        return network, result

    def _measure(self, products: "Sequence[Product]") -> tuple[OnnxNetwork, Quantization]:
        """Return the network with these products on integers, and how far off it is."""
        model = self.quantizing.quantize(self.model, products, self.scales)
        network = OnnxNetwork(self.graph, model, self.threads, self.source)
        errors = np.abs(network(self.calibration.dense, self.calibration.embeddings) - self.expected)
        largest, mean = float(errors.max()), float(errors.mean())
        return network, Quantization(largest, mean, len(self.expected), len(products), self.total)

    def _is_close(self, result: Quantization) -> bool:
        return result.max_error <= self.calibration.tolerance  # which NaN is not


def _import_quantizing() -> ModuleType:
    try:
        import serving.dense.quantizing as quantizing
    except ImportError as err:
        raise MissingExtraError((err.name or "onnx").partition(".")[0], "onnx", "the engine int8") from err
    return quantizing


def _error_of_a_multiplication(one: "tuple[float, Product]") -> float:
    error, product = one
    return error / product.weight.size if isfinite(error) else inf
