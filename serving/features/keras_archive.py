"""Read the preprocessing layers of a ``.keras`` archive as a definition of raw features. Keras is not needed.

An archive is a zip file, whose ``config.json`` has the layers. What ``adapt`` has learned is stored elsewhere: the
values of a lookup in a text file, and the statistics of a Normalization as weights. Their folders are numbered by
class, in the order of the layers.
"""

import io
import json
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serving.config.clause import read_clause
from serving.errors import ConfigError, MissingExtraError, ModelFileError
from serving.features.definition import FeatureDefinition, read_definition
from serving.model.names import names_of_positions
from serving.model.regular_file import check_regular

ARCHIVE_SUFFIX = ".keras"
_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_MOST_ARCHIVE_BYTES, _MOST_ENTRY_BYTES = 1 << 36, 4 << 30
_LOOKUPS = ("StringLookup", "IntegerLookup")
# Errors for a damaged archive, or for another program's.
_FAULTS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
    *(KeyError, IndexError, ValueError, TypeError, AttributeError),
)
_AS_TEXT = "; a StringLookup allows other values, and also reads integers as texts"
_EPSILON = np.float32(1e-7)  # Keras's least standard deviation


class _Layer(NamedTuple):
    """A layer: its class, its name, its options, the inputs that it reads in each call, and its folder's name.

    A class of the user may have the name of a class of Keras.
    """

    kind: str
    name: str
    options: Mapping[str, Any]
    calls: Sequence[str]
    folder: str
    is_of_keras: bool


def definition_of_archive(path: Path, source: str = "", others: Collection[str] = ()) -> FeatureDefinition:
    """Return the features of a Keras model: its inputs, with the layers that turn them into keys and numbers.

    An input that no preprocessing layer reads is a dense feature, or of integers the keys themselves. A vector of n
    numbers is n features, ``name[0]`` to ``name[n - 1]``.

    Args:
        path: the archive.
        source: what messages call it; empty: its path.
        others: the names of layers that make no features.

    Raises:
        ModelFileError: it is not a ``.keras`` archive.
        ConfigError: a layer has no equivalent feature; the message names the layer.
        MissingExtraError: the statistics of a Normalization need h5py.
    """
    try:
        check_regular(path, _MOST_ARCHIVE_BYTES)
        with zipfile.ZipFile(path) as archive:
            return _definition(_Archive(source or str(path), archive), others)
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror or err}") from err
    except _FAULTS as err:
        raise ModelFileError(path, f"not a {ARCHIVE_SUFFIX} archive: {err}") from err


def read_features(path: str | Path) -> FeatureDefinition:
    """Read a ``features.json``, or the preprocessing layers of a ``.keras`` archive.

    Raises:
        ConfigError, ModelFileError, MissingExtraError: see ``read_definition`` and ``definition_of_archive``.
    """
    path = Path(path)
    return definition_of_archive(path) if path.suffix == ARCHIVE_SUFFIX else read_definition(path)


class _Archive:
    def __init__(self, source: str, archive: zipfile.ZipFile) -> None:
        self.source = source
        self._archive = archive
        model = json.loads(self.read(_CONFIG))
        self.config: dict[str, Any] = model["config"]
        if "layers" not in self.config:
            reason = f"expected a Functional or a Sequential model, got {model['class_name']!r}"
            raise ConfigError(self.source, "", reason)
        counts = Counter[str]()
        self.layers: list[_Layer] = []
        before = ""
        for entry in self.config["layers"]:
            kind, options = entry["class_name"], entry["config"]
            snake = re.sub("([a-z0-9])([A-Z])", r"\1_\2", kind).lower()
            folder = f"{snake}_{counts[snake]}" if counts[snake] else snake
            counts[snake] += 1
            calls = [_made_by(node) for node in entry["inbound_nodes"]] if "inbound_nodes" in entry else [before]
            before = str(entry.get("name") or options.get("name") or folder)
            is_of_keras = str(entry.get("module", "keras")).startswith("keras")
            self.layers.append(_Layer(kind, before, options, calls, folder, is_of_keras))

    def read(self, name: str) -> bytes:
        """Return the content of an entry. Raise KeyError if there is none."""
        if self._archive.getinfo(name).file_size > _MOST_ENTRY_BYTES:
            raise ConfigError(self.source, name, f"more than {_MOST_ENTRY_BYTES:,} bytes")
        return self._archive.read(name)

    def error(self, layer: _Layer, reason: str) -> ConfigError:
        return ConfigError(self.source, f"layer {layer.name!r} ({layer.kind})", reason)


