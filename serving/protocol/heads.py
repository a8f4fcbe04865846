"""The head of an infer request: what it says of its tensors, whichever protocol carries it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from serving.errors import RequestError
from serving.outputs import Asked
from serving.protocol.request import InferRequest, OutputRequest
from serving.protocol.shared_memory import RegionPart, SharedMemory, located
from serving.protocol.tensors import Tensor, tensor_from_bytes

#: Most heads, and most bytes of a head, that a decoder remembers for one model.
MOST_HEADS = 64
MOST_HEAD_BYTES = 16_384  # a model with 40 raw features has 4 KB
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeadInput:
    """One input as the head describes it.

    Attributes:
        name: the tensor's name.
        path: its path in the head.
        dtype: its dtype.
        shape: its shape.
        numbers: the tensor if it is in the head.
        size_bytes: how many bytes of it follow the head; 0 if they are elsewhere.
        part: where in shared memory its numbers are.
    """

    name: str
    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    numbers: Tensor | None
    size_bytes: int
    part: RegionPart | None = None

    @property
    def place(self) -> str:
        """Its name and path, for messages."""
        return f"{self.name} ({self.path})"


@dataclass(frozen=True, slots=True)
class Head:
    """A head, checked. See ``InferRequest`` for what is not described here.

    Attributes:
        inputs: the inputs, in their order.
    """

    id: str
    inputs: tuple[HeadInput, ...]
    outputs: tuple[OutputRequest, ...]
    places: Mapping[str, str]
    asked: Asked
    timeout_us: int
    wants_freshness: bool

    @property
    def size_bytes(self) -> int:
        """How many bytes of tensors must follow it."""
        return sum(tensor.size_bytes for tensor in self.inputs)

    @property
    def has_no_numbers(self) -> bool:
        """Whether no tensor is in it, so that other requests may have the same head."""
        return all(tensor.numbers is None for tensor in self.inputs)

    @property
    def is_binary(self) -> bool:
        """Whether all tensors follow it."""
        return all(tensor.numbers is None and tensor.part is None for tensor in self.inputs)

    def request(self, request_id: str, inputs: Mapping[str, Tensor]) -> InferRequest:
        """Return a request that has this head."""
        options = self.asked, self.timeout_us, self.wants_freshness
        return InferRequest(request_id, inputs, self.outputs, self.places, *options)

    def arrays(self, body: bytes, offset: int, regions: SharedMemory) -> dict[str, Tensor]:
        """Return all inputs by name; those that follow the head must use up ``body`` from ``offset`` on exactly.

        They are views of ``body``, or copies where they are not aligned.
        """
        arrays: dict[str, Tensor] = {}
        for tensor in self.inputs:
            if tensor.numbers is not None:
                arrays[tensor.name] = tensor.numbers
                continue
            if tensor.part is not None:
                with located(tensor.place):
                    data: Any = regions.read(tensor.part)
            else:
                if tensor.size_bytes > len(body) - offset:
                    came = f"{tensor.size_bytes:,} bytes are announced, but {len(body) - offset:,} are left"
                    raise RequestError(f"{tensor.place}: {came}")
                data = memoryview(body)[offset : offset + tensor.size_bytes]
                offset += tensor.size_bytes
            arrays[tensor.name] = tensor_from_bytes(data, tensor.dtype, tensor.shape, tensor.place)
        if offset != len(body):
            raise RequestError(f"{len(body) - offset:,} bytes follow the last tensor's data")
        return arrays


def remember(known: dict[bytes, T], text: bytes, found: T) -> T:
    """Remember what was found for a text, and return it."""
    if len(known) >= MOST_HEADS:
        known.clear()
    known[text] = found
    return found
