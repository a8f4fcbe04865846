"""A decoded KServe v2 ``infer`` request, whatever carried it, and the checks that all forms share."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.errors import PayloadTooLargeError, RequestError
from serving.outputs import NOTHING, Asked
from serving.protocol.bounds import Bounds
from serving.protocol.document import checked, optional, required
from serving.protocol.shared_memory import RegionPart
from serving.protocol.tensors import DTYPES, Signature, Tensor, TensorSpec, json_kind, quoted

_LARGEST_EXTENT = 2**31 - 1
REGION = "shared_memory_region"
#: The bytes of a request with a tensor in shared memory contain this name, unless JSON escapes hide it.
SHARED_MEMORY_REGION = REGION.encode()
#: Most bytes of a float32 in JSON, with the comma.
JSON_NUMBER_BYTES = 16


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """One output that the client wants: as raw bytes, as JSON numbers, or in a region of shared memory."""

    name: str
    binary: bool
    part: RegionPart | None = None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded request.

    Attributes:
        id: the client's id, returned in the answer; empty if the client sent none.
        inputs: tensors by name. Those in the body are read-only views of it, aligned for their dtype.
        outputs: the outputs to answer, in the client's order; all outputs if the client named none.
        places: JSON path of each tensor's numbers, by tensor name.
        asked: what of the model's answer they need.
        timeout_us: how many microseconds the request may wait before it is begun; 0: as long as it takes.
        wants_freshness: the answer's parameters say how new the rows are.
    """

    id: str
    inputs: Mapping[str, Tensor]
    outputs: tuple[OutputRequest, ...]
    places: Mapping[str, str]
    asked: Asked = NOTHING
    timeout_us: int = 0
    wants_freshness: bool = False

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Add the tensor's place to errors that start with its name: ``DES (inputs[0].data): ...``."""
        try:
            yield
        except RequestError as err:
            name, _, reason = str(err).partition(": ")
            if name not in self.places:
                raise
            raise RequestError(f"{name} ({self.places[name]}): {reason}") from err

    def check_answer(self, floats: Callable[[str], int], bounds: Bounds) -> None:
        """Refuse a request whose answer would be too large, before any of it is made.

        Args:
            floats: returns how many numbers an output has.
            bounds: of the answer.
        """
        counts = [floats(output.name) for output in self.outputs]
        of_number = [4 if output.binary or output.part else JSON_NUMBER_BYTES for output in self.outputs]
        size_bytes = sum(count * size for count, size in zip(counts, of_number, strict=True))
        bounds.check_answer("outputs", max(counts), size_bytes)


def asked_for(outputs: Sequence[OutputRequest], parameters: dict[str, Any], signature: Signature) -> Asked:
    """Return what a request asks for: the names of the model's outputs, and the parameters of its best candidates.

    Raises:
        RequestError: the parameters or the outputs ask for the best candidates, but not both.
    """
    rankings = [spec.name for spec in signature.rankings]
    names = [output.name for output in outputs if output.name not in rankings]
    has_rankings = len(names) < len(outputs)
    if "top_k" not in parameters:
        if has_rankings:
            raise RequestError(f"outputs: {rankings[0]} and {rankings[1]} need parameters.top_k")
        return Asked(names, None, optional(parameters, "top_output", str, "", "parameters"))
    if not rankings:
        raise RequestError("parameters.top_k: the model has no dense network, so it ranks no candidates")
    if not has_rankings:
        raise RequestError(f"parameters.top_k: the outputs have neither {rankings[0]} nor {rankings[1]}")
    top_k = required(parameters, "top_k", int, "parameters")
    return Asked(names, top_k, optional(parameters, "top_output", str, "", "parameters"))


def timeout_of(parameters: dict[str, Any]) -> int:
    """Return the request's parameter ``timeout`` in microseconds, 0 without one."""
    timeout_us = optional(parameters, "timeout", int, 0, "parameters")
    if timeout_us < 0:
        raise RequestError(f"parameters.timeout: expected 0 or more microseconds, got {timeout_us}")
    return timeout_us