def _made_by(node: Any) -> str:
    """Return the layer that makes the first argument of a call."""
    [first, *_] = node["args"]
    history = first["config"]["keras_history"] if isinstance(first, dict) else [""]
    return str(history[0])


def _definition(archive: _Archive, others: Collection[str]) -> FeatureDefinition:
    inputs = {layer.name: layer for layer in archive.layers if layer.kind == "InputLayer"}
    found: dict[str, dict[str, Any]] = {}
    for layer in archive.layers:
        if layer.kind not in _FEATURES or layer.name in others:
            continue
        if not layer.is_of_keras:
            raise archive.error(layer, "expected Keras's own layer, got another class with the same name")
        shares: dict[str, Any] = {}
        for maker in dict.fromkeys(layer.calls):
            if maker not in inputs:
                raise archive.error(layer, f"expected it to read a model input, but it reads the layer {maker!r}")
            if maker in found:
                raise archive.error(layer, f"another layer also reads {maker!r}; give each layer its own input")
            made = _FEATURES[layer.kind](archive, layer, inputs[maker])
            found[maker] = {"name": maker, **made, **_values_of(archive, inputs[maker], made["kind"]), **shares}
            if made["kind"] != "dense":
                shares = {"shares": shares.get("shares", maker)}
    in_order = [*_names_in(archive.config.get("input_layers", [])), *inputs]
    features = [
        feature
        for name in dict.fromkeys(in_order)
        if name in inputs
        for feature in _of_numbers(archive, inputs[name], found.get(name) or _plain(archive, inputs[name]))
    ]
    return read_clause(FeatureDefinition, {"format": 1, "features": features}, Path(archive.source))


def _names_in(inputs: Any) -> Iterator[str]:
    """Yield the names of a model's inputs in order; each is a list of the name and two numbers."""
    if isinstance(inputs, list) and len(inputs) == 3 and isinstance(inputs[0], str):
        yield inputs[0]
    elif isinstance(inputs, list | dict):
        for part in inputs.values() if isinstance(inputs, dict) else inputs:
            yield from _names_in(part)


def _type_of(archive: _Archive, layer: _Layer) -> str:
    """Return the type of an input's values."""
    dtype = layer.options.get("dtype")
    if isinstance(dtype, dict):
        dtype = dtype["config"]["name"]
    for start, kind in (("string", "string"), ("int", "integer"), ("uint", "integer"), ("float", "float")):
        if str(dtype).startswith(start):
            return kind
    if dtype == "bool":
        return "boolean"
    raise archive.error(layer, f"expected strings, integers, floats or booleans, got {dtype!r}")


def _values_of(archive: _Archive, layer: _Layer, kind: str) -> dict[str, Any]:
    """Return the options that follow from an input's shape: one value or a list of values."""
    shape = layer.options.get("batch_shape") or [None]
    sizes = shape[1:]
    if layer.options.get("sparse") or len(sizes) > 1:
        raise archive.error(layer, f"expected the shape [B], [B, 1] or [B, n], got {shape}")
    if kind == "dense" and sizes == [None]:
        raise archive.error(layer, f"expected a fixed number of numbers, got the shape {shape}")
    if kind == "dense" or sizes in ([], [1]):
        return {}
    return {"list": {} if sizes == [None] else {"most": sizes[0]}}


