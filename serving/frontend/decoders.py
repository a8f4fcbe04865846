"""The decoders of one protocol, one for each served model."""

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from serving.protocol.bounds import Bounds
from serving.protocol.shared_memory import SharedMemory
from serving.protocol.tensors import Signature
from serving.repository import ServedModel

D = TypeVar("D")


class Decoders(Generic[D]):
    """The decoder of each served model; each decoder remembers what the model's clients repeat.

    Attributes:
        regions: may hold tensors.
        bounds: of the requests and their answers.
    """

    def __init__(
        self, kind: Callable[[Signature, SharedMemory, Bounds], D], regions: SharedMemory, bounds: Bounds
    ) -> None:
        """Decode requests within ``bounds``, whose tensors may be in ``regions``, with decoders of a kind."""
        self.regions = regions
        self.bounds = bounds
        self._kind = kind
        self._decoders: WeakKeyDictionary[ServedModel, D] = WeakKeyDictionary()

    def of(self, model: ServedModel) -> D:
        """Return the decoder of a model."""
        decoder = self._decoders.get(model)
        if decoder is None:
            decoder = self._decoders[model] = self._kind(model.signature, self.regions, self.bounds)
        return decoder
