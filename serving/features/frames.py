"""Data frames and Arrow tables as columns of features. It needs pyarrow."""

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from serving.errors import FeatureValueError, MissingExtraError, RequestError, did_you_mean
from serving.features.columns import Column, Texts, column_of, missing_column
from serving.features.definition import FeatureConfig
from serving.features.reader import FeatureReader

#: How the name of a column begins that has the index of a pandas frame, such as one of which rows were taken.
PANDAS_INDEX = "__index_level_"


def is_frame(given: Any) -> bool:
    """Whether an object is a table that Arrow can read, such as one of pandas, Polars or pyarrow."""
    return hasattr(given, "__arrow_c_stream__")


def is_list_type(pa: Any, kind: Any) -> bool:
    """Whether an Arrow type is one of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def columns_of_frame(reader: FeatureReader, frame: Any) -> tuple[list[Column], int]:
    """Return the columns of a frame's features, and the number of its rows.

    Raises:
        RequestError: Arrow cannot read the frame.
        FeatureValueError: see ``FeatureReader.columns``.
        MissingExtraError: pyarrow is not installed.
    """
    table = _table_of(frame)
    names = [name for name in table.column_names if not name.startswith(PANDAS_INDEX)]
    return columns_of_arrays(reader, _arrays_of(table, names), table.num_rows), table.num_rows


def arrays_of_frame(frame: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the Arrow arrays of these columns of a frame.

    Raises:
        RequestError: Arrow cannot read the frame.
        FeatureValueError: a column is missing or occurs twice.
        MissingExtraError: pyarrow is not installed.
    """
    table = _table_of(frame)
    for name in names:
        if name not in table.column_names:
            raise FeatureValueError(name, None, f"is not in the frame{did_you_mean(name, table.column_names)}")
    return _arrays_of(table, names)


def _table_of(frame: Any) -> Any:
    pa = _import_pyarrow()
    try:
        return frame if isinstance(frame, pa.Table) else pa.table(frame)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as err:  # such as an integer of more than 64 bits
        reason = "; ".join(map(str, err.args))
        raise RequestError(f"Arrow cannot read the {type(frame).__name__}: {reason}") from err


def _arrays_of(table: Any, names: Sequence[str]) -> dict[str, Any]:
    for name, count in Counter(table.column_names).items():
        if count > 1 and name in names:
            raise FeatureValueError(name, None, f"is in the frame {count} times")
    return {name: table.column(name).combine_chunks() for name in names}


def columns_of_arrays(reader: FeatureReader, arrays: Mapping[str, Any], samples: int) -> list[Column]:
    """Return the columns of Arrow arrays by name; see ``FeatureReader.columns``."""
    reader.check_names(arrays)
    found = (feature for feature in reader.definition.columns if feature.name in arrays)
    return reader.ordered(
        {feature.name: _column_of_array(feature, arrays[feature.name], samples) for feature in found}, samples
    )


def arrow_type(feature: FeatureConfig) -> Any:
    """Return the Arrow type of the arrays that ``array_of`` makes."""
    pa = _import_pyarrow()
    of_value = {"string": pa.string(), "integer": pa.int64(), "float": pa.float32(), "boolean": pa.bool_()}
    kind = of_value[feature.value_type]
    return pa.list_(kind) if feature.is_list else kind


def array_of(feature: FeatureConfig, columns: Sequence[Column]) -> Any:
    """Return the values of columns, one after another, as one Arrow array.

    ``columns_of_arrays`` makes the same columns of its parts.
    """
    pa, kind = _import_pyarrow(), arrow_type(feature)
    if len({(column[0], column[-1] is None) for column in columns}) > 1:
        return pa.concat_arrays([array_of(feature, [column]) for column in columns])
    form, *values, valid, splits = columns[0] if len(columns) == 1 else _joined(columns)
    if feature.is_list and splits is None:  # an absent feature
        return pa.nulls(len(valid), kind)
    mask = None if valid is None else ~valid
    array = _array_of_texts(pa, values, mask) if form == "text" else pa.array(values[0], mask=mask)
    array = array.cast(kind.value_type if feature.is_list else kind)
    return array if splits is None else pa.ListArray.from_arrays(splits.astype(np.int32), array)


