"""The request form for people: one JSON object per sample, with one list of keys per slot.

``{"samples": [{"dense": [0.5, 1.25], "keys": [[17], [4, 9], []]}]}`` has one sample for a model with two dense features
and three slots. A model with a ``features.json`` also takes raw features by name: ``{"samples": [{"user_id": "u17",
"price": 9.5}]}``. What all samples share may come once: ``{"context": {"user_id": "u17"}, "candidates": [{"price":
9.5}]}``. ``"outputs": ["click"]`` names the outputs to answer. ``"top_k": 10`` asks for the 10 best candidates alone.

Slots are in graph order, table by table. Keys may also be given by the name of their table: ``"keys": {"user": [17],
"item": [[4, 9], []]}``. A table of one slot has a list of keys, and a table of several slots has one list per slot.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import numpy as np
import orjson

from serving.batch import Batch
from serving.candidates import ID, read_document
from serving.config import ModelConfig, TableConfig
from serving.errors import FeatureValueError, RequestError, did_you_mean
from serving.features import FeatureReader, is_spread, slots_of
from serving.model.names import TOP_INDEX, TOP_SCORE
from serving.option_values import MAX_CANDIDATES
from serving.outputs import Asked, asking
from serving.protocol.bounds import DEFAULT_BOUNDS, Bounds
from serving.protocol.document import checked, join, known_only, optional, parse_document, required
from serving.protocol.tensors import DTYPES, Array, array_from_numbers, json_kind, json_numbers
from serving.reading import check_request_keys, read_batch, read_columns

_OPTIONS = frozenset({"freshness", "outputs", "top_k", "top_output"})
_BODY_MEMBERS = _OPTIONS | {"samples", "context", "candidates"}
_SAMPLE_MEMBERS = frozenset({"dense", "keys"})
_KEYS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_KEYS_OF_SLOTS_SCHEMA: dict[str, Any] = {"type": "array", "items": _KEYS_SCHEMA}

_KEYED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["keys"],
    "additionalProperties": False,
    "properties": {
        "dense": {"type": "array", "items": {"type": "number"}, "description": "F dense features"},
        "keys": {
            "oneOf": [
                {**_KEYS_OF_SLOTS_SCHEMA, "description": "one list of keys per slot, slots in graph order"},
                {
                    "type": "object",
                    "additionalProperties": {"oneOf": [_KEYS_SCHEMA, _KEYS_OF_SLOTS_SCHEMA]},
                    "description": "by table name: a list of keys, or one list of keys per slot if the table has "
                    "several slots",
                },
            ],
        },
    },
}
_RAW_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "raw features by name, if the model has a features.json: a value, or a list of values",
    "additionalProperties": {"type": ["string", "number", "boolean", "null", "array"]},
}

#: JSON Schema and example of the body, shown by /docs.
SAMPLES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "oneOf": [{"required": ["samples"]}, {"required": ["context", "candidates"]}],
    "additionalProperties": False,
    "properties": {
        "samples": {
            "type": "array",
            "items": {"oneOf": [_KEYED_SCHEMA, _RAW_SCHEMA]},
        },
        "context": {**_RAW_SCHEMA, "description": "the raw features that all candidates share"},
        "candidates": {"type": "array", "items": _RAW_SCHEMA},
        "outputs": {
            "type": "array",
            "items": {"type": "string"},
            "description": "the outputs to answer, by name; see the model's metadata",
        },
        "top_k": {"type": "integer", "minimum": 1, "description": "answer this many of the best candidates"},
        "top_output": {
            "type": "string",
            "description": "the output that ranks candidates, if several have one number per sample",
        },
        "freshness": {"type": "boolean", "description": "true: the answer says how new the model's rows are"},
    },
    "example": {"samples": [{"dense": [0.5, 1.25], "keys": [[17], [4, 9], []]}]},
}

#: JSON Schema of the answer.
PREDICTIONS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "predictions": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}},
            "description": "L probabilities per sample; if the request names outputs, or the model has several, "
            "they are in outputs",
        },
        "outputs": {
            "type": "object",
            "additionalProperties": {"type": "array"},
            "description": "by output, a number per sample, or a list of numbers per sample if it has several columns",
        },
        "top": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"index": {"type": "integer"}, "score": {"type": "number"}, "id": {}},
            },
            "description": "with top_k, the best candidates, the best first: where each is in candidates, its score "
            "and its id, if it has an id",
        },
        "defaulted_keys": {
            "type": "integer",
            "description": "number of keys that no tier holds and that got the default value",
        },
        "model_version": {"type": "string"},
        "freshness": {
            "type": "object",
            "description": "if the request asks: newest_step, newest_time_ms, lag_messages and lag_ms; empty if no "
            "updates of the model are read",
        },
    },
    "example": {"predictions": [[0.731]], "defaulted_keys": 0, "model_version": "1"},
}


class SamplesRequest(NamedTuple):
    """A decoded body.

    Attributes:
        batch: the samples.
        outputs: the names of the outputs that it asks for; empty: it names none.
        wants_freshness: the answer says how new the rows are.
        ids: the ``id`` of each candidate, if one has it.
    """

    batch: Batch
    outputs: Sequence[str] = ()
    wants_freshness: bool = False
    ids: Sequence[Any] = ()


_EXAMPLES = {"string": "text", "integer": 0, "float": 0.5, "boolean": True}


def example_of(features: FeatureReader) -> dict[str, Any]:
    """Return a body with a sample that has every feature, for people."""
    sample: dict[str, Any] = {}
    for feature in features.definition.columns:
        value = _EXAMPLES[feature.value_type]
        # each value of a list may need a key
        count = feature.list.most if feature.list is not None and is_spread(feature) else 1
        sample[feature.name] = [value] * (count or 1) if feature.is_list else value
    return {"samples": [sample]}


def decode_samples(
    body: bytes,
    config: ModelConfig,
    bounds: Bounds = DEFAULT_BOUNDS,
    features_for: Callable[[Asked], FeatureReader | None] = lambda _: None,
    max_candidates: int = MAX_CANDIDATES,
) -> SamplesRequest:
    """Decode a body.

    Args:
        body: the document.
        config: the model.
        bounds: of the document.
        features_for: returns what reads the raw features of a request; see ``InferenceSession.features_for``.
        max_candidates: the most candidates.

    Raises:
        RequestError: anything is wrong with the document; the message starts with the JSON path.
    """
    document = parse_document(body, bounds)
    wants_freshness = optional(document, "freshness", bool, False, "")
    names: list[Any] = optional(document, "outputs", list, [], "")
    top_k = required(document, "top_k", int, "") if "top_k" in document else None
    asked = Asked(names, top_k, optional(document, "top_output", str, "", ""))
    batch = asking(read_samples(document, config, features_for(asked), max_candidates), config.outputs, asked)
    reader = features_for(asked)
    is_feature = reader is not None and ID in reader.names
    return SamplesRequest(batch, names, wants_freshness, _ids(document.get("candidates", ()), is_feature=is_feature))


def read_samples(
    document: dict[str, Any],
    config: ModelConfig,
    features: FeatureReader | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Batch:
    """Return the batch; see ``decode_samples``. ``document`` is the parsed body."""
    known_only(document, _BODY_MEMBERS, "")
    if "context" in document or "candidates" in document:
        if features is None:
            raise RequestError("context: the model's slots have no names, so each of the samples has its own keys")
        given = {name: value for name, value in document.items() if name not in _OPTIONS}
        return read_document(config, features, given, max_candidates)
    samples = required(document, "samples", list, "")
    if not samples:
        raise RequestError("samples: the list is empty")
    if len(samples) > config.max_batchsize:
        raise RequestError(f"samples: {len(samples):,} samples, but the model takes at most {config.max_batchsize:,}")
    if features is not None and not _has_keys(samples):
        return _read_features(samples, config, features)
    dense: list[Array] = []
    bags: list[list[Any]] = []
    for index, entry in enumerate(samples):
        path = f"samples[{index}]"
        sample = checked(entry, dict, path)
        known_only(sample, _SAMPLE_MEMBERS, path)
        numbers: list[Any] = optional(sample, "dense", list, [], path)
        dense.append(array_from_numbers(numbers, DTYPES["FP32"], (config.dense_dim,), f"{path}.dense"))
        bags.extend(_bags(sample, config.tables, path))
    row_ptrs = np.array([0, *accumulate(map(len, bags))], dtype=np.int32)
    keys = _keys(bags, samples, config)
    try:
        return read_batch(config, np.concatenate(dense), keys, row_ptrs)
    except RequestError:
        _check_bags(bags, samples, config)  # raises the same with a path
        raise


def _ids(candidates: Sequence[Mapping[str, Any]], *, is_feature: bool) -> Sequence[Any]:
    """Return the ids of candidates; empty if none has an id. An id that is a feature may be true or false."""
    if not any(ID in candidate for candidate in candidates):
        return ()
    ids = [candidate.get(ID) for candidate in candidates]
    for at, value in enumerate(ids):
        is_bool_without_feature = isinstance(value, bool) and not is_feature
        if isinstance(value, list | dict) or is_bool_without_feature:
            raise RequestError(f"candidates[{at}].{ID}: expected a string or a number, but {json_kind(value)} came")
        if isinstance(value, float) and abs(value) >= 1 << 64:  # an integer of more bits is parsed as a float
            raise RequestError(
                f"candidates[{at}].{ID}: expected a number of at most 64 bits; send a longer id as a string"
            )
    return ids


def _has_keys(samples: list[Any]) -> bool:
    """Whether samples have keys, not raw features. Samples of both forms are an error.

    Raises:
        RequestError: a sample is of another form than the first sample.
    """
    of_form = [type(sample) is dict and not sample.keys().isdisjoint(_SAMPLE_MEMBERS) for sample in samples]
    if len(set(of_form)) > 1:
        at = of_form.index(not of_form[0])
        forms = [f"{'keys' if has_keys else 'raw features'}" for has_keys in (of_form[0], of_form[at])]
        raise RequestError(f"samples[{at}]: has {forms[1]}, but samples[0] has {forms[0]}; a request has one form")
    return of_form[0]


def _read_features(samples: list[Any], config: ModelConfig, features: FeatureReader) -> Batch:
    """Return the batch of samples that are objects of raw features."""
    for index, sample in enumerate(samples):
        checked(sample, dict, f"samples[{index}]")
    names = dict.fromkeys(chain.from_iterable(samples))
    try:
        features.check_names(names)
        given = {name: [sample.get(name) for sample in samples] for name in features.names if name in names}
        columns = features.columns(given, len(samples))
        return read_columns(config, features, columns, len(samples))
    except FeatureValueError as err:
        at = err.sample
        if at is None:
            at = next(index for index, sample in enumerate(samples) if err.feature in sample)
        raise RequestError(f"{join(f'samples[{at}]', err.feature[:64])}: {err.reason}") from err


def _bags(sample: dict[str, Any], tables: Sequence[TableConfig], path: str) -> list[list[Any]]:
    """Return the keys of every slot of a sample, in graph order."""
    keys = sample.get("keys")
    if type(keys) is dict:
        return _bags_by_name(keys, tables, f"{path}.keys")
    if type(keys) is list:
        return _bags_of_slots(keys, sum(table.slots for table in tables), "the model", f"{path}.keys")
    if "keys" not in sample:
        raise RequestError(f"{path}.keys: missing")
    raise RequestError(f"{path}.keys: expected a list or an object, but {json_kind(keys)} came")


def _bags_by_name(keys: dict[str, Any], tables: Sequence[TableConfig], path: str) -> list[list[Any]]:
    names = [table.name for table in tables]
    for name in keys:
        if name not in names:
            close = did_you_mean(name, names)
            raise RequestError(f"{join(path, name[:64])}: the model has no such table{close}")
    bags = []
    for table in tables:
        given: list[Any] = required(keys, table.name, list, path)
        if table.slots == 1:
            bags.append(given)
        else:
            bags.extend(_bags_of_slots(given, table.slots, "the table", join(path, table.name)))
    return bags


def _bags_of_slots(given: list[Any], slots: int, owner: str, path: str) -> list[list[Any]]:
    if len(given) != slots:
        raise RequestError(f"{path}: {owner} has {slots} slots, but {len(given):,} lists of keys came")
    return [checked(bag, list, f"{path}[{slot}]") for slot, bag in enumerate(given)]


def _keys(bags: list[list[Any]], samples: list[Any], config: ModelConfig) -> Array:
    """Return all keys in one array; only if that fails, read the bags one by one to name the key's path."""
    keys = list(chain.from_iterable(bags))
    try:
        return array_from_numbers(keys, DTYPES["INT64"], (len(keys),), "keys")
    except RequestError:
        for path, bag in zip(_paths(samples, config), bags, strict=True):
            array_from_numbers(bag, DTYPES["INT64"], (len(bag),), path)
        raise


