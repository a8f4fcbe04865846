"""KServe v2 ``infer``: bytes to named arrays, and arrays back to bytes.

A body is a JSON document, optionally followed by the raw little-endian bytes of the tensors that announce
``binary_data_size``, in their order (KServe v2's binary tensor data extension). Then the HTTP header
``Inference-Header-Content-Length`` says how long the JSON part is. A tensor may also be in a region of shared memory
(Triton's shared memory extension).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from kernels.host import numbers_in_json
from serving.errors import RequestError
from serving.outputs import Asked
from serving.protocol.bounds import DEFAULT_BOUNDS, Bounds
from serving.protocol.document import checked, known_only, optional, parse_document, required
from serving.protocol.request import (
    InferRequest,
    OutputRequest,
    asked_for,
    check_inputs,
    check_output,
    check_part_size,
    check_parts,
    checked_datatype,
    checked_shape,
    region_part,
    timeout_of,
    wants_freshness,
)
from serving.protocol.shared_memory import RegionPart, SharedMemory, located
from serving.protocol.tensors import (
    DATATYPES,
    Array,
    BodyLayout,
    BodyShapes,
    BodyTensor,
    BodyTensors,
    Signature,
    Tensor,
    TensorSpec,
    json_numbers,
    tensor_from_bytes,
    tensor_from_json,
)

# The members in KServe v2; ``parameters`` may hold anything.
_REQUEST_MEMBERS = frozenset({"id", "parameters", "inputs", "outputs"})
_INPUT_MEMBERS = frozenset({"name", "shape", "datatype", "parameters", "data"})
_OUTPUT_MEMBERS = frozenset({"name", "parameters"})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Input:
    """One input as the JSON part describes it.

    Attributes:
        name: the tensor's name.
        path: its JSON path.
        dtype: its dtype.
        shape: its shape.
        numbers: the tensor if it is in the JSON part.
        size_bytes: how many bytes of it follow the JSON part; 0 if they are elsewhere.
        part: where in shared memory its numbers are.
    """

    name: str
    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    numbers: Tensor | None
    size_bytes: int
    part: RegionPart | None = None


@dataclass(frozen=True, slots=True)
class _Head:
    """The JSON part of a request, checked.

    Attributes:
        is_reusable: other requests may begin with the same bytes.
        is_binary: all tensors follow it.
    """

    id: str
    inputs: tuple[_Input, ...]
    outputs: tuple[OutputRequest, ...]
    places: Mapping[str, str]
    asked: Asked
    timeout_us: int
    wants_freshness: bool
    is_reusable: bool
    is_binary: bool


class _KnownForm(NamedTuple):
    """A head that other requests may have with other shapes and sizes of tensors.

    Attributes:
        head: the head. The numbers that describe the tensors of its layout are those of the JSON part.
        layout: its layout.
        others: which of these numbers describe no tensors.
        values: their values, which must be the same.
    """

    head: _Head
    layout: BodyLayout
    others: NDArray[np.int64]
    values: NDArray[np.int64]


class InferDecoder:
    """Decodes the requests for one model. May be used from any thread.

    A client that sends many batches often repeats the same JSON part, or its shapes and sizes alone are others. Reading
    a JSON part takes most of the decoding time. So the decoder remembers the latest short JSON parts, and their forms:
    the texts without their numbers.
    """

    _MOST_HEADS = 64
    _MOST_HEAD_BYTES = 16_384  # a model with 40 raw features has 4 KB

    def __init__(
        self, signature: Signature, regions: SharedMemory | None = None, bounds: Bounds = DEFAULT_BOUNDS
    ) -> None:
        """Decode requests within ``bounds`` for a model with this signature, whose tensors may be in ``regions``."""
        self._signature = signature
        self._bounds = bounds
        self._regions = regions or SharedMemory()
        self._heads: dict[bytes, tuple[_Head, BodyShapes | None]] = {}
        self._forms: dict[bytes, _KnownForm] = {}

    def decode(self, body: bytes, header_bytes: str | None) -> InferRequest:
        """Decode an infer request.

        Args:
            body: the whole body, already decompressed.
            header_bytes: value of ``Inference-Header-Content-Length``, or None if the body is only JSON.

        Raises:
            RequestError: anything is wrong with the request; the message starts with the tensor or JSON path.
        """
        json_bytes = len(body) if header_bytes is None else _json_bytes(header_bytes, len(body))
        text, size_bytes = body[:json_bytes], len(body) - json_bytes
        head, shapes = self._heads.get(text) or self._head_of(text, size_bytes)
        inputs: Mapping[str, Tensor]
        if shapes is None:
            inputs = _arrays(head, body, json_bytes, self._regions)
        elif shapes.size_bytes == size_bytes:
            inputs = BodyTensors(shapes, body, json_bytes)
        else:
            inputs = _arrays(_read_head(text, self._signature, self._bounds), body, json_bytes, self._regions)
        options = head.asked, head.timeout_us, head.wants_freshness
        return InferRequest(head.id, inputs, head.outputs, head.places, *options)

    def _head_of(self, text: bytes, size_bytes: int) -> tuple[_Head, BodyShapes | None]:
        """Return a head that is not remembered, and the shapes of the tensors if these follow it in so many bytes."""
        is_short = len(text) <= self._MOST_HEAD_BYTES
        if is_short:
            form, numbers = numbers_in_json(text)
            known = self._forms.get(form)
            if known is not None and np.array_equal(numbers[known.others], known.values):
                shapes = known.layout.shaped(numbers, size_bytes)
                if shapes is not None:
                    return _put(self._heads, text, (known.head, shapes), self._MOST_HEADS)
        head = _read_head(text, self._signature, self._bounds)
        is_remembered = is_short and head.is_reusable
        if not head.is_binary:
            return _put(self._heads, text, (head, None), self._MOST_HEADS) if is_remembered else (head, None)
        if sum(tensor.size_bytes for tensor in head.inputs) != size_bytes:
            return head, None
        form, numbers = numbers_in_json(text)
        known = _known_form(head, text, numbers)
        if is_remembered:
            _put(self._forms, form, known, self._MOST_HEADS)
        return head, known.layout.shaped(numbers, size_bytes)


def _put(remembered: dict[bytes, T], text: bytes, found: T, most: int) -> T:
    """Remember what was found for a text, and return it."""
    if len(remembered) >= most:
        remembered.clear()
    remembered[text] = found
    return found


def _known_form(head: _Head, text: bytes, numbers: NDArray[np.int64]) -> _KnownForm:
    """Return the form of a head whose tensors follow it."""
    document = orjson.loads(numbers_in_json(text, True)[0])  # each number is its place among the numbers
    tensors: dict[str, BodyTensor] = {}
    others = set(range(numbers.size))
    for number, (tensor, entry) in enumerate(zip(head.inputs, document["inputs"], strict=True)):
        first, extents, size = entry["shape"][0], len(tensor.shape), entry["parameters"]["binary_data_size"]
        others -= {*range(first, first + extents), size}
        place = f"{tensor.name} ({tensor.path})"
        tensors[tensor.name] = BodyTensor(number, tensor.dtype, first, extents, size, place)
    places = np.array(sorted(others), np.int64)
    return _KnownForm(head, BodyLayout(tensors), places, numbers[places])


def _json_bytes(text: str, body_bytes: int) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise RequestError(f"Inference-Header-Content-Length: expected a number of bytes, but {text[:32]!r} came")
    if int(text) > body_bytes:
        raise RequestError(f"Inference-Header-Content-Length: {int(text):,} bytes, but the body has {body_bytes:,}")
    return int(text)


def _read_head(text: bytes, signature: Signature, bounds: Bounds) -> _Head:
    document = parse_document(text, bounds)
    known_only(document, _REQUEST_MEMBERS, "")
    parameters: dict[str, Any] = optional(document, "parameters", dict, {}, "")
    binary_outputs = optional(parameters, "binary_data_output", bool, False, "parameters")
    request_id = optional(document, "id", str, "", "")
    inputs: dict[str, _Input] = {}
    for index, entry in enumerate(required(document, "inputs", list, "")):
        tensor = _read_input(checked(entry, dict, f"inputs[{index}]"), f"inputs[{index}]", signature)
        if tensor.name in inputs:
            raise RequestError(f"inputs[{index}].name: tensor {tensor.name!r} came twice")
        inputs[tensor.name] = tensor
    check_inputs(inputs, signature)
    check_parts((tensor.part for tensor in inputs.values()), bounds)
    outputs = _outputs(document, binary_outputs, signature, "top_k" in parameters)
    asked = asked_for(outputs, parameters, signature)
    is_reusable = not request_id and all(tensor.numbers is None for tensor in inputs.values())
    places = {name: tensor.path if tensor.numbers is None else f"{tensor.path}.data" for name, tensor in inputs.items()}
    options = asked, timeout_of(parameters), wants_freshness(parameters)
    is_binary = all(tensor.numbers is None and tensor.part is None for tensor in inputs.values())
    return _Head(request_id, tuple(inputs.values()), outputs, places, *options, is_reusable, is_binary)


def _read_input(tensor: dict[str, Any], path: str, signature: Signature) -> _Input:
    known_only(tensor, _INPUT_MEMBERS, path)
    name = required(tensor, "name", str, path)
    spec = signature.input(name, path)
    try:
        return _read_described(tensor, path, spec)
    except RequestError as err:
        place, _, reason = str(err).partition(": ")
        raise RequestError(f"{name} ({place}): {reason}") from err


def _read_described(tensor: dict[str, Any], path: str, spec: TensorSpec) -> _Input:
    """Read what follows an input's name; errors begin with their JSON path."""
    datatype = required(tensor, "datatype", str, path)
    dtype = checked_datatype(datatype, spec, path)
    shape = checked_shape(required(tensor, "shape", list, path), path)
    parameters: dict[str, Any] = optional(tensor, "parameters", dict, {}, path)
    part = region_part(parameters, f"{path}.parameters")
    if part is not None:
        if "data" in tensor or "binary_data_size" in parameters:
            raise RequestError(f"{path}: a tensor in shared memory has neither data nor binary_data_size")
        if dtype.kind != "O":  # texts have their own lengths
            check_part_size(part, dtype, shape, path)
        return _Input(spec.name, path, dtype, shape, None, 0, part)
    if "binary_data_size" not in parameters:
        if "data" not in tensor:
            raise RequestError(f"{path}: expected data or parameters.binary_data_size, but neither came")
        values = tensor_from_json(tensor["data"], dtype, shape, f"{path}.data")
        return _Input(spec.name, path, dtype, shape, values, 0)
    if "data" in tensor:
        raise RequestError(f"{path}: expected data or parameters.binary_data_size, but both came")
    size_bytes = checked(parameters["binary_data_size"], int, f"{path}.parameters.binary_data_size")
    needed_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < 0 or (dtype.kind != "O" and size_bytes != needed_bytes):
        needed = f"shape {list(shape)} of {datatype} needs {needed_bytes:,} bytes"
        raise RequestError(f"{path}.parameters.binary_data_size: {needed}, but {size_bytes:,} are announced")
    return _Input(spec.name, path, dtype, shape, None, size_bytes)


