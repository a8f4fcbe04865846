"""Convert a caller's values to columns of the features' types.

A column of the native transform is a tuple, see ``kernels/host/bindings/features_bindings.cpp``. Missing values are
null, NaN, an absent feature, the empty text of any feature, and ``MISSING_WORDS`` of features that are not strings.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal, InvalidOperation
from functools import cached_property, partial
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kernels.host import Tensors, cut_texts, floats_of, integers_of
from serving.errors import FeatureValueError, RequestError
from serving.features.definition import FeatureConfig

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
#: Texts that stand for a missing number or boolean: the words that pandas reads as missing. In a string they are text.
MISSING_WORDS = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
)
#: A column of the native transform.
Column = tuple[Any, ...]
#: Whose values are being read, and where those of each sample begin, for messages.
Place = tuple[FeatureConfig, Ints | None]

_MOST_SPREAD = 1 << 24
_FLOAT32 = np.dtype(np.float32)  # faster to compare than the type
_LARGEST_EXACT = 2.0**53 - 1  # 2^53 may be another integer, rounded
_LARGEST_INTEGER = np.uint64(2**63 - 1)
_WORDS = frozenset(word.encode() for word in MISSING_WORDS)
_LONGEST_WORD = max(map(len, _WORDS))
_TEXTS_OF_BOOLEANS = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0}
#: ISO 8601, as pandas, Spark, pyarrow and JSON write it: a date, perhaps a time, perhaps a zone.
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)(?:Z| ?UTC|([+-])(\d\d):?(\d\d))?)?")
_UNITS = {"s": "s", "ms": "ms", "us": "us", "ns": "ns", "day": "D"}


class Texts(NamedTuple):
    """V texts in UTF-8.

    Attributes:
        bytes: uint8[T], the bytes that have them.
        begins: int64[V], where each begins.
        ends: int64[V], where each ends.
        valid: bool[V], which are not missing; None: all.
    """

    bytes: NDArray[np.uint8]
    begins: Ints
    ends: Ints
    valid: Flags | None = None


class TensorColumns(Sequence[Column]):
    """Columns that native code reads from the tensors of a request. They become arrays when they are asked for.

    Attributes:
        tensors: the tensors.
        native: the columns in the native form.
    """

    def __init__(self, tensors: Tensors, native: Sequence[Column], arrays: Callable[[], Sequence[Column]]) -> None:
        """Take columns, and what returns them as arrays."""
        self.tensors, self.native, self._arrays = tensors, native, arrays

    @cached_property
    def _columns(self) -> Sequence[Column]:
        return self._arrays()

    @overload
    def __getitem__(self, place: int) -> Column: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Column]: ...
    def __getitem__(self, place: int | slice) -> Column | Sequence[Column]:
        """Return a column of arrays, or several."""
        return self._columns[place]

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self.native)


def column_of(
    feature: FeatureConfig, values: Any, samples: int, splits: Ints | None = None, valid: Flags | None = None
) -> Column:
    """Return the values of a feature as a column of its type.

    Args:
        feature: the feature.
        values: ``Texts``, an array, what NumPy makes an array of, or a list with a value or, for a list feature, a
            sequence of values for each sample; or with ``splits`` the values of all samples, one after another. None
            stands for a missing value.
        samples: B.
        splits: int64[B + 1], where the values of each sample begin.
        valid: bool[V], which values of an array are not missing; None: all.

    Raises:
        FeatureValueError: a value is of another type, or there are not B samples.
    """
    if hasattr(values, "__array__"):  # such as a series or a tensor
        values = np.asarray(values)
    given = _count(feature.name, values) if splits is None else len(splits) - 1
    if given != samples:
        raise FeatureValueError(feature.name, None, f"expected {samples} samples, got {given}")
    if not feature.is_list and (splits is not None or getattr(values, "ndim", 1) > 1):
        raise FeatureValueError(feature.name, None, "expected one value for each sample, got lists")
    if splits is None and feature.is_list:
        values, splits = _cut(feature, values) if isinstance(values, Texts) else _flattened(feature, values)
    if not (given if splits is None else splits[-1]):
        values = []  # an empty array has no type to check
    *typed, found = _TYPED[feature.value_type]((feature, splits), values)
    return (*typed, found if valid is None else valid if found is None else valid & found, splits)


def count_samples(given: Mapping[str, Any]) -> int:
    """Return how many samples named values have: as many as the first name has values.

    Raises:
        FeatureValueError: it has one value in place of a list.
    """
    return next((_count(name, values) for name, values in given.items()), 0)


def missing_column(feature: FeatureConfig, samples: int) -> Column:
    """Return the column of a feature that is absent."""
    none = np.zeros(samples, np.bool_)
    if feature.value_type == "string":
        zeros = np.zeros(samples, np.int64)
        return ("text", np.empty(0, np.uint8), zeros, zeros, none, None)
    if feature.value_type == "float":
        return ("float", np.zeros(samples, np.float32), none, None)
    return ("integer", np.zeros(samples, np.int64), none, None)


def rows_of(column: Column) -> int:
    """Return how many samples a column has."""
    return len(column[-3]) if column[-1] is None else len(column[-1]) - 1


def shown_value(column: Column, at: int) -> str:
    """Return the end of a message about a value of a column; empty if the value is missing."""
    form, *values, valid, _ = column
    if valid is not None and not valid[at]:
        return ""
    if form != "text":
        return f", got {_shown(values[0][at])}"
    content, begins, ends = values
    text = content[begins[at] : ends[at]].tobytes()
    try:
        return f", got {_shown(text.decode())}" if text else ""
    except UnicodeDecodeError:
        return f", got {_shown(text)}"


def spread(column: Column, rows: NDArray[np.int32]) -> Column:
    """Return a column in which each sample has the values of one of the rows of ``column``."""
    form, *values, valid, splits = column
    places: NDArray[Any] = rows
    if splits is not None:
        places, splits = places_of(splits, rows)
    shared = values[:-2]  # the bytes of texts
    of_value = [each[places] for each in values[len(shared) :]]
    return (form, *shared, *of_value, None if valid is None else valid[places], splits)


def spread_columns(columns: Sequence[Column], rows: Mapping[int, NDArray[np.int32]] | None) -> Sequence[Column]:
    """Return columns with a row for each sample; ``rows`` are those of the samples, by the rows of a column."""
    return [spread(column, rows[size]) if rows and (size := rows_of(column)) in rows else column for column in columns]


def places_of(splits: NDArray[Any], rows: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Return the places of the values of rows, one row after another, and where those of each begin.

    Args:
        splits: [R + 1], where the values of each row begin.
        rows: the rows; a row may be there several times.

    Raises:
        RequestError: there are too many values.
    """
    lengths = np.diff(splits)[rows]
    begins = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=begins[1:])
    if begins[-1] > _MOST_SPREAD:
        reason = f"repeated for each sample, one feature or table has {begins[-1]:,} values"
        raise RequestError(f"{reason}; expected at most {_MOST_SPREAD:,}")
    return np.repeat(splits[rows] - begins[:-1], lengths) + np.arange(begins[-1]), begins