def _joined(columns: Sequence[Column]) -> Column:
    """Return columns of the same form as one."""
    form, splits = columns[0][0], columns[0][-1]
    *parts, of_valid, of_splits = list(zip(*columns, strict=True))[1:]
    counts = [len(part) for part in parts[-1]]
    values = [np.concatenate(part) for part in parts]
    if form == "text":
        before = np.repeat(_begins([len(content) for content in parts[0]]), counts)
        values[1:] = [places + before for places in values[1:]]
    valid = None
    if any(mask is not None for mask in of_valid):
        pairs = zip(of_valid, counts, strict=True)
        valid = np.concatenate([np.ones(count, np.bool_) if one is None else one for one, count in pairs])
    if splits is not None:
        before = np.repeat(_begins(counts), [len(one) - 1 for one in of_splits])
        splits = np.concatenate([[0], np.concatenate([one[1:] for one in of_splits]) + before])
    return (form, *values, valid, splits)


def _begins(counts: Sequence[int]) -> Any:
    """Return where each of some parts begins."""
    return np.cumsum([0, *counts[:-1]], dtype=np.int64)


def _array_of_texts(pa: Any, texts: Sequence[Any], mask: Any) -> Any:
    """Return texts. With what is between them, they are an array of which every second element is taken."""
    content, begins, ends = texts
    places = np.stack([begins, ends], axis=1).reshape(-1)
    buffers = [None, pa.py_buffer(places), pa.py_buffer(np.ascontiguousarray(content))]
    both = pa.Array.from_buffers(pa.large_binary(), max(places.size - 1, 0), buffers)
    return both.take(pa.array(np.arange(0, places.size, 2), mask=mask))


def _import_pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as err:
        raise MissingExtraError("pyarrow", "parquet", "reading data frames") from err


def _decoded(pa: Any, array: Any) -> Any:
    """Return the values of categoricals. Arrow takes nothing from string views, which Polars has."""
    values = array.dictionary
    if pa.types.is_string_view(values.type):
        values = values.cast(pa.large_string())
    return values.take(array.indices)


def _column_of_array(feature: FeatureConfig, array: Any, samples: int) -> Column:
    pa = _import_pyarrow()
    if pa.types.is_dictionary(array.type):
        array = _decoded(pa, array)
    if pa.types.is_null(array.type):
        return missing_column(feature, samples)
    splits = None
    if is_list_type(pa, array.type):
        compute = import_module("pyarrow.compute")
        lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        splits = np.zeros(samples + 1, np.int64)
        np.cumsum(lengths, out=splits[1:])
        array = compute.list_flatten(array)
        if pa.types.is_dictionary(array.type):
            array = _decoded(pa, array)
    if splits is not None and pa.types.is_null(array.type):
        array = array.cast(pa.string())
    values, valid = _values_of(pa, feature, array)
    return column_of(feature, values, samples, splits, valid)


def _values_of(pa: Any, feature: FeatureConfig, array: Any) -> tuple[Any, Any]:
    """Return the values of an array without lists, and which of them are not missing."""
    kind, types = array.type, pa.types
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if types.is_decimal(kind):
        array = array.cast(pa.string())
        kind = array.type
    texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    if any(getattr(types, f"is_{text}")(kind) for text in texts):
        return _texts_of(pa, array, valid), None
    if types.is_boolean(kind):
        return array.fill_null(False).to_numpy(zero_copy_only=False), valid
    if types.is_integer(kind):
        return array.fill_null(0).to_numpy(), valid
    if types.is_floating(kind):
        if types.is_float16(kind):
            array = array.cast(pa.float32())
        return array.fill_null(float("nan")).to_numpy(), None
    if types.is_timestamp(kind) or types.is_date(kind):
        return array.to_numpy(zero_copy_only=False), None
    raise FeatureValueError(feature.name, None, f"expected a column of values, got one of {kind}")


def _texts_of(pa: Any, array: Any, valid: Any) -> Texts:
    array = array.cast(pa.large_binary())
    if not len(array):
        return Texts(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))
    _, offsets, data = array.buffers()
    places = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return Texts(content, places[:-1], places[1:], valid)
