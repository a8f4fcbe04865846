"""The feature of a column, or why it is left out."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.features import MISSING_WORDS, PANDAS_INDEX, is_list_type
from serving.model.names import is_taken
from serving.model.strict_json import LARGEST_FLOAT32
from training.data.csv_faults import NULLS
from training.model.losses import are_apart
from training.proposal.document import Proposal

#: A column with more values is hashed; a column with fewer values has a vocabulary.
_MOST_VALUES = 1000
#: Integers with at most this many values are categories.
FEW_INTEGERS = 20
#: Whole numbers up to a larger one may be ids, however few there are.
_LEAST_OF_IDS = 1000
#: Buckets for each value of a hashed column: about one value in six then shares its bucket.
_BUCKETS_PER_VALUE = 5
_LEAST_BUCKETS = 1000
_LONG_LIST = 0.99  # of the lists are kept whole
_SKEWED = 20.0  # times the median: numbers up to there are not spread evenly
#: What integers that are categories are called: the last word of ``user_id``, ``movieId``, ``ITEM`` or ``zip_code``.
_CATEGORIES = frozenset(
    {"id", "uid", "uuid", "guid", "idx", "key", "code", "hash", "sku", "asin", "isbn", "ean", "upc", "phone", "msisdn"}
)
#: The same after the name of a thing, as in ``customer_no``.
_NUMBERS = frozenset({"no", "nr", "number"})
#: The same, and how words such as ``userid`` begin.
_THINGS = re.compile(
    "user|customer|client|visitor|member|account|session|device|item|movie|film|product|book|song|track|artist|album"
    "|video|article|ad|advertiser|campaign|creative|banner|site|page|app|category|brand|shop|store|seller|merchant"
    "|city|region|country|zip|zipcode|postcode|genre|occupation|gender|order|query|event|cookie|post|state"
)
_WORDS = re.compile(r"[^\W\d_]+")
_BETWEEN_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
#: How a word of the names of times ends.
_OF_TIMES = re.compile(r".*(time|timestamp|date)|ts|dt|at|epoch")
#: Days such as 20260131 of the years 1990 to 2100; their seconds since 1970, and thousands and millions of them.
_TIMES = [
    (19_900_101, 21_000_101),
    *((631_152_000 * unit, 4_102_444_800 * unit) for unit in (1, 1000, 10**6, 10**9)),
]
_LONG_ID = r"^-?\d{19,}$"  # more digits than an integer of 64 bits has
_LEADING_ZERO = r"^-?0\d"
#: Numbers as ``$1,234.50``, ``12 %``, ``12,5`` or ``12.5``, and what ids of digits do not have.
_NUMBER_TEXT = r"^[-+]?[$€£¥]?\s?[-+]?(\d+|\d{1,3}(,\d{3})+|\d{1,3}(\.\d{3})+)([.,]\d+)?\s?[%$€£¥]?$"
_MARKS = "[%$€£¥.,]"
_DATE_TEXT = r"^(\d{1,2}[/.]\d{1,2}[/.]\d{2,4}($|\s)|\d{4}-\d{2}-\d{2}($|[T\s]))"
_SPACED = r"^\s|\s$"
_COMMA = ", "
_SEPARATORS, _CUT_RATIO, _CUT_SAMPLE = ("|", ";"), 0.05, 10_000
#: How Python and JSON write lists and objects as text, such as ``['a', 'b']``.
_LIST_TEXT, _LISTS = r"(?s)^\s*(\[.*\]|\(.*\)|\{.*\})\s*$", 0.9
_UNIQUE = "left out: each row has a value of its own, from which nothing can be learned"
_LIST_TEXTS = "left out: its values are lists as text; save the data as Parquet, or join the values of a list with |"
_NO_TIME = "left out: training times do not recur; derive a feature, such as the hour"


def proposed_column(pa: Any, name: str, array: Any) -> Proposal:
    """Propose a feature for a column."""
    values, lists = _values_of(pa, array)
    missing_ratio = array.null_count / len(array) if lists else 1 - len(values) / len(array)
    feature, why, distinct = None, _why_left_out(pa.types, name, values.type), 0
    if not why:
        distinct = int(pa.compute.count_distinct(values).as_py())
        feature, why = _feature_of(pa, name, values, distinct, is_list=bool(lists))
    if feature is not None and feature["kind"] == "hash" and distinct == len(values) and "list" not in feature | lists:
        feature, why = None, _UNIQUE
    if feature is not None:
        feature = {"name": name, **feature, **lists}
    kind = f"categories of {values.type}" if pa.types.is_dictionary(array.type) else str(array.type)
    return Proposal(name, kind, distinct, missing_ratio, feature, why)


def typed(pa: Any, texts: Any) -> Any:
    """Return a column of CSV as integers, numbers, booleans or times if each of its values is one."""
    known = pa.compute.if_else(pa.compute.is_in(texts, value_set=pa.array(NULLS)), None, texts)
    if known.null_count == len(known):
        return pa.nulls(len(texts))
    numbers = pa.compute.utf8_trim_whitespace(known)  # as features of numbers do
    if pa.compute.any(pa.compute.match_substring_regex(numbers, _LEADING_ZERO)).as_py():  # such as a zip code
        return texts
    for kind in (pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
        try:
            found = (known if kind == pa.bool_() else numbers).cast(kind)
        except pa.ArrowInvalid:
            continue
        if kind == pa.float64() and pa.compute.any(pa.compute.match_substring_regex(numbers, _LONG_ID)).as_py():
            return texts
        return found
    return texts


def is_text(types: Any, kind: Any) -> bool:
    """Whether a type of ``pyarrow.types`` is text."""
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _values_of(pa: Any, array: Any) -> tuple[Any, dict[str, Any]]:
    """Return the values of a column that are not missing, and the option of a list."""
    types, compute, lists = pa.types, pa.compute, {}
    if is_list_type(pa, array.type):
        lengths = _lengths_without_missing(pa, array)
        most = int(compute.quantile(lengths, _LONG_LIST, interpolation="higher")[0].as_py())
        lists = {"list": {"most": max(most, 1), "keep": "first"}}
        array = compute.list_flatten(array)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_float16(array.type):  # for which Arrow computes little
        array = array.cast(pa.float32())
    values = array.drop_null()
    if types.is_decimal(values.type):
        values = _numbers_of_decimals(pa, values)
    if types.is_floating(values.type):
        values = values.filter(compute.is_finite(values))
    if is_text(types, values.type):
        values = values.filter(compute.not_equal(values, ""))
    return values, lists


def _lengths_without_missing(pa: Any, lists: Any) -> Any:
    """Return how many values of each list are not missing, which is what the limit of a feature counts."""
    values, rows = pa.compute.list_flatten(lists), pa.compute.list_parent_indices(lists)
    is_there = values.is_valid()
    if is_text(pa.types, values.type):
        is_there = pa.compute.fill_null(pa.compute.not_equal(values, ""), False)
    elif pa.types.is_floating(values.type):
        is_there = pa.compute.fill_null(pa.compute.invert(pa.compute.is_nan(values.cast(pa.float64()))), False)
    return pa.array(np.bincount(rows.filter(is_there).to_numpy(), minlength=len(lists)))


def _numbers_of_decimals(pa: Any, values: Any) -> Any:
    """Return decimals as numbers, or as texts if they are whole and have more digits than an integer of 64 bits."""
    if values.type.scale > 0:
        return values.cast(pa.float64())
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid:
        return values.cast(pa.string())


def _why_left_out(types: Any, name: str, kind: Any) -> str:
    """Say why values of a type are no feature; empty if they may be one."""
    if name.startswith(PANDAS_INDEX) or (not name and types.is_integer(kind)):
        return "left out: the index of a pandas frame"
    if not name:
        return "left out: the column has no name"
    if is_taken(name):
        return "left out: the name is reserved in requests; rename the column"
    if types.is_timestamp(kind) or types.is_date(kind):
        return _NO_TIME
    if is_text(types, kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return ""
    return f"left out: a feature cannot be read from {kind}"


def _feature_of(pa: Any, name: str, values: Any, distinct: int, *, is_list: bool) -> tuple[dict[str, Any] | None, str]:
    """Return a feature without its name, and a remark; None and why a column is left out."""
    types, compute = pa.types, pa.compute
    if distinct < 2:
        return None, "left out: it has fewer than two values"
    if types.is_boolean(values.type):
        return {"kind": "identity", "type": "boolean", "size": 2}, ""
    if is_text(types, values.type):
        return _feature_of_texts(pa, values, distinct, is_list=is_list)
    lowest, highest = compute.min(values).as_py(), compute.max(values).as_py()
    is_integer = types.is_integer(values.type)
    is_whole = is_integer or compute.all(compute.equal(compute.floor(values), values)).as_py()
    largest = max(-lowest, highest)
    is_long = largest > 2**53
    words = _words_of(name)
    if any(map(_OF_TIMES.fullmatch, words)) and any(begin <= lowest and highest <= end for begin, end in _TIMES):
        return None, _NO_TIME
    if is_whole and is_long and not is_integer:
        return None, "left out: floats lose digits of whole numbers above 2^53; store ids as integers or text"
    if is_whole and (is_list or is_long or _is_category(words) or distinct <= FEW_INTEGERS):
        if highest >= 2**63:  # integer features have 64 bits with a sign
            return _category(compute, values.cast(pa.string()), distinct, "string"), ""
        remark = "" if is_integer else "whole numbers"
        return _category(compute, values.cast(pa.int64()), distinct, "integer"), remark
    if is_list:
        return None, "left out: a list of numbers is no category"
    if not -LARGEST_FLOAT32 <= lowest <= highest <= LARGEST_FLOAT32 or not are_apart(
        largest, compute.stddev(values).as_py()
    ):
        return None, "left out: float32 does not tell its numbers apart"
    remark = "if the numbers are ids, give it another kind, such as hash" * (is_whole and largest >= _LEAST_OF_IDS)
    return _number(compute, values.cast(pa.float64(), safe=False)), remark


def _feature_of_texts(pa: Any, values: Any, distinct: int, *, is_list: bool) -> tuple[dict[str, Any] | None, str]:
    """See ``_feature_of``."""
    compute = pa.compute
    some = values.slice(0, _CUT_SAMPLE)
    if compute.mean(compute.match_substring_regex(some, _LIST_TEXT)).as_py() > _LISTS:
        return None, _LIST_TEXTS
    if compute.mean(compute.match_substring_regex(some, _DATE_TEXT)).as_py() > _LISTS:
        return None, _NO_TIME
    parts = None if is_list else _parts_of(compute, values)
    if parts is None:
        return _category(compute, values, distinct, "string"), _remark_on(pa, some, is_list=is_list)
    separator, cut, most = parts
    category = _category(compute, cut, int(compute.count_distinct(cut).as_py()), "string")
    return {**category, "list": {"separator": separator, "most": most, "keep": "first"}}, ""


def _remark_on(pa: Any, texts: Any, *, is_list: bool) -> str:
    """Say that texts may be more than categories; empty if they are not."""
    compute = pa.compute
    is_number = compute.match_substring_regex(texts, _NUMBER_TEXT)
    has_mark = compute.match_substring_regex(texts, _MARKS)
    if compute.mean(is_number).as_py() > _LISTS and compute.mean(has_mark).as_py() > _CUT_RATIO:
        return f"texts such as {texts.filter(has_mark)[0].as_py()!r}; if they are numbers, store plain numbers"
    parts = compute.list_flatten(compute.split_pattern(texts, _COMMA))
    if not is_list and 2 * compute.count_distinct(parts).as_py() <= compute.count_distinct(texts).as_py():
        return "if the texts are lists, join their values with | instead of ', '"
    spaced = texts.filter(compute.match_substring_regex(texts, _SPACED))
    if len(spaced):
        return f"the space at the start or end of texts such as {spaced[0].as_py()!r} counts"
    words = texts.filter(compute.is_in(texts, value_set=pa.array(MISSING_WORDS, texts.type)))
    return f"{words[0].as_py()!r} is a text, but pandas.read_csv reads it as missing" if len(words) else ""


def _words_of(name: str) -> list[str]:
    """Return the words of ``user_id``, ``userId`` or ``USER ID``, in small letters."""
    return _WORDS.findall(_BETWEEN_WORDS.sub(" ", name).lower())


def _is_category(words: Sequence[str]) -> bool:
    """Whether integers are categories by the last word of their name."""
    if len(words) > 1 and words[-1] in _NUMBERS:
        words = words[:-1]
    last = words[-1] if words else ""
    return last in _CATEGORIES or _THINGS.fullmatch(last.removesuffix("id")) is not None


def _parts_of(compute: Any, values: Any) -> tuple[str, Any, int] | None:
    """Return the separator of texts such as ``Action|Comedy``, their parts, and the most parts of one.

    None: the texts are whole.
    """
    some = values.slice(0, _CUT_SAMPLE)
    for separator in _SEPARATORS:
        if compute.mean(compute.match_substring(some, separator)).as_py() < _CUT_RATIO:
            continue
        lists = compute.split_pattern(values, separator)
        parts = compute.list_flatten(lists)
        if compute.count_distinct(parts).as_py() < compute.count_distinct(values).as_py():
            lengths = compute.list_value_length(lists)
            most = int(compute.quantile(lengths, _LONG_LIST, interpolation="higher")[0].as_py())
            return separator, parts.filter(compute.not_equal(parts, "")), most
    return None


def _category(compute: Any, values: Any, distinct: int, value_type: str) -> dict[str, Any]:
    """Propose a vocabulary for few values, in the order of their frequency, and a hash for many."""
    given = {} if value_type == "string" else {"type": value_type}
    counts = compute.value_counts(values)
    ordered = sorted(counts.to_pylist(), key=lambda one: (-one["counts"], str(one["values"])))
    known = [entry["values"] for entry in ordered]
    if distinct <= _MOST_VALUES:
        return {"kind": "vocabulary", **given, "values": known}
    buckets = max(_LEAST_BUCKETS, 2 ** math.ceil(math.log2(_BUCKETS_PER_VALUE * distinct)))
    return {"kind": "hash", **given, "buckets": buckets}


def _number(compute: Any, values: Any) -> dict[str, Any]:
    """Propose a standardised number; of numbers that are not negative and far apart, their logarithm."""
    lowest, highest = compute.min(values).as_py(), compute.max(values).as_py()
    middle = compute.quantile(values, 0.5)[0].as_py()
    feature: dict[str, Any] = {"kind": "dense", "clip": [lowest, highest], "missing": middle}
    if lowest >= 0 and highest > _SKEWED * max(middle, 1.0):
        feature["log1p"] = True
        values = compute.log1p(values)
    mean, std = compute.mean(values).as_py(), compute.stddev(values).as_py()
    return {**feature, "mean": _rounded(mean), "std": _rounded(std) if std > 0 else 1.0}


def _rounded(number: float) -> float:
    """Return a number with 6 digits, which is exact enough for a scale and can be read."""
    return float(f"{number:.6g}")