def _check_bags(bags: list[list[Any]], samples: list[Any], config: ModelConfig) -> None:
    """Raise the error of the first key that no table can hold, or of the first sample with too many keys."""
    for path, bag in zip(_paths(samples, config), bags, strict=True):
        check_request_keys(np.array(bag, dtype=np.int64), config.key_type, path)
    rest = iter(bags)
    for sample in range(len(samples)):
        for table in config.tables:
            count, limit = sum(map(len, islice(rest, table.slots))), table.max_keys_per_sample
            if limit is not None and count > limit:
                reason = f"{count:,} keys of table {table.name!r}, which takes at most {limit:,} per sample"
                raise RequestError(f"samples[{sample}].keys: {reason}")


def _paths(samples: list[Any], config: ModelConfig) -> Iterator[str]:
    """Yield the path of each bag, sample by sample."""
    places = [slot.place for slot in slots_of(config)]
    for index, sample in enumerate(samples):
        is_named = type(sample["keys"]) is dict
        for slot, place in enumerate(places):
            yield f"samples[{index}].keys" + (f".{place}" if is_named else f"[{slot}]")


def encode_answer(request: SamplesRequest, outputs: Mapping[str, Array], facts: Mapping[str, Any]) -> bytes:
    """Encode the answer to a request.

    Args:
        request: the request.
        outputs: C-contiguous arrays by output name.
        facts: the other members of the answer.

    Raises:
        RequestError: a number is not finite; JSON has no such numbers.
    """
    document: dict[str, Any] = {}
    if TOP_INDEX in outputs:
        document["top"] = _best(outputs[TOP_INDEX][0], outputs[TOP_SCORE][0], request.ids)
        outputs = {name: outputs[name] for name in request.outputs}
    if request.outputs or len(outputs) > 1:
        named = {name: json_numbers(array, name) for name, array in outputs.items()}
        flat = {name: array.reshape(-1) if array.shape[1:] == (1,) else array for name, array in named.items()}
        document["outputs"] = flat
    elif outputs:
        (predictions,) = outputs.values()
        document["predictions"] = json_numbers(predictions, "predictions")
    return orjson.dumps({**document, **facts}, option=orjson.OPT_SERIALIZE_NUMPY)


def _best(index: Array, score: Array, ids: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the best candidates, [k], for JSON."""
    found: list[dict[str, Any]] = [{"index": at, "score": value} for at, value in zip(index, score, strict=True)]
    if ids:
        for entry in found:
            entry["id"] = ids[entry["index"]]
    return found
