"""Raw features: one definition, ``features.json``, that training and serving share.

``definition`` reads the file. ``columns`` converts a caller's values to columns of the definition's types. ``reader``
passes the columns to one native call, ``kernels/host/features/transform.hpp``, which returns a model's keys and dense
numbers.
"""

from serving.features.changes import changes
from serving.features.columns import (
    MISSING_WORDS,
    Column,
    TensorColumns,
    Texts,
    column_of,
    joined_texts,
    missing_column,
    places_of,
    rows_of,
    spread_columns,
)
from serving.features.definition import FEATURES_FILE, FeatureConfig, FeatureDefinition, read_definition
from serving.features.frames import (
    PANDAS_INDEX,
    array_of,
    arrays_of_frame,
    arrow_type,
    columns_of_arrays,
    columns_of_frame,
    is_frame,
    is_list_type,
)
from serving.features.keras_archive import read_features
from serving.features.opening import definition_of_names, open_features, slots_of, slots_of_graph
from serving.features.reader import FeatureReader, Transformed
from serving.features.slots import SlotOfTable, is_spread
from serving.features.vocabulary import key_count, vocabulary_values
from serving.features.writing import triton_inputs, triton_tensors, write_definition

__all__ = [
    "FEATURES_FILE",
    "MISSING_WORDS",
    "PANDAS_INDEX",
    "Column",
    "FeatureConfig",
    "FeatureDefinition",
    "FeatureReader",
    "SlotOfTable",
    "TensorColumns",
    "Texts",
    "Transformed",
    "array_of",
    "arrays_of_frame",
    "arrow_type",
    "changes",
    "column_of",
    "columns_of_arrays",
    "columns_of_frame",
    "definition_of_names",
    "is_frame",
    "is_list_type",
    "is_spread",
    "joined_texts",
    "key_count",
    "missing_column",
    "open_features",
    "places_of",
    "read_definition",
    "read_features",
    "rows_of",
    "slots_of",
    "slots_of_graph",
    "spread_columns",
    "triton_inputs",
    "triton_tensors",
    "vocabulary_values",
    "write_definition",
]