def _of_numbers(archive: _Archive, layer: _Layer, feature: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the feature of an input, or one for each number of a vector."""
    if feature["kind"] != "dense":
        yield feature
        return
    count = _count(layer)
    statistics = {key: np.broadcast_to(feature[key], count).tolist() for key in ("mean", "std") if key in feature}
    for place, name in enumerate(names_of_positions(feature["name"], count)):
        yield {**feature, "name": name, **{key: values[place] for key, values in statistics.items()}}


def _count(layer: _Layer) -> int:
    """Return how many values an input has; 0 if the number is not fixed."""
    sizes = layer.options.get("batch_shape", [None])[1:]
    return 0 if None in sizes else math.prod(sizes)


def _plain(archive: _Archive, layer: _Layer) -> dict[str, Any]:
    """Return the feature of an input that no preprocessing layer reads."""
    kind = _type_of(archive, layer)
    if kind == "string":
        raise archive.error(layer, "no StringLookup or Hashing reads its strings")
    feature = {"name": layer.name, "kind": "dense"} if kind == "float" else {"name": layer.name, "kind": "identity"}
    return {**feature, **({"type": kind} if kind == "boolean" else {}), **_values_of(archive, layer, feature["kind"])}


def _refuse(archive: _Archive, layer: _Layer, **expected: Any) -> None:
    """Refuse options that features do not have."""
    for option, value in {"invert": False, "output_mode": "int", "sparse": False, **expected}.items():
        given = layer.options.get(option, value)
        if given != value:
            raise archive.error(layer, f"{option}={given!r}: expected {value!r}")


def _lookup(archive: _Archive, layer: _Layer, of_input: _Layer) -> dict[str, Any]:
    """Return the feature of a StringLookup or an IntegerLookup."""
    options, is_text = layer.options, layer.kind == "StringLookup"
    _refuse(archive, layer, oov_method="floormod", salt=None, **({"encoding": "utf-8"} if is_text else {}))
    mask, unknown = options.get("mask_token"), options.get("num_oov_indices", 1)
    if mask not in ((None, "") if is_text else (None,)):
        raise archive.error(
            layer, f"mask_token={mask!r}: expected none{' or an empty text' * is_text}{_AS_TEXT * (not is_text)}"
        )
    if not is_text and unknown > 1:
        raise archive.error(layer, f"num_oov_indices={unknown}: expected 0 or 1{_AS_TEXT}")
    token = options.get("oov_token", "[UNK]" if is_text else -1)
    special = [mask] * (mask is not None) + [token] * unknown
    values = options.get("vocabulary")
    if not isinstance(values, list):
        try:
            text = archive.read(f"assets/layers/{layer.folder}/vocabulary.txt").decode()
        except KeyError as err:
            raise archive.error(layer, "its vocabulary is not in the archive; call adapt, and save it again") from err
        values = text.split("\n") if is_text else [int(line) for line in text.split("\n")]
    if values[: len(special)] == special:
        values = values[len(special) :]
    if "" in values:
        raise archive.error(layer, "an empty text is in its vocabulary; expected mask_token=''")
    feature = {"kind": "vocabulary", "values": values, "unknown_buckets": unknown}
    if _type_of(archive, of_input) != "string":
        feature["type"] = "integer"
    if mask is not None:  # the empty text, which has no key
        feature["offset"] = 1
    elif is_text and unknown == 1 and token not in values and of_input.options["batch_shape"][1:] != [None]:
        feature["missing"] = token  # Keras treats the empty text as an unknown value
    return feature


def _hashing(archive: _Archive, layer: _Layer, of_input: _Layer) -> dict[str, Any]:
    _refuse(archive, layer, mask_value=None)
    kind, salt = _type_of(archive, of_input), layer.options.get("salt")
    feature = {"kind": "hash", "buckets": layer.options["num_bins"], **({} if salt is None else {"salt": salt})}
    return {**feature, **({"type": kind} if kind != "string" else {})}


def _discretization(archive: _Archive, layer: _Layer, of_input: _Layer) -> dict[str, Any]:
    _refuse(archive, layer)
    boundaries = layer.options.get("bin_boundaries")
    if not boundaries:
        raise archive.error(layer, "it has no boundaries; call adapt, and save it again")
    return {"kind": "bucketize", "boundaries": boundaries}


def _normalization(archive: _Archive, layer: _Layer, of_input: _Layer) -> dict[str, Any]:
    _refuse(archive, layer)
    given = [layer.options.get("mean"), layer.options.get("variance")]
    if None in given:
        given = _statistics(archive, layer)
    mean, variance = (np.asarray(value, np.float32).reshape(-1) for value in given)
    count = _count(of_input)
    if mean.size not in (1, count):
        raise archive.error(layer, f"expected one mean or {count}, got {mean.size}")
    return {"kind": "dense", "mean": mean, "std": np.maximum(np.sqrt(variance), _EPSILON)}


def _statistics(archive: _Archive, layer: _Layer) -> list[Any]:
    """Return the mean and the variance that ``adapt`` has computed."""
    try:
        h5py = import_module("h5py")
    except ImportError as err:
        raise MissingExtraError("h5py", "keras", "reading the statistics of a Normalization") from err
    with h5py.File(io.BytesIO(archive.read(_WEIGHTS)), "r") as file:
        return [file[f"layers/{layer.folder}/vars/{number}"][()] for number in (0, 1)]


_FEATURES = {
    **dict.fromkeys(_LOOKUPS, _lookup),
    "Hashing": _hashing,
    "Discretization": _discretization,
    "Normalization": _normalization,
}
