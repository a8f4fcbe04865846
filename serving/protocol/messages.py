"""KServe v2 ``infer`` in protobuf: messages to named arrays, and arrays back to messages.

A tensor's numbers are in ``raw_input_contents`` (little-endian bytes, one entry per tensor without contents of its
own), in its ``contents``, or in a region of shared memory. Answers are always raw or in shared memory, as Triton's.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from kernels.host import split_message
from serving.errors import PayloadTooLargeError, RequestError
from serving.features import joined_texts
from serving.protocol.bounds import DEFAULT_BOUNDS, Bounds
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
    TextTensor,
)

_MOST_FIELDS = 10_000
#: The field of ``InferTensorContents`` that has the numbers of a datatype.
_CONTENTS = {
    "FP32": "fp32_contents",
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "UINT32": "uint_contents",
    "FP64": "fp64_contents",
    "BOOL": "bool_contents",
    "BYTES": "bytes_contents",
}


class InferMessage(NamedTuple):
    """A ``ModelInferRequest``, of which only what every request needs is read.

    Attributes:
        data: the message.
        head: its bytes except the id and the raw contents; they say how many bytes each of these contents has.
        model_name: the model's name.
        model_version: the model's version, empty for the newest.
        id: the request's id.
        contents: the raw contents, one after another.
    """

    data: bytes
    head: bytes
    model_name: str
    model_version: str
    id: str
    contents: bytes


def read_message(data: bytes) -> InferMessage:
    """Take a message apart. An empty tensor takes two bytes of it, and hundreds of bytes and a microsecond if parsed.

    Raises:
        PayloadTooLargeError: it has too many fields, including those of its tensors and of their contents.
        DecodeError: it is not a ``ModelInferRequest``.
    """
    fields, parts = split_message(data, _MOST_FIELDS)
    if fields > _MOST_FIELDS:
        reason = f"more than the {_MOST_FIELDS:,} fields that the server accepts in one message"
        raise PayloadTooLargeError(f"the request has {reason}; large tensors belong in raw_input_contents")
    if parts is None:
        message = service_pb2.ModelInferRequest.FromString(data)
        message.DiscardUnknownFields()  # groups
        data = message.SerializeToString()
        _, parts = split_message(data, _MOST_FIELDS)
    assert parts is not None
    return InferMessage(data, *parts)


class MessageDecoder:
    """Decodes the messages for one model. May be used from any thread.

    A client often repeats the head of its messages, so the decoder remembers the latest short heads.
    """

    def __init__(
        self, signature: Signature, regions: SharedMemory | None = None, bounds: Bounds = DEFAULT_BOUNDS
    ) -> None:
        """Decode messages within ``bounds`` for a model with this signature, whose tensors may be in ``regions``."""
        self._signature = signature
        self._bounds = bounds
        self._regions = regions or SharedMemory()
        self._heads: dict[bytes, tuple[Head, BodyShapes | None]] = {}

    def decode(self, message: InferMessage) -> InferRequest:
        """Decode a message.

        Raises:
            RequestError: anything is wrong with the request; the text starts with the tensor or the field.
        """
        head, shapes = self._heads.get(message.head) or self._head_of(message)
        if shapes is None:
            return head.request(message.id, head.arrays(message.contents, 0, self._regions))
        return head.request(message.id, BodyTensors(shapes, message.contents, 0))

    def _head_of(self, message: InferMessage) -> tuple[Head, BodyShapes | None]:
        """Return a head that is not remembered, and the shapes of its tensors if all are in the raw contents."""
        try:
            parsed = service_pb2.ModelInferRequest.FromString(message.data)
        except DecodeError as err:  # a text in it is not UTF-8
            raise RequestError(str(err)) from err
        head = _read_head(parsed, self._signature, self._bounds)
        found = head, _shapes(head) if head.is_binary else None
        if len(message.head) > MOST_HEAD_BYTES or not head.has_no_numbers:
            return found
        return remember(self._heads, message.head, found)


def _shapes(head: Head) -> BodyShapes | None:
    numbers: list[int] = []
    tensors: dict[str, BodyTensor] = {}
    for number, tensor in enumerate(head.inputs):
        first, extents = len(numbers), len(tensor.shape)
        tensors[tensor.name] = BodyTensor(number, tensor.dtype, first, extents, first + extents, tensor.place)
        numbers += [*tensor.shape, tensor.size_bytes]
    return BodyLayout(tensors).shaped(np.array(numbers, np.int64), head.size_bytes)


def _read_head(message: Any, signature: Signature, bounds: Bounds) -> Head:
    raw = iter(message.raw_input_contents)
    inputs: dict[str, HeadInput] = {}
    for index, tensor in enumerate(message.inputs):
        path = f"inputs[{index}]"
        spec = signature.input(tensor.name, path)
        if spec.name in inputs:
            raise RequestError(f"{path}.name: tensor {spec.name!r} came twice")
        try:
            dtype, shape = checked_datatype(tensor.datatype, spec, path), checked_shape(tensor.shape, path)
        except RequestError as err:
            raise of_input(spec.name, err) from err
        with located(f"{spec.name} ({path})"):
            inputs[spec.name] = _read_input(tensor, raw, path, dtype, shape)
        check_parts((tensor.part for tensor in inputs.values()), bounds)
    if next(raw, None) is not None:
        raise RequestError("raw_input_contents: more entries than tensors without contents")
    check_inputs(inputs, signature)
    parameters = _parameters(message)
    outputs = _outputs(message, signature, "top_k" in parameters)
    options = asked_for(outputs, parameters, signature), timeout_of(parameters), wants_freshness(parameters)
    return Head("", tuple(inputs.values()), outputs, {name: one.path for name, one in inputs.items()}, *options)


def _read_input(
    tensor: Any, raw: Iterator[bytes], path: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> HeadInput:
    """Read what follows an input's shape; ``raw`` are the raw contents that no input before it has."""
    part = region_part(_parameters(tensor), f"{path}.parameters")
    has_contents = tensor.HasField("contents")
    if part is not None:
        if has_contents:
            raise RequestError("a tensor in shared memory has no contents")
        if dtype.kind != "O":  # texts have their own lengths
            check_part_size(part, dtype, shape, path)
        return HeadInput(tensor.name, path, dtype, shape, None, 0, part)
    if has_contents:
        return HeadInput(tensor.name, path, dtype, shape, _numbers(tensor, dtype, shape), 0)
    data = next(raw, None)
    if data is None:
        raise RequestError("neither contents, raw_input_contents nor shared memory is there")
    needed_bytes = math.prod(shape) * dtype.itemsize
    if dtype.kind != "O" and len(data) != needed_bytes:
        needed = f"shape {list(shape)} of {tensor.datatype} needs {needed_bytes:,} bytes"
        raise RequestError(f"raw_input_contents: {needed}, but {len(data):,} came")
    return HeadInput(tensor.name, path, dtype, shape, None, len(data))


