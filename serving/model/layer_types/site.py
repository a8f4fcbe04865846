"""The input and output of the functions of this package: a layer, and its structure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.errors import ConfigError
from serving.model.records import Samples, Shape
from serving.model.strict_json import Fields

INITIALIZERS = ("Default", "Uniform", "XavierNorm", "XavierUniform", "Zero")
MANY = 2**31

WeightShapes = tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each weight, in file order


@dataclass(frozen=True, slots=True)
class Site:
    """One layer while it is read: its JSON object, and the shapes of its bottoms."""

    fields: Fields
    bottoms: tuple[Shape, ...]
    top_count: int

    def fail(self, reason: str, key: str = "bottom") -> ConfigError:
        """Return an error about this layer's ``key``."""
        return self.fields.error(reason, key)

    def columns(self) -> int:
        """Return the last dimension of the first bottom. Refuse a bottom without columns."""
        columns = inner(self.bottoms[0])[-1]
        if not columns:
            raise self.fail("the tensor has no columns")
        return columns

    def expect_dimensions(self, *counts: int) -> None:
        """Refuse a bottom that has another number of dimensions than one of ``counts``."""
        words = {2: "two", 3: "three", 4: "four"}
        for shape in self.bottoms:
            if len(shape) not in counts:
                expected = " or ".join(words[count] for count in counts)
                raise self.fail(f"expected a tensor of {expected} dimensions, got {show(shape)}")

    def expect_equal(self) -> None:
        """Refuse bottoms of different shapes."""
        for shape in self.bottoms:
            if shape != self.bottoms[0]:
                raise self.fail(f"shapes {show(self.bottoms[0])} and {show(shape)} differ")


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a layer.

    Attributes:
        tops: the shape of each top.
        params: checked parameters by their JSON names.
        weights: the name and shape of each weight, in the order of the dense file.
        statistics: the name and shape of each running statistic, in the order of the side file.
        least_samples: the smallest B that the layer accepts.
        mixes_samples: a sample's answer depends on the other samples of its batch.
    """

    tops: tuple[Shape, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    weights: WeightShapes = ()
    statistics: WeightShapes = ()
    least_samples: int = 1
    mixes_samples: bool = False


@dataclass(frozen=True, slots=True)
class LayerType:
    """One entry of the table.

    Attributes:
        read: the layer's function.
        keys: its keys besides ``name``, ``type``, ``bottom`` and ``top``.
        bottoms: the least and the most bottoms.
        tops: the least and the most tops.
    """

    read: Callable[[Site], Structure]
    keys: tuple[str, ...] = ()
    bottoms: tuple[int, int] = (1, 1)
    tops: tuple[int, int] = (1, 1)


def inner(shape: Shape) -> tuple[int, ...]:
    """Return the dimensions after the first; no other dimension counts samples."""
    return tuple(size for size in shape[1:] if not isinstance(size, Samples))


def show(shape: Shape) -> str:
    """Return a shape as messages show it: ``[B, 26, 16]``."""
    return f"[{', '.join(map(str, shape))}]"


def initializers(fields: Fields, keys: tuple[str, ...] = ("weight_init", "bias_init")) -> dict[str, str]:
    """Return the initializers of a layer. A prediction ignores them, but their spelling is checked."""
    known = {name: name for name in INITIALIZERS}
    return {key: fields.choice(key, known) for key in keys if key in fields}
