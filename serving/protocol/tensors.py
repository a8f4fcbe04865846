"""Named tensors on the wire: datatypes, a model's inputs and outputs, and arrays from JSON numbers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels.host import Tensors, find_texts, read_tensors, tensor_forms
from serving.errors import RequestError, did_you_mean
from serving.features import Texts, joined_texts
from serving.model.sparse_rows import KeyType
from serving.model.strict_json import LARGEST_FLOAT32

Array = NDArray[Any]
T = TypeVar("T")

#: KServe v2 datatypes the server reads, as little-endian NumPy dtypes.
DTYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "UINT32": np.dtype("<u4"),
    "FP64": np.dtype("<f8"),
    "BOOL": np.dtype("?"),
    "BYTES": np.dtype("O"),  # a ``TextTensor``
}

#: The numbers of ``kernels.host.tensor_forms``, by dtype.
_NATIVE = {
    DTYPES[name]: number for number, name in enumerate(("BYTES", "INT64", "INT32", "UINT32", "FP32", "FP64", "BOOL"))
}

#: KServe's datatypes by dtype.
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}

#: The platform of a model in /v2/models/<model>, and its backend in its configuration.
PLATFORM = "hotrow"

#: JSON number types that may fill each kind of array. ``bool`` is an int in Python but not a number in JSON.
_NUMBERS: dict[str, frozenset[type]] = {
    "f": frozenset({int, float}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "b": frozenset({bool}),
}


class TextTensor(NamedTuple):
    """A tensor of the datatype BYTES.

    Attributes:
        texts: its elements.
        shape: its shape.
    """

    texts: Texts
    shape: tuple[int, ...]


Tensor = Array | TextTensor


class BodyTensor(NamedTuple):
    """A tensor in the body of a request.

    Attributes:
        number: its number among them.
        dtype: its dtype.
        first: which of the numbers that describe tensors is the first extent of its shape.
        extents: how many extents it has.
        size: which of the numbers is its size in bytes.
        place: its name and JSON path, for messages.
    """

    number: int
    dtype: np.dtype[Any]
    first: int
    extents: int
    size: int
    place: str


class _Remembering:
    """Remembers what others derive from it."""

    def __init__(self) -> None:
        self._remembered: list[Any] = []

    def remembered(self, make: Callable[[Self], T]) -> T:
        """Return what ``make`` returned for this object the first time. All callers give the same function."""
        if not self._remembered:
            self._remembered.append(make(self))
        found: T = self._remembered[0]
        return found


class BodyLayout(_Remembering):
    """The tensors of a body: the same for all requests whose JSON parts differ in shapes and sizes alone.

    Attributes:
        tensors: by name, in their order.
        has_texts: some are texts.
    """

    def __init__(self, tensors: Mapping[str, BodyTensor]) -> None:
        """Take tensors that are one after another."""
        super().__init__()
        self.tensors = tensors
        self.has_texts = any(tensor.dtype.kind == "O" for tensor in tensors.values())
        places = [(_NATIVE[tensor.dtype], tensor.first, tensor.extents, tensor.size) for tensor in tensors.values()]
        self._places = np.array(places, np.int64).reshape(-1, 4)

    def shaped(self, numbers: NDArray[np.int64], size_bytes: int) -> "BodyShapes | None":
        """Return the tensors with the shapes and sizes that these numbers describe.

        None if there are no such tensors, or if they do not have ``size_bytes`` together.
        """
        forms = tensor_forms(self._places, numbers, size_bytes)
        return None if forms is None else BodyShapes(self, numbers, forms, size_bytes)


class BodyShapes(_Remembering):
    """The tensors of a body and their shapes: the same for all requests with the same JSON part.

    Attributes:
        layout: their names, datatypes and order.
        forms: what ``kernels.host.tensor_forms`` returned.
        size_bytes: how many bytes they have.
    """

    def __init__(
        self, layout: BodyLayout, numbers: NDArray[np.int64], forms: NDArray[np.int64], size_bytes: int
    ) -> None:
        """See ``BodyLayout.shaped``."""
        super().__init__()
        self.layout, self.forms, self.size_bytes = layout, forms, size_bytes
        self._numbers = numbers
        self._places: dict[str, tuple[np.dtype[Any], tuple[int, ...], int, int, str]] = {}

    def place(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...], int, int, str]:
        """Return a tensor's dtype, shape, where it begins behind the JSON part, where it ends, and its place.

        Raises:
            KeyError: there is no such tensor.
        """
        if name not in self._places:
            tensor = self.layout.tensors[name]
            end = int(self.forms[: tensor.number + 1, 2].sum())
            shape = tuple(self._numbers[tensor.first : tensor.first + tensor.extents].tolist())
            begin = end - int(self.forms[tensor.number, 2])
            self._places[name] = tensor.dtype, shape, begin, end, tensor.place
        return self._places[name]


class BodyTensors(Mapping[str, "Tensor"]):
    """The tensors of a request by name, which are decoded when they are asked for.

    Attributes:
        shapes: their names, datatypes and shapes.
    """

    def __init__(self, shapes: BodyShapes, body: bytes, begin: int) -> None:
        """Take a body whose JSON part ends at ``begin``. The rest of it has the size of the tensors.

        Raises:
            RequestError: bytes are no texts.
        """
        self.shapes, self._body, self._begin = shapes, body, begin
        self._read: Tensors | None = None
        if shapes.layout.has_texts:
            self.read()

    def read(self) -> Tensors:
        """Return all tensors, decoded in one native call.

        Raises:
            RequestError: bytes are no texts.
        """
        found = self._read or read_tensors(self.shapes.forms, self._body, self._begin)
        if isinstance(found, tuple):
            number, texts = found
            _, shape, _, _, place = self.shapes.place(list(self)[number])
            raise _wrong_texts(texts, shape, place)
        self._read = found
        return found

    def __getitem__(self, name: str) -> "Tensor":
        """Return a view of the body, or a copy if the JSON part's length leaves it unaligned."""
        dtype, shape, begin, end, place = self.shapes.place(name)
        return tensor_from_bytes(memoryview(self._body)[self._begin + begin : self._begin + end], dtype, shape, place)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.shapes.layout.tensors

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.shapes.layout.tensors)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self.shapes.layout.tensors)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: the tensor's name.
        datatypes: accepted KServe datatypes; metadata shows the first.
        shape: the shape in metadata; -1 stands for any extent.
        optional: a request may leave an input out. An optional output is answered only if the request names it.
        kind: what the numbers of an output are; see ``Output.kind``. Empty: metadata does not say.
    """

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
    kind: str = ""

    def metadata(self) -> dict[str, Any]:
        """KServe's ``metadata_tensor`` object."""
        parameters = {"parameters": {"kind": self.kind}} if self.kind else {}
        return {"name": self.name, "datatype": self.datatypes[0], "shape": list(self.shape), **parameters}


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of one model.

    Attributes:
        inputs: the inputs.
        outputs: the outputs.
        allows_others: a request may have other inputs of any name and datatype.
        rankings: the outputs with the best candidates, which metadata does not list. A request asks for them with the
            parameter ``top_k``.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    allows_others: bool = False
    rankings: tuple[TensorSpec, ...] = ()

    def outputs_of_none(self, ranks: bool) -> Iterator[TensorSpec]:
        """Return the outputs of an answer if the request names none, and whether it asks for the best candidates."""
        return (spec for spec in (self.rankings if ranks else self.outputs) if not spec.optional)

    def input(self, name: str, path: str) -> TensorSpec:
        """The input called ``name``; a RequestError at ``<path>.name`` that lists the inputs if there is none."""
        if self.allows_others and all(spec.name != name for spec in self.inputs):
            return TensorSpec(name, tuple(DTYPES), (-1,), optional=True)
        return _find(self.inputs, name, path, "input")

    def output(self, name: str, path: str) -> TensorSpec:
        """The output called ``name``; a RequestError at ``<path>.name`` that lists the outputs if there is none."""
        return _find((*self.outputs, *self.rankings), name, path, "output")


