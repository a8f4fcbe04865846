"""One loaded model as the requests of every protocol see it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.config import ModelConfig
from serving.lookup import LookupResult
from serving.lookup_model import LookupModelSession
from serving.metrics import ModelStatistics, RequestMetrics
from serving.protocol import ctr, lookup
from serving.protocol.infer import InferDecoder
from serving.protocol.request import InferRequest
from serving.protocol.shared_memory import SharedMemory
from serving.protocol.tensors import Array, Signature
from serving.routes import Prediction
from serving.session import InferenceSession

_T_co = TypeVar("_T_co", covariant=True)
Outputs = tuple[dict[str, Array], dict[str, int]]


@dataclass(slots=True)
class Stopwatch:
    """When a request passed the stages of ``ModelStatistics``.

    Attributes:
        times_ns: when it arrived, and when each stage ended.
        samples: its batch size, once it is known.
        batch_samples: the size of the batch that it was the first request of; 0 if it was not the first.
    """

    times_ns: list[int] = field(default_factory=list)
    samples: int = 0
    batch_samples: int = 0

    def note(self) -> None:
        """Note that the request has arrived, or that a stage has ended."""
        self.times_ns.append(perf_counter_ns())


class ServedModel(ABC):
    """One loaded model as requests see it. Requests may come from any thread.

    A request is read into a question, the question is answered, and the answer becomes the request's outputs.

    Attributes:
        name: the model's name.
        version: the version that is served.
        config: the model.
        signature: the tensors of its requests and answers.
        decoder: reads KServe v2 requests over HTTP.
        statistics: how long its requests took.
        can_merge: whether the questions of several requests may be answered together.
    """

    can_merge = False

    def __init__(self, config: ModelConfig, signature: Signature, regions: SharedMemory) -> None:
        """Describe a model; the tensors of its requests may be in ``regions``."""
        self.name = config.name
        self.version = str(config.version)
        self.config = config
        self.signature = signature
        self.decoder = InferDecoder(signature, regions)
        self.statistics = ModelStatistics()

    @abstractmethod
    def read(self, request: InferRequest) -> Any:
        """Check the arrays of a decoded KServe v2 request, and return the question."""

    @abstractmethod
    def samples(self, question: Any) -> int:
        """Return the batch size of a question."""

    @abstractmethod
    def keys(self, question: Any) -> Sequence[NDArray[np.int64]]:
        """Return the keys that a question has of each table."""

    @abstractmethod
    def answer(self, question: Any) -> Any:
        """Answer a question."""

    def answer_together(self, questions: Sequence[Any]) -> Sequence[Any]:
        """Answer the questions of several requests as one, if ``can_merge``; an error is about all of them."""
        return [self.answer(question) for question in questions]

    @abstractmethod
    def outputs(self, answer: Any) -> Outputs:
        """Return an answer as arrays by output name, and the answer's parameters."""

    @abstractmethod
    def triton_config(self) -> dict[str, Any]:
        """Return the model's configuration as Triton's ``ModelConfig``."""


class PredictModel(ServedModel):
    """A model with a dense network: batches in, probabilities out."""

    def __init__(self, session: InferenceSession, metrics: RequestMetrics, regions: SharedMemory) -> None:
        """Serve ``session``."""
        super().__init__(session.config, ctr.signature_of(session.config), regions)
        self._session = session
        self._metrics = metrics
        self.can_merge = not session.graph.mixes_samples

    def read(self, request: InferRequest) -> Batch:
        """See ``ServedModel.read``."""
        with request.locating_errors():
            return ctr.batch_of(self.config, request.inputs)

    def samples(self, question: Batch) -> int:
        """See ``ServedModel.samples``."""
        return question.samples

    def keys(self, question: Batch) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.keys``."""
        return [of_table.keys for of_table in question.tables]

    def answer(self, question: Batch) -> Prediction:
        """See ``ServedModel.answer``; counts the samples."""
        prediction = self._session.predict_batch(question)
        self._metrics.predicted(self.name, question.samples)
        return prediction

    def answer_together(self, questions: Sequence[Batch]) -> Sequence[Prediction]:
        """See ``ServedModel.answer_together``."""
        predictions = self._session.predict_batches(questions)
        self._metrics.predicted(self.name, sum(question.samples for question in questions))
        return predictions

    def outputs(self, answer: Prediction) -> Outputs:
        """See ``ServedModel.outputs``."""
        return {ctr.PROBABILITIES: answer.probabilities}, {"defaulted_keys": answer.defaulted_keys}

    def triton_config(self) -> dict[str, Any]:
        """See ``ServedModel.triton_config``."""
        return ctr.triton_config(self.name, self.config)


class LookupModel(ServedModel):
    """A model without a dense network: keys in, rows out."""

    def __init__(self, session: LookupModelSession, regions: SharedMemory) -> None:
        """Serve ``session``."""
        super().__init__(session.config, lookup.signature_of(session.config), regions)
        self._session = session

    def read(self, request: InferRequest) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.read``."""
        with request.locating_errors():
            return lookup.keys_of(self.config, request.inputs)

    def samples(self, _question: Any) -> int:
        """See ``ServedModel.samples``; keys belong to no sample, so a request counts as one."""
        return 1

    def keys(self, question: Sequence[NDArray[np.int64]]) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.keys``."""
        return question

    def answer(self, question: Sequence[NDArray[np.int64]]) -> LookupResult:
        """See ``ServedModel.answer``."""
        return self._session.lookup(question)

    def outputs(self, answer: LookupResult) -> Outputs:
        """See ``ServedModel.outputs``."""
        return {lookup.ROWS: lookup.answer_of(answer.embeddings)}, {"defaulted_keys": answer.defaulted_keys}

    def triton_config(self) -> dict[str, Any]:
        """See ``ServedModel.triton_config``."""
        return lookup.triton_config(self.name, self.config)


class Exchange(Protocol[_T_co]):
    """One request in the form of its protocol. Both methods run in the same thread, one after the other."""

    @property
    def timeout_us(self) -> int:
        """Once the request was read: how many microseconds it may wait for its turn; 0: as long as it takes."""

    def read(self, model: ServedModel) -> Any:
        """Decode and check the request, and return the question.

        Raises:
            RequestError: the request cannot be answered.
        """

    def write(self, model: ServedModel, answer: Any) -> _T_co:
        """Encode the answer."""