def joined_texts(texts: Sequence[bytes]) -> Texts:
    """Return texts in UTF-8 as one array of bytes."""
    ends = np.fromiter(accumulate(map(len, texts)), np.int64, len(texts))
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1]
    return Texts(np.frombuffer(b"".join(texts), np.uint8), begins, ends)


_EXPECTED = {
    "string": "a string or an integer",
    "integer": "an integer",
    "float": "a number",
    "boolean": "true or false",
}


def _count(name: str, values: Any) -> int:
    """Return the number of values."""
    if isinstance(values, Texts):
        return len(values.begins)
    if not isinstance(values, list) and not _is_list(values):
        raise FeatureValueError(name, None, f"expected a list with a value for each sample, got {_shown(values)}")
    return len(values)


def _is_list(value: Any) -> bool:
    """Whether a value is a sequence or an array of values; a text is one value."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


def _shown(value: Any) -> str:
    """Return a value for a message."""
    if isinstance(value, np.datetime64):
        return str(value)
    shown = repr(value.item() if isinstance(value, np.generic) else value)
    return shown if len(shown) <= 64 else f"{shown[:61]}..."


def _error(place: Place, at: int, value: Any) -> FeatureValueError:
    """Return an error about the value at a place of a column."""
    feature, splits = place
    reason = f"expected {_EXPECTED[feature.value_type]}, got {_shown(value)}{_why_no_integer(feature, value)}"
    if feature.value_type == "string" and isinstance(value, float) and value.is_integer():
        reason += '; a feature of "type": "integer" takes it'
    if splits is None:
        return FeatureValueError(feature.name, at, reason)
    sample = int(np.searchsorted(splits, at, side="right")) - 1
    return FeatureValueError(feature.name, sample, f"value {at - int(splits[sample])}: {reason}")


def _why_no_integer(feature: FeatureConfig, value: Any) -> str:
    """Return the end of a message about a whole number that is no integer of 64 bits; empty for any other value."""
    try:
        number = None if feature.value_type != "integer" or isinstance(value, bool | np.bool_) else Decimal(str(value))
    except InvalidOperation:
        return ""
    if number is None or not number.is_finite() or number != number.to_integral_value():
        return ""
    if not -(2**63) <= number < 2**63:
        return "; integers go from -2^63 to 2^63 - 1"
    return "; from 2^53 on, a float may be another integer, rounded: send an integer or its digits"


def _cut(feature: FeatureConfig, texts: Texts) -> tuple[Texts, Ints]:
    """Cut the text of each sample into the values of a list, and return where the values of each sample begin."""
    if feature.list is None or feature.list.separator is None:
        raise FeatureValueError(feature.name, None, "expected lists; text needs the list's separator")
    begins, ends, splits = cut_texts(*texts, feature.list.separator)
    return Texts(texts.bytes, begins, ends), splits


def _flattened(feature: FeatureConfig, values: Any) -> tuple[Any, Ints]:
    """Return the values of all samples, and where those of each sample begin."""
    if isinstance(values, np.ndarray) and (values.ndim == 2 or values.dtype.kind in "iuf"):
        return values.reshape(-1), np.arange(len(values) + 1, dtype=np.int64) * (values.size // max(len(values), 1))
    lists: list[Any] = []
    separator = None if feature.list is None else feature.list.separator
    for sample, given in enumerate(values):
        if _is_missing(given):
            given = ()
        elif isinstance(given, str) and separator is not None:
            given = given.split(separator)
        elif isinstance(given, int | float | np.number | Decimal):
            given = (given,)  # text would need the separator
        elif not _is_list(given):
            raise FeatureValueError(feature.name, sample, f"expected a list, got {_shown(given)}")
        lists.append(given)
    splits = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(given) for given in lists], out=splits[1:])
    return list(chain.from_iterable(lists)), splits


def _items(place: Place, values: Any, kinds: str = "OUST") -> Any:
    """Return values as Python's values. The dtype of an array must be of one of the kinds."""
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype.kind not in kinds:
        raise _error(place, 0, values[0])
    return values.tolist()