def _numbers(tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
    """Return the tensor in ``contents``."""
    wanted = _CONTENTS[tensor.datatype]
    came = [field.name for field, _ in tensor.contents.ListFields()]
    if came not in ([], [wanted]):
        reason = f"{tensor.datatype} needs {wanted} and nothing else, but {' and '.join(came)} came"
        raise RequestError(f"contents: {reason}")
    numbers, count = getattr(tensor.contents, wanted), math.prod(shape)
    if len(numbers) != count:
        reason = f"shape {list(shape)} needs {count:,} numbers, but {len(numbers):,} came"
        raise RequestError(f"contents.{wanted}: {reason}")
    if dtype.kind == "O":
        return TextTensor(joined_texts(numbers), shape)
    return np.array(numbers, dtype).reshape(shape)


def _outputs(message: Any, signature: Signature, ranks: bool) -> tuple[OutputRequest, ...]:
    if not message.outputs:
        return tuple(OutputRequest(spec.name, True) for spec in signature.outputs_of_none(ranks))
    wanted: list[OutputRequest] = []
    for index, output in enumerate(message.outputs):
        path, parameters = f"outputs[{index}]", _parameters(output)
        check_output(output.name, parameters, wanted, path, signature)
        wanted.append(OutputRequest(output.name, True, region_part(parameters, f"{path}.parameters")))
    return tuple(wanted)


def _parameters(holder: Any) -> dict[str, Any]:
    return {name: chosen(value, f"parameters.{name}") for name, value in holder.parameters.items()}


def chosen(value: Any, path: str) -> Any:
    """Return the value of a parameter or of a setting, whichever type it has.

    Raises:
        RequestError: it has no value.
    """
    field = value.WhichOneof("parameter_choice")
    if field is None:
        raise RequestError(f"{path[:64]}: expected a value, but none came")
    return getattr(value, field)


def encode_message(
    request: InferRequest,
    model: str,
    version: str,
    outputs: dict[str, Array],
    parameters: dict[str, int],
    regions: SharedMemory,
) -> Any:
    """Return the ``ModelInferResponse`` to ``request``; ``outputs`` has C-contiguous arrays by output name.

    Raises:
        RequestError: an output does not fit its region of ``regions``.
    """
    answer = service_pb2.ModelInferResponse(model_name=model, model_version=version, id=request.id)
    for name, value in parameters.items():
        answer.parameters[name].int64_param = value
    for wanted in request.outputs:
        array = outputs[wanted.name]
        answer.outputs.add(name=wanted.name, datatype=DATATYPES[array.dtype], shape=array.shape)
        data = array.tobytes()
        if wanted.part is not None:
            with located(f"outputs: {wanted.name}"):
                regions.write(wanted.part, data)
            data = b""  # clients find an output's bytes by its position
        answer.raw_output_contents.append(data)
    return answer
