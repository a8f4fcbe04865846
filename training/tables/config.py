"""What one embedding table is like."""

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, get_args

from serving.model.pooling import Pooling
from serving.model.records import Combiner as Combiner
from training.arguments import number

RowDtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class Uniform:
    """First weights drawn uniformly from [low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        """Refuse numbers that are not a range."""
        for name in ("low", "high"):
            number("Uniform", name, getattr(self, name))
        if self.low > self.high:
            raise ValueError(f"Uniform: expected low of at most high, got {self.low} and {self.high}")

    @property
    def native(self) -> tuple[str, float, float]:
        """The argument of ``kernels.host.TrainingTable``."""
        return "uniform", self.low, self.high


@dataclass(frozen=True, slots=True)
class Normal:
    """First weights drawn from a normal distribution."""

    mean: float
    std: float

    def __post_init__(self) -> None:
        """Refuse numbers that are not a distribution."""
        number("Normal", "mean", self.mean)
        number("Normal", "std", self.std, least=0.0)

    @property
    def native(self) -> tuple[str, float, float]:
        """The argument of ``kernels.host.TrainingTable``."""
        return "normal", self.mean, self.std


@dataclass(frozen=True, slots=True)
class Constant:
    """First weights that are all equal."""

    value: float

    def __post_init__(self) -> None:
        """Refuse what is not a number."""
        number("Constant", "value", self.value)

    @property
    def native(self) -> tuple[str, float, float]:
        """The argument of ``kernels.host.TrainingTable``."""
        return "constant", self.value, 0.0


Initializer = Uniform | Normal | Constant


@dataclass(frozen=True, slots=True)
class EmbeddingBagConfig:
    """One table of an ``EmbeddingBagCollection``.

    Attributes:
        dim: D, the floats of a row.
        combiner: how the rows of a bag become one vector. ``"mean"`` and ``"sqrtn"`` divide the sum by the number of
            keys and by its square root. With weights they divide by the sum of the weights, and by the root of the sum
            of their squares.
        features: the inputs that read the table, by default one with the table's name.
        rows: V: the keys are 0 to V - 1, and all rows exist. None: a key gets a row when training first sees it.
        row_dtype: the type of the weights in memory. A narrow row loses updates that are smaller than its rounding.
            Optimizer states are always float32.
        initializer: the initial weights, which depend only on the key and the seed: ``Uniform``, ``Normal`` or
            ``Constant``.
        admit_after: how often training must see a key before it gets a row. Until then it counts as unknown. The counts
            of such keys take memory too, about 26 bytes each.
        max_rows: the maximum rows in each process. In a full table, a new row replaces the least recently read row.
        max_norm: rows with a larger L2 norm are scaled to it when they are read. The gradient follows the scaling.
        default_value: every float of an unknown key's vector.
        keeps_slots: remember in which slot of a sample each key was first seen, as HugeCTR's localized files do.
    """

    dim: int
    combiner: Combiner = "sum"
    features: tuple[str, ...] = ()
    rows: int | None = None
    row_dtype: RowDtype = "fp32"
    initializer: Initializer = field(default=Uniform(-0.05, 0.05))
    admit_after: int = 1
    max_rows: int | None = None
    max_norm: float | None = None
    default_value: float = 0.0
    keeps_slots: bool = False

    def __post_init__(self) -> None:
        """Refuse arguments of a wrong type. The table checks the ranges of numbers."""
        for name, kind, is_optional in (
            ("dim", Integral, False),
            ("rows", Integral, True),
            ("max_rows", Integral, True),
            ("admit_after", Integral, False),
            ("max_norm", Real, True),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, kind) or (is_optional and value is None)):
                expected = "an int" if kind is Integral else "a number"
                raise TypeError(f"{name}: expected {expected}{' or None' * is_optional}, got {value!r}")
        number("EmbeddingBagConfig", "default_value", self.default_value)
        for name, choices in (("combiner", get_args(Combiner)), ("row_dtype", get_args(RowDtype))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not isinstance(self.initializer, Initializer):
            expected = "Uniform(low, high), Normal(mean, std) or Constant(value) of training.embedding"
            raise TypeError(f"initializer: expected {expected}, got {self.initializer!r}")
        if isinstance(self.features, str) or not all(isinstance(feature, str) for feature in self.features):
            raise TypeError(f"features: expected a tuple of names, got {self.features!r}")

    @property
    def pooling(self) -> Pooling:
        """How training reads the table, for the server."""
        return Pooling(self.combiner, self.default_value)