def _find(specs: tuple[TensorSpec, ...], name: str, path: str, role: str) -> TensorSpec:
    for spec in specs:
        if spec.name == name:
            return spec
    names = [spec.name for spec in specs]
    close = did_you_mean(name, names)
    raise RequestError(f"{path}.name: the model has no {role} {name[:64]!r}; it has {quoted(names)}{close}")


def key_datatypes(key_type: KeyType) -> tuple[str, ...]:
    """Return the datatypes of a tensor of keys; the model's own comes first."""
    return ("INT64", "UINT32") if key_type == "I64" else ("UINT32", "INT64")


def config_document(name: str, signature: Signature, parameters: dict[str, str]) -> dict[str, Any]:
    """Return a model's configuration as Triton's ``ModelConfig``; batches are part of the tensors' shapes."""
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [{**_declared(spec), "optional": spec.optional} for spec in signature.inputs],
        "output": [_declared(spec) for spec in signature.outputs],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


def _declared(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": f"TYPE_{spec.datatypes[0]}", "dims": list(spec.shape)}


def quoted(names: Iterable[str]) -> str:
    """Names for a message: ``'A', 'B'``."""
    return ", ".join(repr(name) for name in names)


def array_from_numbers(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], path: str) -> Array:
    """Turn JSON numbers, as one flat list or nested like ``shape``, into an array; anything else is a RequestError."""
    numbers = _flatten(data, shape, path)
    wanted = math.prod(shape)
    if len(numbers) != wanted:
        raise RequestError(f"{path}: shape {list(shape)} needs {wanted:,} numbers, but {len(numbers):,} came")
    if not set(map(type, numbers)) <= _NUMBERS[dtype.kind]:
        raise _wrong_number(numbers, dtype, path)
    try:
        with np.errstate(over="ignore"):
            array = np.array(numbers, dtype=dtype)
    except OverflowError as err:
        raise _wrong_number(numbers, dtype, path) from err
    if dtype.kind == "f" and np.isinf(array).any():
        raise _wrong_number(numbers, dtype, path)
    return array.reshape(shape)