def _arrays(head: _Head, body: bytes, offset: int, regions: SharedMemory) -> dict[str, Tensor]:
    """Return all inputs by name; binary inputs must use up ``body`` from ``offset`` on exactly.

    Binary inputs are views of ``body``, or copies if the JSON part's length leaves them unaligned.
    """
    arrays: dict[str, Tensor] = {}
    for tensor in head.inputs:
        place = f"{tensor.name} ({tensor.path})"
        if tensor.numbers is not None:
            arrays[tensor.name] = tensor.numbers
            continue
        if tensor.part is not None:
            with located(place):
                data: Any = regions.read(tensor.part)
        else:
            if tensor.size_bytes > len(body) - offset:
                came = f"{tensor.size_bytes:,} bytes are announced, but {len(body) - offset:,} are left"
                raise RequestError(f"{place}: {came}")
            data = memoryview(body)[offset : offset + tensor.size_bytes]
            offset += tensor.size_bytes
        arrays[tensor.name] = tensor_from_bytes(data, tensor.dtype, tensor.shape, place)
    if offset != len(body):
        raise RequestError(f"{len(body) - offset:,} bytes follow the last tensor's data")
    return arrays


def _outputs(
    document: dict[str, Any], binary_default: bool, signature: Signature, ranks: bool
) -> tuple[OutputRequest, ...]:
    entries: list[Any] = optional(document, "outputs", list, [], "")
    if not entries:
        return tuple(OutputRequest(spec.name, binary_default) for spec in signature.outputs_of_none(ranks))
    wanted: list[OutputRequest] = []
    for index, entry in enumerate(entries):
        path = f"outputs[{index}]"
        output = checked(entry, dict, path)
        known_only(output, _OUTPUT_MEMBERS, path)
        name = required(output, "name", str, path)
        parameters: dict[str, Any] = optional(output, "parameters", dict, {}, path)
        check_output(name, parameters, wanted, path, signature)
        is_binary = optional(parameters, "binary_data", bool, binary_default, f"{path}.parameters")
        wanted.append(OutputRequest(name, is_binary, region_part(parameters, f"{path}.parameters")))
    return tuple(wanted)