def _strings(place: Place, values: Any) -> Column:
    if isinstance(values, Texts):
        return "text", *values
    kind = values.dtype.kind if isinstance(values, np.ndarray) else ""
    if kind == "i" or (kind == "u" and (values <= _LARGEST_INTEGER).all()):
        return "integer", *_whole(place, values)
    items = _items(place, values, "OUSTuf")
    valid = np.ones(len(items), np.bool_)
    texts = []
    for at, value in enumerate(items):
        if isinstance(value, str):
            texts.append(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes):
            texts.append(value)
        elif isinstance(value, int | np.integer | Decimal) and not isinstance(value, bool):
            texts.append(str(value).encode())
        elif _is_missing(value):
            valid[at] = False
            texts.append(b"")
        else:
            raise _error(place, at, value)
    return "text", *joined_texts(texts)[:3], valid


def _integers(place: Place, values: Any) -> Column:
    unit = place[0].unit
    if isinstance(values, Texts) and unit is not None and isinstance(integers_of(*values), int):
        values = _decoded(values)  # some are times
    if isinstance(values, Texts):
        return "integer", *_parsed(place, integers_of, values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iufM":
        return "integer", *_whole(place, values)
    read = _integer if unit is None else partial(_integer_or_time, unit)
    return "integer", *_numbers(place, _items(place, values), np.int64, read)


def _floats(place: Place, values: Any) -> Column:
    if isinstance(values, Texts):
        return "float", *_parsed(place, floats_of, values)
    if isinstance(values, np.ndarray) and values.dtype == _FLOAT32:  # without the context below, which takes longer
        return "float", np.ascontiguousarray(values), None
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        if values.dtype.kind != "f":
            values = values.astype(np.float64)  # as Python's integers and text, which are rounded twice
        with np.errstate(over="ignore"):
            return "float", np.ascontiguousarray(values, np.float32), None
    return "float", *_numbers(place, _items(place, values), np.float32, _float)


def _booleans(place: Place, values: Any) -> Column:
    if isinstance(values, Texts):
        values = _decoded(values)
    if isinstance(values, np.ndarray) and values.dtype.kind == "b":
        return "integer", np.ascontiguousarray(values, np.int64), None
    return "integer", *_numbers(place, _items(place, values, "OUSTiuf"), np.int64, _boolean)


_TYPED = {"string": _strings, "integer": _integers, "float": _floats, "boolean": _booleans}


def _decoded(values: Texts) -> list[str | None]:
    """Return texts as Python's values."""
    content, valid = values.bytes.tobytes(), repeat(True) if values.valid is None else values.valid
    places = zip(values.begins, values.ends, valid, strict=False)
    return [content[begin:end].decode("utf-8", "replace") if there else None for begin, end, there in places]


def _parsed(place: Place, parse: Any, values: Texts) -> tuple[Any, Flags]:
    """Return the numbers that texts stand for, and which are not missing."""
    found = parse(*values)
    if isinstance(found, int):
        values = _without_words(values)
        found = parse(*values)
    if isinstance(found, int):
        text = values.bytes[values.begins[found] : values.ends[found]].tobytes().decode("utf-8", "replace")
        raise _error(place, found, text)
    valid = values.ends > values.begins
    return found, valid if values.valid is None else valid & values.valid


def _without_words(values: Texts) -> Texts:
    """Return texts in which ``MISSING_WORDS`` are empty."""
    content, ends = values.bytes.tobytes(), values.ends.copy()
    for at in np.flatnonzero(ends - values.begins <= _LONGEST_WORD).tolist():
        if content[values.begins[at] : ends[at]] in _WORDS:
            ends[at] = values.begins[at]
    return values._replace(ends=ends)


def _whole(place: Place, values: NDArray[Any]) -> tuple[Ints, Flags | None]:
    """Return the integers in an array of numbers or of times, and which are not missing."""
    if values.dtype.kind == "M":
        unit = place[0].unit
        if unit is None:
            raise _error(place, 0, values[0])
        whole, valid = values.astype(f"datetime64[{_UNITS[unit]}]"), ~np.isnat(values)
        fits = (whole.astype("datetime64[D]") == values.astype("datetime64[D]")) | ~valid
        if not fits.all():  # NumPy lets a time overflow, such as the year 9999 in nanoseconds
            raise _error(place, int(np.argmin(fits)), values[np.argmin(fits)])
        return np.ascontiguousarray(whole.view(np.int64)), valid
    if values.dtype.kind == "i":
        return np.ascontiguousarray(values, np.int64), None
    if values.dtype.kind == "u":
        fits = values <= _LARGEST_INTEGER
        if not fits.all():
            raise _error(place, int(np.argmin(fits)), values[np.argmin(fits)])
        return np.ascontiguousarray(values, np.int64), None
    valid = ~np.isnan(values)
    is_whole = (np.floor(values) == values) & (np.abs(values) <= _LARGEST_EXACT) | ~valid
    if not is_whole.all():
        at = int(np.argmin(is_whole))
        raise _error(place, at, values[at])
    return np.where(valid, values, 0).astype(np.int64), valid


def _numbers(place: Place, items: Any, dtype: Any, read: Any) -> tuple[Any, Flags]:
    """Read Python's values one by one."""
    numbers, valid = np.zeros(len(items), dtype), np.ones(len(items), np.bool_)
    with np.errstate(over="ignore"):
        for at, value in enumerate(items):
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            elif isinstance(value, Decimal):
                value = str(value)
            if _is_missing(value) or (isinstance(value, str) and value in MISSING_WORDS):
                valid[at] = False
                continue
            try:
                numbers[at] = read(value)
            except (TypeError, ValueError, OverflowError):
                raise _error(place, at, value) from None
    return numbers, valid


def _is_missing(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return not value
    if isinstance(value, float | np.floating | date | np.datetime64):
        return bool(value != value)
    return value is None or type(value).__name__ == "NAType"  # of pandas


def _integer(value: Any) -> int:
    if isinstance(value, str):
        found = integers_of(*joined_texts([value.encode()]))
        if isinstance(found, int):
            raise ValueError
        return int(found[0])
    if isinstance(value, bool | np.bool_) or int(value) != value:
        raise ValueError
    if isinstance(value, float) and abs(value) > _LARGEST_EXACT:
        raise ValueError
    return int(value)


def _integer_or_time(unit: str, value: Any) -> int:
    """Return an integer, or the whole units since 1970 of a time. A time without a zone is in UTC."""
    if isinstance(value, date | np.datetime64):
        value = str(value)
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return _integer(value)
    time, sign, hours, minutes = np.datetime64(f"{found[1]}T{found[2] or '00:00'}"), *found.groups()[2:]
    if sign is not None:
        ahead = np.timedelta64(60 * int(hours) + int(minutes), "m")
        time = time - ahead if sign == "+" else time + ahead
    whole = time.astype(f"datetime64[{_UNITS[unit]}]")
    if whole.astype("datetime64[D]") != time.astype("datetime64[D]"):
        raise OverflowError
    return int(whole.astype(np.int64))


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str | np.number):
        raise TypeError
    if isinstance(value, str):
        found = floats_of(*joined_texts([value.encode()]))
        if isinstance(found, int):
            raise ValueError
        return float(found[0])
    return float(value)


def _boolean(value: Any) -> int:
    number = _TEXTS_OF_BOOLEANS.get(value.lower()) if isinstance(value, str) else value
    if number not in (0, 1):
        raise ValueError
    return int(number)
