"""KServe v2 ``infer`` in protobuf: messages to named arrays, and arrays back to messages.

A tensor's numbers are in ``raw_input_contents`` (little-endian bytes, one entry per tensor without contents of its
own), in its ``contents``, or in a region of shared memory. Answers are always raw or in shared memory, as Triton's.
"""

import math
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from serving.errors import RequestError
from serving.features import joined_texts
from serving.protocol.bounds import DEFAULT_BOUNDS, Bounds
from serving.protocol.request import (
    REGION,
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
from serving.protocol.tensors import DATATYPES, Array, Signature, Tensor, TextTensor, tensor_from_bytes

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


def decode_message(
    message: Any, signature: Signature, regions: SharedMemory, bounds: Bounds = DEFAULT_BOUNDS
) -> InferRequest:
    """Decode a ``ModelInferRequest``.

    Args:
        message: the message.
        signature: of the model.
        regions: where tensors may be.
        bounds: of the tensors there.

    Raises:
        RequestError: anything is wrong with the request; the message starts with the tensor or the field.
    """
    raw = iter(message.raw_input_contents)
    inputs: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    parts: list[RegionPart] = []
    for index, tensor in enumerate(message.inputs):
        path = f"inputs[{index}]"
        spec = signature.input(tensor.name, path)
        if spec.name in inputs:
            raise RequestError(f"{path}.name: tensor {spec.name!r} came twice")
        dtype = checked_datatype(tensor.datatype, spec, path)
        shape = checked_shape(tensor.shape, path)
        with located(f"{spec.name} ({path})"):
            part = region_part(_parameters(tensor), f"{path}.parameters")
            if part is None:
                inputs[spec.name] = _numbers(tensor, raw, dtype, shape)
            elif tensor.HasField("contents"):
                raise RequestError("a tensor in shared memory has no contents")
            else:
                if dtype.kind != "O":  # texts have their own lengths
                    check_part_size(part, dtype, shape, path)
                parts.append(part)
                check_parts(parts, bounds)
                inputs[spec.name] = tensor_from_bytes(regions.read(part), dtype, shape, path)
        places[spec.name] = path
    if next(raw, None) is not None:
        raise RequestError("raw_input_contents: more entries than tensors without contents")
    check_inputs(inputs, signature)
    parameters = _parameters(message)
    outputs = _outputs(message, signature, "top_k" in parameters)
    options = asked_for(outputs, parameters, signature), timeout_of(parameters), wants_freshness(parameters)
    return InferRequest(message.id, inputs, outputs, places, *options)


def _numbers(tensor: Any, raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if tensor.HasField("contents"):
        wanted = _CONTENTS[tensor.datatype]
        came = [field.name for field, _ in tensor.contents.ListFields()]
        if came not in ([], [wanted]):
            reason = f"{tensor.datatype} needs {wanted} and nothing else, but {' and '.join(came)} came"
            raise RequestError(f"contents: {reason}")
        numbers = getattr(tensor.contents, wanted)
        if len(numbers) != count:
            reason = f"shape {list(shape)} needs {count:,} numbers, but {len(numbers):,} came"
            raise RequestError(f"contents.{wanted}: {reason}")
        if dtype.kind == "O":
            return TextTensor(joined_texts(numbers), shape)
        return np.array(numbers, dtype).reshape(shape)
    data = next(raw, None)
    if data is None:
        raise RequestError("neither contents, raw_input_contents nor shared memory is there")
    if dtype.kind != "O" and len(data) != count * dtype.itemsize:
        needed = f"shape {list(shape)} of {tensor.datatype} needs {count * dtype.itemsize:,} bytes"
        raise RequestError(f"raw_input_contents: {needed}, but {len(data):,} came")
    return tensor_from_bytes(data, dtype, shape, "raw_input_contents")


def has_parts(message: Any) -> bool:
    """Whether a tensor of a ``ModelInferRequest`` is in shared memory."""
    return any(REGION in tensor.parameters for tensors in (message.inputs, message.outputs) for tensor in tensors)


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
