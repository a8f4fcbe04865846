"""The form of every layer's function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from serving.dense.primitives import Array

Params: TypeAlias = Mapping[str, Any]
Arrays: TypeAlias = Sequence[Array]
LayerWeights: TypeAlias = Mapping[str, Array]  # BatchNorm's statistics among them
LayerFunction: TypeAlias = Callable[[Params, Arrays, LayerWeights], Arrays]
