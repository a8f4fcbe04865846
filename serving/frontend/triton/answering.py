"""How a model answers the requests that Triton hands over together: in one lookup, split into exact parts."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.batch import INT32_MAX, Batch, join_batches
from serving.lookup_model import LookupModelSession
from serving.protocol import ctr, lookup
from serving.protocol.tensors import Array, Signature
from serving.session import InferenceSession

Answers = list[NDArray[np.float32]]
TableKeys = list[NDArray[np.int64]]


class Answering(Protocol):
    """Reads and answers the requests of one model. A read request is a ``Batch``, or each table's keys."""

    @property
    def signature(self) -> Signature:
        """The model's tensors."""

    @property
    def largest_group(self) -> int:
        """The largest sum of ``size`` over requests that are answered together."""

    def read(self, inputs: dict[str, Array]) -> Any:
        """Check the arrays of one request.

        Raises:
            RequestError: an array is wrong.
        """

    def size(self, request: Any) -> int:
        """Return the number of a request's samples or keys."""

    def answer(self, requests: Sequence[Any]) -> Answers:
        """Answer requests together, or none of them.

        Raises:
            HotrowError: a request cannot be answered.
        """


class Predicting:
    """Answers with the probabilities of a session."""

    def __init__(self, session: InferenceSession) -> None:
        """Requests are answered together unless their samples would affect each other."""
        self._session = session
        self.signature = ctr.signature_of(session.config)
        self.largest_group = 0 if session.graph.mixes_samples else session.config.max_batchsize

    def read(self, inputs: dict[str, Array]) -> Batch:
        """See ``Answering.read``."""
        return ctr.batch_of(self._session.config, inputs)

    def size(self, request: Batch) -> int:
        """See ``Answering.size``."""
        return request.samples

    def answer(self, requests: Sequence[Batch]) -> Answers:
        """See ``Answering.answer``."""
        joined = requests[0] if len(requests) == 1 else join_batches(requests)
        return _split(self._session.predict_batch(joined).probabilities, [one.samples for one in requests])


class LookingUp:
    """Answers with the rows of a model that is only looked up."""

    def __init__(self, session: LookupModelSession) -> None:
        """Answer from the tables of ``session``."""
        self._session = session
        self._config = session.config
        self.signature = lookup.signature_of(session.config)
        limits = [table.max_keys_per_sample or INT32_MAX for table in session.config.tables]
        self.largest_group = min(session.config.max_batchsize * sum(limits), INT32_MAX)

    def read(self, inputs: dict[str, Array]) -> TableKeys:
        """See ``Answering.read``."""
        return lookup.keys_of(self._config, inputs)

    def size(self, request: TableKeys) -> int:
        """See ``Answering.size``."""
        return sum(keys.size for keys in request)

    def answer(self, requests: Sequence[TableKeys]) -> Answers:
        """See ``Answering.answer``."""
        by_table = list(zip(*requests, strict=True))
        rows = self._session.lookup([np.concatenate(of_table) for of_table in by_table]).embeddings
        parts = [
            _split(of_table, [keys.size for keys in given]) for of_table, given in zip(rows, by_table, strict=True)
        ]
        return [lookup.answer_of(of_request) for of_request in zip(*parts, strict=True)]


def groups(places: Sequence[int], size: Callable[[int], int], largest: int) -> Iterator[list[int]]:
    """Divide places into groups of neighbours whose sizes add up to at most ``largest``; a group is never empty."""
    group: list[int] = []
    total = 0
    for place in places:
        total += size(place)
        if group and total > largest:
            yield group
            group, total = [], size(place)
        group.append(place)
    if group:
        yield group


def _split(array: NDArray[np.float32], sizes: Sequence[int]) -> Answers:
    return np.split(array, list(accumulate(sizes[:-1])))