@dataclass(frozen=True, slots=True)
class EncodedAnswer:
    """An encoded answer.

    Attributes:
        body: the bytes to send.
        json_bytes: length of the JSON part, for ``Inference-Header-Content-Length``; None if the body is only JSON.
    """

    body: bytes
    json_bytes: int | None


def encode_infer(
    request: InferRequest,
    model: str,
    version: str,
    outputs: dict[str, Array],
    parameters: dict[str, Any],
    regions: SharedMemory | None = None,
) -> EncodedAnswer:
    """Encode the answer to ``request``; ``outputs`` has C-contiguous arrays by output name.

    Raises:
        RequestError: an output does not fit its region of ``regions``, or has a number that JSON does not have.
    """
    entries: list[dict[str, Any]] = []
    tails: list[bytes] = []
    for wanted in request.outputs:
        array = outputs[wanted.name]
        datatype = DATATYPES[array.dtype]
        entry: dict[str, Any] = {"name": wanted.name, "datatype": datatype, "shape": list(array.shape)}
        if wanted.part is not None and regions is not None:
            with located(f"outputs: {wanted.name}"):
                regions.write(wanted.part, array.tobytes())  # an answer has no parameters for it, as Triton's has none
        elif wanted.binary:
            tails.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            entry["data"] = json_numbers(array.reshape(-1), wanted.name)
        entries.append(entry)
    document: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id:
        document["id"] = request.id
    document["parameters"] = parameters
    document["outputs"] = entries
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return EncodedAnswer(b"".join([head, *tails]), len(head)) if tails else EncodedAnswer(head, None)
