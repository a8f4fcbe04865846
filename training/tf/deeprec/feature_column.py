"""DeepRec's feature columns: each column has a table that grows, and one lookup reads all tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import tensorflow as tf

from serving.errors import OutputError
from serving.model.sparse_writer import write_table_folders
from training.arguments import one_of, shown, whole
from training.calls.deeprec import require_norm
from training.tables.config import Combiner, Constant, EmbeddingBagConfig, Initializer, Normal, Uniform
from training.tables.table import EmbeddingTable
from training.tf.engine import pool
from training.tf.ids import read_ids
from training.tf.processes import require_one

Fusion = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """A feature of ids.

    Attributes:
        key: the feature's name.
    """

    key: str


class EmbeddingColumn:
    """A feature and its table. The table makes a row when training first sees an id.

    Only ``FtrlOptimizer`` trains it. Other optimizers raise TensorFlow's errors.

    Attributes:
        key: the feature's name.
        name: of the table.
        do_fusion: the argument of ``embedding_column``. It has no effect, because every lookup is fused.
        table: the rows.
        variable: stands for the rows among TensorFlow's variables. Its gradient has an entry for each id used.
    """

    trainable = True

    def __init__(self, key: str, config: EmbeddingBagConfig, do_fusion: Fusion | None, seed: int) -> None:
        """Make a table, and a variable in the current graph."""
        self.key = key
        self.do_fusion = do_fusion
        self.name = f"{key}_embedding"
        self.table = EmbeddingTable(self.name, config, seed=seed)
        nothing = tf.zeros([0, config.dim])
        if tf.executing_eagerly():
            self.variable = tf.Variable(nothing, name=self.name)
        else:
            self.variable = tf.compat.v1.Variable(nothing, name=self.name, use_resource=True)
        self.variable.hotrow_table = self.table

    def source(self) -> tf.Tensor:
        """See ``engine.InTable``."""
        return tf.convert_to_tensor(self.variable)


def categorical_column_with_embedding(key: str, dtype: tf.DType = tf.int64) -> CategoricalColumn:
    """Return a feature whose ids are any integers of at least 0.

    Args:
        key: the feature's name.
        dtype: of the ids, int64 or int32. Tables have int64 ids.

    Raises:
        ValueError: ids cannot be of this type.
    """
    if tf.as_dtype(dtype) not in (tf.int64, tf.int32):
        raise ValueError(f"feature {key!r}: expected the dtype tf.int64 or tf.int32, got {dtype!r}")
    return CategoricalColumn(key)


def sparse_column_with_embedding(column_name: str, dtype: tf.DType = tf.int64) -> CategoricalColumn:
    """Return what ``categorical_column_with_embedding`` returns."""
    return categorical_column_with_embedding(column_name, dtype)


def embedding_column(
    categorical_column: CategoricalColumn | None = None,
    dimension: int | None = None,
    combiner: Combiner = "mean",
    initializer: Any = None,
    *,
    max_norm: float | None = None,
    do_fusion: Fusion | None = None,
    sparse_id_column: CategoricalColumn | None = None,
    seed: int = 0,
) -> EmbeddingColumn:
    """Make the table of a feature.

    Args:
        categorical_column: the feature.
        dimension: D, the floats of a vector.
        combiner: "sum", "mean" or "sqrtn".
        initializer: of the first weights: TensorFlow's initializer of ones, zeros, a constant, or uniform or normal
            numbers. The default is a normal distribution with the standard deviation 1 / sqrt(D).
        max_norm: vectors with a larger L2 norm are scaled to it when they are read. The gradient follows the scaling.
        do_fusion: has no effect: every lookup is fused.
        sparse_id_column: the feature, instead of ``categorical_column``.
        seed: of the first weights.

    Raises:
        TypeError: there is no feature, there are two, or an argument is of another type.
        ValueError: a value is out of range.
        RuntimeError: there are several processes or replicas.
    """
    require_one("embedding_column")
    given = [column for column in (categorical_column, sparse_id_column) if column is not None]
    if len(given) != 1 or not isinstance(given[0], CategoricalColumn):
        came = " and ".join(type(column).__name__ for column in given) or "none"
        raise TypeError(f"embedding_column: expected either categorical_column or sparse_id_column, got {came}")
    [column] = given
    place = f"feature {column.key!r}"
    dimension = whole(place, "dimension", dimension, 1)
    one_of(place, "combiner", combiner, get_args(Combiner))
    one_of(place, "do_fusion", do_fusion, (None, *get_args(Fusion)))
    require_norm(place, max_norm)
    first = Normal(0.0, dimension**-0.5) if initializer is None else _read_initializer(place, initializer)
    config = EmbeddingBagConfig(dimension, combiner, initializer=first, max_norm=max_norm)
    return EmbeddingColumn(column.key, config, do_fusion, whole(place, "seed", seed, 0))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def input_layer(
    features: Mapping[str, Any], feature_columns: Iterable[EmbeddingColumn], trainable: bool = True
) -> tf.Tensor:
    """Look up the ids of each column, and join the columns' vectors in the order of their names.

    One native call looks up all columns. Ids below 0 are dropped. The vectors of a row are combined; a row without an
    id has a vector of 0.

    Args:
        features: rows of ids by feature: a ``tf.SparseTensor`` or a ``tf.RaggedTensor``.
        feature_columns: the columns.
        trainable: new ids get a row. Otherwise their vector is 0.

    Returns:
        float32[R, sum of D].

    Raises:
        KeyError: a feature is missing.
        TypeError: a column or the ids of a feature are of another type.
        ValueError: features have another shape, or columns have the same name.
        ReservedKeyError: an id is one of the two largest int64.
    """
    columns = _in_order(feature_columns, features)
    ids = [
        read_ids(f"feature {column.key!r}", features[column.key]).then(lambda rows: rows.select(rows.ids >= 0))
        for column in columns
    ]
    return tf.concat(pool(columns, ids, [column.table.config.combiner for column in columns], trainable), axis=1)


def input_from_feature_columns(
    columns_to_tensors: Mapping[str, Any], feature_columns: Iterable[EmbeddingColumn]
) -> tf.Tensor:
    """Return what ``input_layer`` returns."""
    return input_layer(columns_to_tensors, feature_columns)


def write_tables(columns: Iterable[EmbeddingColumn], folder: str | Path) -> None:
    """Write the rows of columns, for ``hotrow import --checkpoint``.

    Args:
        columns: the trained columns. The rows of a column are in ``<folder>/<its name>``, in HugeCTR's format.
        folder: is complete or absent, and replaces an earlier folder of tables. A column without rows has no table.

    Raises:
        OutputError: two columns have one name, ``folder`` has other files, or the file system refuses.
    """
    by_name = {}
    for column in _listed(columns):
        if column.name in by_name:
            raise OutputError(f"{folder}: expected columns of different names, got two called {column.name!r}")
        by_name[column.name] = column.table
    rows = {name: table.served_rows() for name, table in by_name.items()}
    write_table_folders(folder, rows, {name: table.config.pooling for name, table in by_name.items()})


def _listed(columns: Iterable[EmbeddingColumn]) -> list[EmbeddingColumn]:
    if isinstance(columns, EmbeddingColumn):
        raise TypeError("feature_columns: expected a list of columns, got one column")
    return list(columns)


def _in_order(feature_columns: Iterable[EmbeddingColumn], features: Mapping[str, Any]) -> list[EmbeddingColumn]:
    """Return the columns sorted by name, or raise an error if they cannot be looked up together."""
    columns = _listed(feature_columns)
    for column in columns:
        if not isinstance(column, EmbeddingColumn):
            raise TypeError(f"feature_columns: expected columns of embedding_column, got {type(column).__name__}")
        if column.key not in features:
            raise KeyError(f"no ids for the feature {column.key!r}; got ids for {', '.join(features) or 'none'}")
    if not columns:
        raise ValueError("feature_columns: expected at least one column, got none")
    columns.sort(key=lambda column: column.name)
    for one, other in pairwise(columns):
        if one.name == other.name:
            raise ValueError(f"feature_columns: expected columns of different names, got two called {one.name!r}")
    return columns


def _read_initializer(place: str, initializer: Any) -> Initializer:
    """Return the table's initializer for one of TensorFlow's."""
    initializer = initializer() if isinstance(initializer, type) else initializer
    name = type(initializer).__name__.removesuffix("V2").lower()
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if name in ("ones", "zeros"):
        return Constant(float(name == "ones"))
    if name == "constant" and isinstance(config.get("value"), float | int):
        return Constant(float(config["value"]))
    if name == "randomuniform":
        return Uniform(float(config["minval"]), float(config["maxval"]))
    if name == "randomnormal":
        return Normal(float(config["mean"]), float(config["stddev"]))
    expected = "an initializer of ones, zeros, one constant, or uniform or normal numbers"
    raise TypeError(f"{place}: expected {expected}, got {shown(initializer)}")
