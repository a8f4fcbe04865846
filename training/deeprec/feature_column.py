"""DeepRec's feature columns: each column has a table that grows, and one lookup reads all tables."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from training.arguments import one_of, whole
from training.calls.deeprec import require_norm
from training.embedding.collection import EmbeddingBagCollection
from training.embedding.eager import eager
from training.embedding.gradients import PooledBags
from training.embedding.lookups import LocalLookups
from training.embedding.parameter import TableParameter, sinks_of, which_make_rows
from training.sparse_tensor import read_ids
from training.tables.config import Combiner, Constant, EmbeddingBagConfig, Initializer, Normal
from training.tables.table import EmbeddingTable

Fusion = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """A feature of ids.

    Attributes:
        key: the feature's name.
    """

    key: str


class EmbeddingColumn(torch.nn.Module):  # type: ignore[misc]
    """A feature and its table. The table makes a row when training first sees an id.

    Train it with an optimizer of ``training.optimizers`` or with ``FtrlOptimizer``. ``state_dict()`` has the rows and
    the states of the optimizer.

    Attributes:
        key: the feature's name.
        name: of the table.
        do_fusion: the argument of ``embedding_column``. It has no effect, because every lookup is fused.
    """

    def __init__(self, key: str, config: EmbeddingBagConfig, do_fusion: Fusion | None = None) -> None:
        """Make a table. Its first weights depend on the id, the name and ``torch.manual_seed``."""
        super().__init__()
        self.key = key
        self.do_fusion = do_fusion
        self.name = f"{key}_embedding"
        seed = (torch.initial_seed() + zlib.crc32(self.name.encode())) % 2**63
        self.tables = EmbeddingBagCollection({self.name: config}, seed=seed)

    @property
    def parameter(self) -> TableParameter:
        """The table among the parameters of a model."""
        parameter: TableParameter = next(self.parameters())
        return parameter

    @property
    def table(self) -> EmbeddingTable:
        """The rows."""
        return self.tables.tables[self.name]


def categorical_column_with_embedding(key: str, dtype: torch.dtype = torch.int64) -> CategoricalColumn:
    """Return a feature whose ids are any integers of at least 0.

    Args:
        key: the feature's name.
        dtype: of the ids, int64 or int32. Tables have int64 ids.

    Raises:
        ValueError: ids cannot be of this type.
    """
    if dtype not in (torch.int64, torch.int32):
        raise ValueError(f"feature {key!r}: expected the dtype torch.int64 or torch.int32, got {dtype!r}")
    return CategoricalColumn(key)


def sparse_column_with_embedding(column_name: str, dtype: torch.dtype = torch.int64) -> CategoricalColumn:
    """Return what ``categorical_column_with_embedding`` returns."""
    return categorical_column_with_embedding(column_name, dtype)


def embedding_column(
    categorical_column: CategoricalColumn | None = None,
    dimension: int | None = None,
    combiner: Combiner = "mean",
    initializer: Initializer | None = None,
    *,
    max_norm: float | None = None,
    do_fusion: Fusion | None = None,
    sparse_id_column: CategoricalColumn | None = None,
) -> EmbeddingColumn:
    """Make the table of a feature.

    Args:
        categorical_column: the feature.
        dimension: D, the floats of a vector.
        combiner: "sum", "mean" or "sqrtn".
        initializer: of the first weights: ``ones_initializer()`` or an initializer of ``training.embedding``. The
            default is ``Normal(0, 1 / sqrt(D))``.
        max_norm: vectors with a larger L2 norm are scaled to it when they are read. The gradient follows the scaling.
        do_fusion: has no effect: every lookup is fused.
        sparse_id_column: the feature, instead of ``categorical_column``.

    Raises:
        TypeError: there is no feature, there are two, or an argument is of another type.
        ValueError: a value is out of range.
    """
    given = [column for column in (categorical_column, sparse_id_column) if column is not None]
    if len(given) != 1 or not isinstance(given[0], CategoricalColumn):
        came = " and ".join(type(column).__name__ for column in given) or "none"
        raise TypeError(f"embedding_column: expected either categorical_column or sparse_id_column, got {came}")
    [column] = given
    place = f"feature {column.key!r}"
    dimension = whole(place, "dimension", dimension, 1)
    one_of(place, "combiner", combiner, get_args(Combiner))
    one_of(place, "do_fusion", do_fusion, (None, *get_args(Fusion)))
    if not isinstance(initializer, Initializer | None):
        came = type(initializer).__name__
        raise TypeError(f"{place}: expected an initializer of training.embedding, got {came}")
    require_norm(place, max_norm)
    config = EmbeddingBagConfig(
        dimension, combiner, initializer=initializer or Normal(0.0, dimension**-0.5), max_norm=max_norm
    )
    return EmbeddingColumn(column.key, config, do_fusion)


def ones_initializer(dtype: torch.dtype = torch.float32) -> Constant:
    """Return the initializer of vectors of ones.

    Raises:
        ValueError: vectors cannot be of this type.
    """
    if dtype != torch.float32:
        raise ValueError(f"ones_initializer: expected the dtype torch.float32, got {dtype!r}")
    return Constant(1.0)


@eager
def input_layer(features: Mapping[str, Any], feature_columns: Iterable[EmbeddingColumn]) -> torch.Tensor:
    """Look up the ids of each column, and join the columns' vectors in the order of their names.

    One native call looks up all columns. Ids below 0 are dropped. The vectors of a row are combined; a row without an
    id has a vector of 0. In training mode with gradients enabled, new ids get a row. Otherwise their vector is 0.

    Args:
        features: rows of ids by feature: a ``SparseTensor``, ``(indices, values, dense_shape)`` or a sparse COO tensor
            of PyTorch.
        feature_columns: the columns, all in the same mode.

    Returns:
        float32[R, sum of D], on the device of the ids.

    Raises:
        KeyError: a feature is missing.
        TypeError: a column or the ids of a feature are of another type.
        ValueError: features have another shape, or columns have the same name or another mode.
        ReservedKeyError: an id is one of the two largest int64.
    """
    columns = _in_order(feature_columns, features)
    ids = [read_ids(f"feature {column.key!r}", features[column.key]) for column in columns]
    bags = [column_ids.without_invalid(drops_weights=False).bags(default_id=None) for column_ids in ids]
    rows = {column.key: one.shape[0] for column, one in zip(columns, bags, strict=True)}
    if len(set(rows.values())) > 1:
        raise ValueError(f"features: expected the same number of rows in each, got {rows}")
    parameters = [column.parameter for column in columns]
    makes_rows = which_make_rows(parameters, bags, columns[0].training)
    if any(makes_rows):
        parameters[0].processes.require_joined("feature_columns", "one process")
    lookups = LocalLookups([column.table for column in columns], bags, makes_rows)
    devices = [bag.device for bag in bags]
    vectors = PooledBags.apply(lookups, sinks_of(parameters, lookups), devices, *parameters, *[None] * len(columns))
    return torch.cat(vectors, dim=1)


def input_from_feature_columns(
    columns_to_tensors: Mapping[str, Any], feature_columns: Iterable[EmbeddingColumn]
) -> torch.Tensor:
    """Return what ``input_layer`` returns."""
    return input_layer(columns_to_tensors, feature_columns)


def _in_order(feature_columns: Iterable[EmbeddingColumn], features: Mapping[str, Any]) -> list[EmbeddingColumn]:
    """Return the columns sorted by name, or raise an error if they cannot be looked up together."""
    columns = list(feature_columns)
    for column in columns:
        if not isinstance(column, EmbeddingColumn):
            raise TypeError(f"feature_columns: expected columns of embedding_column, got {type(column).__name__}")
        if column.key not in features:
            raise KeyError(f"no ids for the feature {column.key!r}; got ids for {', '.join(features) or 'none'}")
    if not columns:
        raise ValueError("feature_columns: expected at least one column, got none")
    if len({column.training for column in columns}) > 1:
        modes = ", ".join(f"{column.name} in {'training' if column.training else 'eval'} mode" for column in columns)
        raise ValueError(f"feature_columns: expected columns in the same mode, got {modes}")
    columns.sort(key=lambda column: column.name)
    for one, other in pairwise(columns):
        if one.name == other.name:
            raise ValueError(f"feature_columns: expected columns of different names, got two called {one.name!r}")
    return columns
