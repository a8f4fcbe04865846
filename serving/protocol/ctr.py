"""The tensors of a click-through model, with the names and forms of HugeCTR's Triton backend.

====================  ==============  ===========================================================================
``DES``               FP32            dense features, [B, F] or flat as [B * F] or [1, B * F]; optional if F = 0
``CATCOLUMN``         INT64, UINT32   N keys, [N] or [1, N], or [B, S] with one key per slot
``ROWINDEX``          INT32, INT64    CSR offsets into the keys, [R] or [1, R]; optional if the keys are [B, S]
``OUTPUT0``           FP32            probabilities, [B, L]
====================  ==============  ===========================================================================

A model whose graph states its outputs answers with these, FP32 [B, D] each, in place of ``OUTPUT0``. The heads of other
models are outputs by the names of their labels, too, if a request names them.

With the parameter ``top_k``, ``TOP_INDEX``, INT32 [U, k], and ``TOP_SCORE``, FP32 [U, k], are the k best candidates of
each of U users, by the output that the parameter ``top_output`` names.

A model with a ``features.json`` takes these or its raw features: a tensor of B values for each feature, by its name. A
list feature has [B, n] values, or the values of all samples and ``<feature>.offsets``, INT32 or INT64 [B + 1], CSR
offsets into them, or B texts if it has a separator.

A feature with one value where others have B is the same for every sample. ``CANDIDATES``, INT32 or INT64 [U], says how
many of the samples each of U users has. Then a feature may also have U values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.candidates import fewest_rows, read_ordered, read_shared
from serving.config import ModelConfig
from serving.errors import RequestError
from serving.features import (
    Column,
    FeatureConfig,
    FeatureDefinition,
    FeatureReader,
    TensorColumns,
    column_of,
    rows_of,
    slots_of,
)
from serving.features.definition import ValueType
from serving.model.names import ANSWER, CANDIDATES, DENSE, KEYS, OFFSETS, ROW_PTRS, TOP_INDEX, TOP_SCORE
from serving.model.records import Output, default_outputs
from serving.option_values import MAX_CANDIDATES
from serving.protocol.tensors import (
    DTYPES,
    BodyLayout,
    BodyShapes,
    BodyTensors,
    Signature,
    TensorSpec,
    TextTensor,
    config_document,
    key_datatypes,
)
from serving.protocol.tensors import PLATFORM as PLATFORM
from serving.reading import read_batch, read_tensors

_STEPS = np.arange(4097, dtype=np.int64)
_STEPS.setflags(write=False)
_ITEMS, _FIRST_EXTENT = 1, 3  # places in a form of ``kernels.host.tensor_forms``


_DATATYPES: Mapping[ValueType, tuple[str, ...]] = {
    "string": ("BYTES", "INT64", "INT32", "UINT32"),
    "integer": ("INT64", "INT32", "UINT32", "FP64", "BYTES"),
    "float": ("FP32", "FP64", "INT64", "INT32", "UINT32", "BYTES"),
    "boolean": ("BOOL", "INT64", "INT32", "UINT32", "BYTES"),
}
#: The dtypes that native code reads as the values of a feature.
_READABLE: Mapping[ValueType, tuple[np.dtype[Any], ...]] = {
    "string": tuple(DTYPES[name] for name in ("BYTES", "INT64", "INT32", "UINT32")),
    "integer": tuple(DTYPES[name] for name in ("INT64", "INT32", "UINT32")),
    "float": (DTYPES["FP32"],),
}


def signature_of(config: ModelConfig, reader: FeatureReader | None = None) -> Signature:
    """Return a model's inputs and outputs; of several datatypes of an input, the declared datatype comes first.

    All have two free dimensions, as in Triton with an export's ``config.pbtxt``: HugeCTR's clients send ``[1, N]``.

    Args:
        config: the model.
        reader: reads its raw features; None: it has none. With raw features every input is optional.
    """
    features = None if reader is None else reader.definition
    has_features = features is not None
    return Signature(
        inputs=(
            TensorSpec(DENSE, ("FP32",), (-1, -1), optional=config.dense_dim == 0 or has_features),
            TensorSpec(KEYS, key_datatypes(config.key_type), (-1, -1), optional=has_features),
            TensorSpec(ROW_PTRS, ("INT32", "INT64"), (-1, -1), optional=True),
            *_inputs_of(features),
            *([TensorSpec(CANDIDATES, ("INT32", "INT64"), (-1, -1), optional=True)] if has_features else ()),
        ),
        outputs=tuple(_outputs_of(config)),
        allows_others=_ignores_others(features),
        rankings=(TensorSpec(TOP_INDEX, ("INT32",), (-1, -1)), TensorSpec(TOP_SCORE, ("FP32",), (-1, -1))),
    )


def _outputs_of(config: ModelConfig) -> Iterator[TensorSpec]:
    defaults = default_outputs(config.outputs)
    for output in config.outputs:
        kind = "" if output == Output(ANSWER, width=output.width) else output.kind  # as HugeCTR's clients know it
        yield TensorSpec(output.name, ("FP32",), (-1, output.width), optional=output not in defaults, kind=kind)


def _inputs_of(features: FeatureDefinition | None) -> Iterator[TensorSpec]:
    for feature in () if features is None else features.columns:
        yield TensorSpec(feature.name, _DATATYPES[feature.value_type], (-1, -1), optional=True)
        if feature.is_list:
            yield TensorSpec(f"{feature.name}{OFFSETS}", ("INT32", "INT64"), (-1, -1), optional=True)


def _ignores_others(features: FeatureDefinition | None) -> bool:
    return features is not None and features.unknown_features == "ignore"


def batch_of(
    config: ModelConfig,
    inputs: Mapping[str, Any],
    features: FeatureReader | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Batch:
    """Return the samples in a request's tensors, which an ``InferDecoder`` for ``signature_of`` made.

    Raises:
        RequestError: a tensor is wrong, or the request has keys and raw features.
    """
    names = list(inputs)
    if features is not None and _ignores_others(features.definition):
        known = {DENSE, KEYS, ROW_PTRS, CANDIDATES, *(spec.name for spec in _inputs_of(features.definition))}
        features.check_names(inputs.keys() - known)
        names = [name for name in names if name in known]
    of_keys = {DENSE, KEYS, ROW_PTRS}.intersection(names)
    if features is None or len(of_keys) == len(names) > 0:
        if KEYS not in inputs:
            raise RequestError(f"inputs: missing {KEYS!r}")
        return _batch_of_keys(config, inputs)
    if of_keys:
        raw = next(name for name in names if name not in of_keys)
        if raw == CANDIDATES:
            raise RequestError(f"{CANDIDATES}: needs values by name, but {min(of_keys)!r} came")
        raise RequestError(f"inputs: {min(of_keys)!r} and the raw feature {raw!r}; a request has keys or raw features")
    return _raw_batch(config, inputs, features, max_candidates)


def _batch_of_keys(config: ModelConfig, inputs: Mapping[str, Any]) -> Batch:
    """Return the samples in tensors of keys."""
    known: _KeyTensors | None = None
    if isinstance(inputs, BodyTensors):
        known = inputs.shapes.remembered(_KeyTensors)
        found = read_tensors(config, inputs.read(), *known.numbers) if known.has_right_shapes else None
        if found is not None:
            return found
    batch = read_batch(config, inputs.get(DENSE), inputs[KEYS], inputs.get(ROW_PTRS))  # names what is wrong
    if known is not None:
        known.has_right_shapes = True
    return batch


class _KeyTensors:
    """The tensors of keys in some shapes.

    Attributes:
        numbers: the numbers of the three tensors; None for a tensor that is missing.
        has_right_shapes: a request that has them was right.
    """

    def __init__(self, shapes: BodyShapes) -> None:
        of_name = {name: tensor.number for name, tensor in shapes.layout.tensors.items()}
        self.numbers = of_name.get(DENSE), of_name[KEYS], of_name.get(ROW_PTRS)
        self.has_right_shapes = False


def _raw_batch(config: ModelConfig, inputs: Mapping[str, Any], reader: FeatureReader, max_candidates: int) -> Batch:
    """Return the samples in tensors of raw features."""
    most, counts = max(config.max_batchsize, max_candidates), inputs.get(CANDIDATES)
    if isinstance(inputs, BodyTensors):
        found = inputs.shapes.remembered(partial(_native_columns, reader, most))
        if found is not None:
            native = reader.ordered(found.columns, fewest_rows(found.sizes))
            columns = TensorColumns(inputs.read(), native, partial(_ordered, reader, inputs, most))
            return read_ordered(config, reader, columns, found.sizes, counts, max_candidates)
    return read_shared(config, reader, _columns(reader, inputs, most), counts, max_candidates)


class _NativeColumns(NamedTuple):
    """The columns of tensors in the native form, by feature, without absent features.

    Attributes:
        columns: the columns.
        sizes: the rows of each.
    """

    columns: Mapping[str, Column]
    sizes: Mapping[str, int]


def _native_columns(reader: FeatureReader, most: int, shapes: BodyShapes) -> _NativeColumns | None:
    """Return the columns that native code can read from tensors; None if a tensor needs more, or is wrong."""
    form = shapes.layout.remembered(partial(_native_form, reader))
    if form is None:
        return None
    tensors, places, subtracted = form.rows
    rows = (shapes.forms[tensors, places] - subtracted).tolist()
    if min(rows) < 1 or max(rows) > most or _are_mixed(shapes.forms, form):
        return None
    return _NativeColumns(form.columns, dict(zip(form.columns, rows, strict=True)))


class _NativeForm(NamedTuple):
    """The columns of tensors of any shapes in the native form.

    Attributes:
        columns: by feature, without absent features.
        rows: where the rows of each column are: the number of a tensor, a place in its form, and what to subtract.
        singles: the tensors of features with one value, if they have several extents.
        lists: the tensors of lists with two extents.
    """

    columns: Mapping[str, Column]
    rows: NDArray[np.int64]
    singles: NDArray[np.int64]
    lists: NDArray[np.int64]


def _are_mixed(forms: NDArray[np.int64], form: _NativeForm) -> bool:
    """Whether ``_check_shapes`` refuses the shapes."""
    if not form.singles.size:
        return False
    items, first = forms[form.singles, _ITEMS], forms[form.singles, _FIRST_EXTENT]
    is_row = (first == 1) & (items > 1)
    if ((first != 1) & (first != items)).any():
        return True
    return bool(is_row.any() and ((first > 1).any() or (forms[form.lists, _FIRST_EXTENT] > 1).any()))


def _check_shapes(reader: FeatureReader, inputs: Mapping[str, Any]) -> None:
    """Refuse tensors that cannot have the same samples: those of [B, 1] or [B, n] next to [1, B].

    Raises:
        RequestError: there is such a tensor, or one value of each sample has two extents above 1.
    """
    row = ""  # a tensor of [1, B], as Triton's have
    column = ""
    for feature in reader.inputs:
        shape: Sequence[int] = inputs[feature.name].shape if feature.name in inputs else ()
        if len(shape) <= 1:
            continue
        count = math.prod(shape)
        if feature.is_list:
            if f"{feature.name}{OFFSETS}" not in inputs and shape[0] > 1:
                column = column or feature.name
        elif shape[0] not in (1, count):
            reason = "expected one value for each sample, so the shape [B], [B, 1] or [1, B]"
            raise RequestError(f"{feature.name}: {reason}, got {list(shape)}")
        elif shape[0] > 1:
            column = column or feature.name
        elif count > 1:
            row = row or feature.name
    if row and column:
        shapes = [list(inputs[name].shape) for name in (row, column)]
        raise RequestError(f"{row}: expected [B] or [B, 1], because {column} is {shapes[1]}, got {shapes[0]}")


def _native_form(reader: FeatureReader, layout: BodyLayout) -> _NativeForm | None:
    """Return the columns that native code can read from tensors; None if a tensor needs more."""
    columns: dict[str, Column] = {}
    rows: list[tuple[int, int, int]] = []
    singles: list[int] = []
    of_lists: list[int] = []
    for feature in reader.inputs:
        tensor = layout.tensors.get(feature.name)
        offsets = layout.tensors.get(f"{feature.name}{OFFSETS}") if feature.is_list else None
        if tensor is None and offsets is None:
            continue
        if tensor is None or tensor.dtype not in _READABLE.get(feature.value_type, ()):
            return None
        lists: bool | tuple[int] | None = None
        of_rows = tensor.number, _ITEMS, 0
        if tensor.extents > 1 and offsets is None:
            (of_lists if feature.is_list else singles).append(tensor.number)
        if offsets is not None:
            lists, of_rows = (offsets.number,), (offsets.number, _ITEMS, 1)
        elif feature.is_list:
            if tensor.extents > 2 or (tensor.extents == 1 and tensor.dtype.kind == "O"):
                return None
            lists, of_rows = True, (tensor.number, _FIRST_EXTENT, 0)
        columns[feature.name] = "tensor", tensor.number, lists
        rows.append(of_rows)
    if not columns:
        return None
    return _NativeForm(columns, np.array(rows, np.int64).T, np.array(singles, np.int64), np.array(of_lists, np.int64))


def _ordered(reader: FeatureReader, inputs: Mapping[str, Any], most: int) -> list[Column]:
    """Return the columns of a request as arrays."""
    columns = _columns(reader, inputs, most)
    return reader.ordered(columns, fewest_rows({name: rows_of(column) for name, column in columns.items()}))


def _columns(reader: FeatureReader, inputs: Mapping[str, Any], most: int) -> dict[str, Column]:
    """Return the columns of tensors of raw features as arrays, by feature."""
    _check_shapes(reader, inputs)
    columns: dict[str, Column] = {}
    for feature in reader.inputs:
        offsets = inputs.get(f"{feature.name}{OFFSETS}") if feature.is_list else None
        if feature.name not in inputs:
            if offsets is not None:
                raise RequestError(f"inputs: {feature.name}{OFFSETS} came without {feature.name}")
            continue
        values, splits, count = _values(feature, inputs[feature.name], offsets, most)
        columns[feature.name] = column_of(feature, values, count, splits)
    if not columns:
        raise RequestError(f"inputs: expected {KEYS} or raw features: {', '.join(reader.names)}")
    return columns


def _values(feature: FeatureConfig, tensor: Any, offsets: Any, most: int) -> tuple[Any, Any, int]:
    """Return the values of a tensor, where the values of each sample begin, and the number of samples.

    ``most`` is the largest number of samples: a tensor of empty lists has any number in a few bytes.
    """
    shape = tensor.shape
    values = tensor.texts if isinstance(tensor, TextTensor) else tensor.reshape(-1)
    if offsets is not None:
        splits = offsets.reshape(-1).astype(np.int64)
        check_splits(f"{feature.name}{OFFSETS}", splits, math.prod(shape))
        return values, splits, splits.size - 1
    if not feature.is_list:
        return values, None, math.prod(shape)
    if len(shape) == 1 and not isinstance(tensor, TextTensor):
        return values, _steps(shape[0]), shape[0]
    if len(shape) == 1 and feature.list is not None and feature.list.separator is not None:
        return values, None, shape[0]  # texts to be cut
    if len(shape) != 2:
        expected = f"expected the shape [B, n], or {feature.name}{OFFSETS}"
        raise RequestError(f"{feature.name}: {expected}, because it is a list; got {list(shape)}")
    if shape[0] > most:
        raise RequestError(f"{feature.name}: {shape[0]:,} samples, but the model takes at most {most:,}")
    return values, np.arange(shape[0] + 1, dtype=np.int64) * shape[1], shape[0]


def _steps(count: int) -> NDArray[np.int64]:
    """Return the offsets of lists of one value."""
    return _STEPS[: count + 1] if count < _STEPS.size else np.arange(count + 1, dtype=np.int64)


def check_splits(name: str, splits: NDArray[np.int64], values: int) -> None:
    """Refuse offsets that do not go from 0 to the number of values without falling.

    Raises:
        RequestError: the message begins with ``name``.
    """
    if splits.size < 2 or splits[0] != 0 or splits[-1] != values or (splits[1:] < splits[:-1]).any():
        raise RequestError(f"{name}: expected offsets from 0 to {values} that do not decrease, one more than samples")


def names_of(config: ModelConfig) -> dict[str, list[str]]:
    """Return the names of a model's slots, dense features and labels, in their order; no entry without names."""
    names = {"dense": list(config.dense_names), "labels": list(config.label_names)}
    return {"slots": [slot.name for slot in slots_of(config)], **{key: names[key] for key in names if names[key]}}


def triton_config(name: str, config: ModelConfig, reader: FeatureReader | None = None) -> dict[str, Any]:
    """Return the model's configuration as Triton's ``ModelConfig``."""
    parameters = {
        "max_batchsize": str(config.max_batchsize),
        "tables": " ".join(table.name for table in config.tables),
        "slots": " ".join(str(table.slots) for table in config.tables),
    }
    if config.slot_keys != "stored":
        parameters["keys"] = config.slot_keys
    signature = signature_of(config, reader)
    if kinds := " ".join(f"{spec.name}={spec.kind}" for spec in signature.outputs if spec.kind):
        parameters["kinds"] = kinds
    return config_document(name, signature, parameters)
