"""KServe v2 ``infer``: bytes to named arrays, and arrays back to bytes.

A body is a JSON document, optionally followed by the raw little-endian bytes of the tensors that announce
``binary_data_size``, in their order (KServe v2's binary tensor data extension). Then the HTTP header
``Inference-Header-Content-Length`` says how long the JSON part is. A tensor may also be in a region of shared memory
(Triton's shared memory extension).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

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
    """The JSON part of a request, checked; ``is_reusable`` if other requests may begin with the same bytes.

    ``layout`` says where the tensors are if all of them follow the JSON part.
    """

    id: str
    inputs: tuple[_Input, ...]
    layout: BodyLayout | None
    outputs: tuple[OutputRequest, ...]
    places: Mapping[str, str]
    asked: Asked
    timeout_us: int
    wants_freshness: bool
    is_reusable: bool


class InferDecoder:
    """Decodes the requests for one model. May be used from any thread.

    A client that sends many batches usually repeats the same JSON part, and reading it takes most of the decoding time.
    So the decoder remembers the latest short JSON parts.
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
        self._heads: dict[bytes, _Head] = {}

    def decode(self, body: bytes, header_bytes: str | None) -> InferRequest:
        """Decode an infer request.

        Args:
            body: the whole body, already decompressed.
            header_bytes: value of ``Inference-Header-Content-Length``, or None if the body is only JSON.

        Raises:
            RequestError: anything is wrong with the request; the message starts with the tensor or JSON path.
        """
        json_bytes = len(body) if header_bytes is None else _json_bytes(header_bytes, len(body))
        if json_bytes > self._MOST_HEAD_BYTES:
            head = _read_head(body[:json_bytes], self._signature, self._bounds)
        else:
            head = self._remembered(body[:json_bytes])
        inputs: Mapping[str, Tensor]
        if head.layout is not None and head.layout.size_bytes == len(body) - json_bytes:
            inputs = BodyTensors(head.layout, body, json_bytes)
        else:
            inputs = _arrays(head, body, json_bytes, self._regions)
        options = head.asked, head.timeout_us, head.wants_freshness
        return InferRequest(head.id, inputs, head.outputs, head.places, *options)

    def _remembered(self, text: bytes) -> _Head:
        head = self._heads.get(text)
        if head is None:
            head = _read_head(text, self._signature, self._bounds)
            if head.is_reusable:
                if len(self._heads) >= self._MOST_HEADS:
                    self._heads.clear()
                self._heads[text] = head
        return head


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
    layout = _layout_of(inputs)
    return _Head(request_id, tuple(inputs.values()), layout, outputs, places, *options, is_reusable)


def _layout_of(inputs: Mapping[str, _Input]) -> BodyLayout | None:
    """Return where tensors are, or None if some of them are elsewhere."""
    tensors: dict[str, BodyTensor] = {}
    begin = 0
    for number, tensor in enumerate(inputs.values()):
        if tensor.numbers is not None or tensor.part is not None:
            return None
        place = f"{tensor.name} ({tensor.path})"
        tensors[tensor.name] = BodyTensor(number, tensor.dtype, tensor.shape, begin, tensor.size_bytes, place)
        begin += tensor.size_bytes
    return BodyLayout(tensors)


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