def tensor_from_json(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], path: str) -> Tensor:
    """Turn the JSON of a tensor, one flat list or nested like ``shape``, into the tensor; else a RequestError."""
    return _texts_from_json(data, shape, path) if dtype.kind == "O" else array_from_numbers(data, dtype, shape, path)


def _texts_from_json(data: Any, shape: tuple[int, ...], path: str) -> TextTensor:
    """Turn JSON strings, as one flat list or nested like ``shape``, into a tensor; anything else is a RequestError."""
    items = _flatten(data, shape, path)
    if len(items) != math.prod(shape):
        raise RequestError(f"{path}: shape {list(shape)} needs {math.prod(shape):,} strings, but {len(items):,} came")
    for index, item in enumerate(items):
        if type(item) is not str:
            raise RequestError(f"{path}[{index}]: expected a string, but {json_kind(item)} came")
    return TextTensor(joined_texts([item.encode() for item in items]), shape)


def _texts_from_bytes(data: Any, shape: tuple[int, ...], path: str) -> TextTensor:
    """Turn the bytes of a BYTES tensor, uint32 lengths each with its text, into a tensor, without a copy."""
    content, wanted = np.frombuffer(data, np.uint8), math.prod(shape)
    found = find_texts(content, wanted)
    if isinstance(found, int):
        raise _wrong_texts(found, shape, path)
    return TextTensor(Texts(content, *found), shape)


def _wrong_texts(found: int, shape: Sequence[int], path: str) -> RequestError:
    """Return the error of bytes with fewer texts than a tensor, or with more bytes."""
    wanted = math.prod(shape)
    came = "more bytes follow" if found > wanted else f"the bytes end after {found:,}"
    return RequestError(f"{path}: shape {list(shape)} needs {wanted:,} strings, but {came}")


def tensor_from_bytes(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], path: str) -> Tensor:
    """Turn the bytes of a tensor, which have its size, into the tensor, without a copy if they are aligned."""
    if dtype.kind == "O":
        return _texts_from_bytes(data, shape, path)
    if dtype.kind == "b":  # a client's byte may be neither 0 nor 1
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(shape)
    array = np.frombuffer(data, dtype)
    return (array if array.flags.aligned else array.copy()).reshape(shape)


def json_numbers(array: Array, output: str) -> Array:
    """Return an output's floats for JSON.

    Raises:
        RequestError: one of them is not finite; JSON has no such numbers.
    """
    is_finite = np.isfinite(array)
    if not is_finite.all():
        at = int(np.argmin(is_finite))
        number = array.reshape(-1)[at]
        reason = f"number {at:,} of the answer is {number}, which JSON does not have"
        raise RequestError(f"{output}: {reason}; ask for binary data: outputs[].parameters.binary_data")
    return array


def _flatten(data: Any, shape: tuple[int, ...], path: str) -> list[Any]:
    if type(data) is not list:
        raise RequestError(f"{path}: expected a list of numbers, but {json_kind(data)} came")
    if not data or type(data[0]) is not list:
        return data
    level = [data]
    for extent in shape[:-1]:
        if any(type(item) is not list or len(item) != extent for item in level):
            break
        level = list(chain.from_iterable(level))
    else:
        if all(type(item) is list and len(item) == shape[-1] for item in level):
            return list(chain.from_iterable(level))
    raise RequestError(_misfit(data, shape, path))


def _misfit(data: Any, extents: tuple[int, ...], path: str) -> str:
    """Return which list is not nested like a shape, for a message; an empty text if all are."""
    if type(data) is not list or len(data) != extents[0]:
        came = f"a list of {len(data):,}" if type(data) is list else json_kind(data)
        return f"{path}: the shape needs a list of {extents[0]:,}, but {came} came"
    deeper = (_misfit(item, extents[1:], f"{path}[{at}]") for at, item in enumerate(data)) if extents[1:] else ()
    return next(filter(None, deeper), "")


def _wrong_number(numbers: list[Any], dtype: np.dtype[Any], path: str) -> RequestError:
    """Return the error for the first number that does not fit; the list is known to have such a number."""
    if dtype.kind == "b":
        at = next(index for index, number in enumerate(numbers) if type(number) is not bool)
        return RequestError(f"{path}[{at}]: expected true or false, but {json_kind(numbers[at])} came")
    bounds = None if dtype.kind == "f" else np.iinfo(dtype)
    for index, number in enumerate(numbers):
        where = f"{path}[{index}]"
        if type(number) not in _NUMBERS[dtype.kind]:
            wanted = "a number" if bounds is None else f"a whole number from {bounds.min} to {bounds.max}"
            return RequestError(f"{where}: expected {wanted}, but {json_kind(number)} came")
        if bounds is not None and not bounds.min <= number <= bounds.max:
            return RequestError(f"{where}: {number} is not a {dtype.name} (from {bounds.min} to {bounds.max})")
        if bounds is None and abs(number) > LARGEST_FLOAT32:
            return RequestError(f"{where}: {number} is too large for a {dtype.name}")
    return RequestError(f"{path}: the numbers do not fit {dtype.name}")


def json_kind(value: Any) -> str:
    """Name the kind of a JSON value in JSON's terms."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"the number {value}"
    kinds: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return kinds[type(value)]