def wants_freshness(parameters: dict[str, Any]) -> bool:
    """Return the request's parameter ``freshness``, false without one."""
    return optional(parameters, "freshness", bool, False, "parameters")


def region_part(parameters: dict[str, Any], path: str) -> RegionPart | None:
    """Return where in shared memory a tensor is, or None."""
    if REGION not in parameters:
        return None
    name = checked(parameters[REGION], str, f"{path}.{REGION}")
    size = required(parameters, "shared_memory_byte_size", int, path)
    offset = optional(parameters, "shared_memory_offset", int, 0, path)
    for key, value in (("shared_memory_byte_size", size), ("shared_memory_offset", offset)):
        if value < 0:
            raise RequestError(f"{path}.{key}: expected 0 or more, got {value}")
    return RegionPart(name, offset, size)


def check_part_size(part: RegionPart, dtype: np.dtype[Any], shape: tuple[int, ...], path: str) -> None:
    """Refuse a part that is smaller or larger than its tensor."""
    needed = math.prod(shape) * dtype.itemsize
    if part.size_bytes != needed:
        reason = f"shape {list(shape)} needs {needed:,} bytes, but {part.size_bytes:,} are announced"
        raise RequestError(f"{path}.parameters.shared_memory_byte_size: {reason}")


def check_parts(parts: Iterable[RegionPart | None], bounds: Bounds) -> None:
    """Refuse tensors in shared memory that are too large together, before they are read."""
    size_bytes = sum(part.size_bytes for part in parts if part is not None)
    if size_bytes > bounds.max_tensor_bytes:
        raise PayloadTooLargeError(
            f"inputs: the tensors in shared memory have {size_bytes:,} bytes, "
            f"but the server accepts {bounds.max_tensor_bytes:,}"
        )


def checked_shape(extents: Sequence[Any], path: str) -> tuple[int, ...]:
    """Return a tensor's shape, which has 1 to 8 extents; NumPy refuses a shape of too many elements even with a 0."""
    if not 1 <= len(extents) <= 8:
        raise RequestError(f"{path}.shape: expected 1 to 8 extents, but {len(extents):,} came")
    for index, extent in enumerate(extents):
        if type(extent) is not int or not 0 <= extent <= _LARGEST_EXTENT:
            expected = f"expected a whole number from 0 to {_LARGEST_EXTENT}"
            raise RequestError(f"{path}.shape[{index}]: {expected}, but {json_kind(extent)} came")
    if math.prod(extent or 1 for extent in extents) > _LARGEST_EXTENT:
        reason = f"expected a product of extents other than 0 of at most {_LARGEST_EXTENT}"
        raise RequestError(f"{path}.shape: {reason}, but {list(extents)} came")
    return tuple(extents)


def checked_datatype(datatype: str, spec: TensorSpec, path: str) -> np.dtype[Any]:
    """Return the dtype of an input's datatype, which must be one that the model takes."""
    if datatype not in spec.datatypes:
        accepted = " or ".join(spec.datatypes)
        raise RequestError(f"{path}.datatype: expected {accepted}, but {datatype[:32]!r} came")
    return DTYPES[datatype]


def of_input(name: str, error: RequestError) -> RequestError:
    """Return an error, which begins with a path, with the name of the input."""
    path, _, reason = str(error).partition(": ")
    return RequestError(f"{name} ({path}): {reason}")


def check_inputs(names: Collection[str], signature: Signature) -> None:
    """Refuse a request in which an input is missing."""
    missing = [spec.name for spec in signature.inputs if spec.name not in names and not spec.optional]
    if missing:
        raise RequestError(f"inputs: missing {quoted(missing)}")


def check_output(
    name: str, parameters: dict[str, Any], earlier: Iterable[OutputRequest], path: str, signature: Signature
) -> None:
    """Refuse an output that the model does not have, that is requested twice, or that must be classified."""
    signature.output(name, path)
    if any(name == other.name for other in earlier):
        raise RequestError(f"{path}.name: output {name!r} is requested twice")
    if "classification" in parameters:
        raise RequestError(f"{path}.parameters.classification: not supported")
