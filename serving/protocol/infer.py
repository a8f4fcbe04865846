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
from serving.protocol.bounds import DEFAULT_BOUNDS, Bounds
from serving.protocol.document import checked, known_only, optional, parse_document, required
from serving.protocol.heads import MOST_HEAD_BYTES, Head, HeadInput, remember
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
    of_input,
    region_part,
    timeout_of,
    wants_freshness,
)
from serving.protocol.shared_memory import SharedMemory, located
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
    tensor_from_json,
)

# The members in KServe v2; ``parameters`` may hold anything.
_REQUEST_MEMBERS = frozenset({"id", "parameters", "inputs", "outputs"})
_INPUT_MEMBERS = frozenset({"name", "shape", "datatype", "parameters", "data"})
_OUTPUT_MEMBERS = frozenset({"name", "parameters"})
T = TypeVar("T")


class _KnownForm(NamedTuple):
    """A head that other requests may have with other shapes and sizes of tensors.

    Attributes:
        head: the head. The numbers that describe the tensors of its layout are those of the JSON part.
        layout: its layout.
        others: which of these numbers describe no tensors.
        values: their values, which must be the same.
    """

    head: Head
    layout: BodyLayout
    others: NDArray[np.int64]
    values: NDArray[np.int64]


class InferDecoder:
    """Decodes the requests for one model. May be used from any thread.

    A client that sends many batches often repeats the same JSON part, or its shapes and sizes alone are others. Reading
    a JSON part takes most of the decoding time. So the decoder remembers the latest short JSON parts, and their forms:
    the texts without their numbers.
    """

    def __init__(
        self, signature: Signature, regions: SharedMemory | None = None, bounds: Bounds = DEFAULT_BOUNDS
    ) -> None:
        """Decode requests within ``bounds`` for a model with this signature, whose tensors may be in ``regions``."""
        self._signature = signature
        self._bounds = bounds
        self._regions = regions or SharedMemory()
        self._heads: dict[bytes, tuple[Head, BodyShapes | None]] = {}
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
            inputs = head.arrays(body, json_bytes, self._regions)
        elif shapes.size_bytes == size_bytes:
            inputs = BodyTensors(shapes, body, json_bytes)
        else:
            inputs = _read_head(text, self._signature, self._bounds).arrays(body, json_bytes, self._regions)
        return head.request(head.id, inputs)

    def _head_of(self, text: bytes, size_bytes: int) -> tuple[Head, BodyShapes | None]:
        """Return a head that is not remembered, and the shapes of the tensors if these follow it in so many bytes."""
        is_short = len(text) <= MOST_HEAD_BYTES
        if is_short:
            form, numbers = numbers_in_json(text)
            known = self._forms.get(form)
            if known is not None and np.array_equal(numbers[known.others], known.values):
                shapes = known.layout.shaped(numbers, size_bytes)
                if shapes is not None:
                    return remember(self._heads, text, (known.head, shapes))
        head = _read_head(text, self._signature, self._bounds)
        is_remembered = is_short and head.has_no_numbers and not head.id
        if not head.is_binary:
            return remember(self._heads, text, (head, None)) if is_remembered else (head, None)
        if head.size_bytes != size_bytes:
            return head, None
        form, numbers = numbers_in_json(text)
        known = _known_form(head, text, numbers)
        if is_remembered:
            remember(self._forms, form, known)
        return head, known.layout.shaped(numbers, size_bytes)


def _known_form(head: Head, text: bytes, numbers: NDArray[np.int64]) -> _KnownForm:
    """Return the form of a head whose tensors follow it."""
    document = orjson.loads(numbers_in_json(text, True)[0])  # each number is its place among the numbers
    tensors: dict[str, BodyTensor] = {}
    others = set(range(numbers.size))
    for number, (tensor, entry) in enumerate(zip(head.inputs, document["inputs"], strict=True)):
        first, extents, size = entry["shape"][0], len(tensor.shape), entry["parameters"]["binary_data_size"]
        others -= {*range(first, first + extents), size}
        tensors[tensor.name] = BodyTensor(number, tensor.dtype, first, extents, size, tensor.place)
    places = np.array(sorted(others), np.int64)
    return _KnownForm(head, BodyLayout(tensors), places, numbers[places])


def _json_bytes(text: str, body_bytes: int) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise RequestError(f"Inference-Header-Content-Length: expected a number of bytes, but {text[:32]!r} came")
    if int(text) > body_bytes:
        raise RequestError(f"Inference-Header-Content-Length: {int(text):,} bytes, but the body has {body_bytes:,}")
    return int(text)


def _read_head(text: bytes, signature: Signature, bounds: Bounds) -> Head:
    document = parse_document(text, bounds)
    known_only(document, _REQUEST_MEMBERS, "")
    parameters: dict[str, Any] = optional(document, "parameters", dict, {}, "")
    binary_outputs = optional(parameters, "binary_data_output", bool, False, "parameters")
    request_id = optional(document, "id", str, "", "")
    inputs: dict[str, HeadInput] = {}
    for index, entry in enumerate(required(document, "inputs", list, "")):
        tensor = _read_input(checked(entry, dict, f"inputs[{index}]"), f"inputs[{index}]", signature)
        if tensor.name in inputs:
            raise RequestError(f"inputs[{index}].name: tensor {tensor.name!r} came twice")
        inputs[tensor.name] = tensor
    check_inputs(inputs, signature)
    check_parts((tensor.part for tensor in inputs.values()), bounds)
    outputs = _outputs(document, binary_outputs, signature, "top_k" in parameters)
    asked = asked_for(outputs, parameters, signature)
    places = {name: tensor.path if tensor.numbers is None else f"{tensor.path}.data" for name, tensor in inputs.items()}
    options = asked, timeout_of(parameters), wants_freshness(parameters)
    return Head(request_id, tuple(inputs.values()), outputs, places, *options)


def _read_input(tensor: dict[str, Any], path: str, signature: Signature) -> HeadInput:
    known_only(tensor, _INPUT_MEMBERS, path)
    name = required(tensor, "name", str, path)
    spec = signature.input(name, path)
    try:
        return _read_described(tensor, path, spec)
    except RequestError as err:
        raise of_input(name, err) from err


def _read_described(tensor: dict[str, Any], path: str, spec: TensorSpec) -> HeadInput:
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
        return HeadInput(spec.name, path, dtype, shape, None, 0, part)
    if "binary_data_size" not in parameters:
        if "data" not in tensor:
            raise RequestError(f"{path}: expected data or parameters.binary_data_size, but neither came")
        values = tensor_from_json(tensor["data"], dtype, shape, f"{path}.data")
        return HeadInput(spec.name, path, dtype, shape, values, 0)
    if "data" in tensor:
        raise RequestError(f"{path}: expected data or parameters.binary_data_size, but both came")
    size_bytes = checked(parameters["binary_data_size"], int, f"{path}.parameters.binary_data_size")
    needed_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < 0 or (dtype.kind != "O" and size_bytes != needed_bytes):
        needed = f"shape {list(shape)} of {datatype} needs {needed_bytes:,} bytes"
        raise RequestError(f"{path}.parameters.binary_data_size: {needed}, but {size_bytes:,} are announced")
    return HeadInput(spec.name, path, dtype, shape, None, size_bytes)


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
