"""The types in the signature of every layer's function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from serving.dense.primitives import Arithmetic, Array

Params: TypeAlias = Mapping[str, Any]
Arrays: TypeAlias = Sequence[Array]
LayerWeights: TypeAlias = Mapping[str, Array]  # with BatchNorm's statistics
OwnArithmetic: TypeAlias = Arithmetic | None  # None: the array library's own
LayerFunction: TypeAlias = Callable[[Params, Arrays, LayerWeights, OwnArithmetic], Arrays]
LayerOverride: TypeAlias = Callable[[Params, Arrays, LayerWeights], Arrays]
