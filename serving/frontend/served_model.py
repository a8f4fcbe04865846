"""One loaded model as the requests of every protocol see it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.config import ModelConfig
from serving.lookup import LookupResult
from serving.lookup_model import LookupModelSession
from serving.metrics import ModelStatistics
from serving.parameter_server.health import ModelHealth
from serving.protocol import ctr, lookup
from serving.protocol.tensors import Array, Signature
from serving.routes import Prediction
from serving.session import InferenceSession

_T = TypeVar("_T")
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
        statistics: how long its requests took.
        can_merge: whether the questions of several requests may be answered together.
        never_waits: an answer waits for no disk, network, GPU or other process.
    """

    can_merge = True
    never_waits = False

    def __init__(self, config: ModelConfig, signature: Signature, health: ModelHealth) -> None:
        """Describe a model; ``health`` counts its requests."""
        self.name = config.name
        self.version = str(config.version)
        self.config = config
        self.signature = signature
        self.statistics = ModelStatistics()
        self._health = health

    def answer(self, questions: Sequence[Any]) -> Sequence[Any]:
        """Answer one question, or several together if ``can_merge``.

        If several questions have no answer, answer each alone. Only then it counts as failed.

        Raises:
            HotrowError: no question has an answer; one of the questions may be the reason.
        """
        try:
            answers = self._answer(questions)
        except Exception as err:
            if len(questions) == 1:
                self._health.request_failed(err)
            raise
        self._health.succeeded(len(questions))
        return answers

    @abstractmethod
    def read(self, inputs: dict[str, Array]) -> Any:
        """Check the arrays of a request, which have the datatypes of ``signature``, and return the question.

        Raises:
            RequestError: an array is wrong; the message begins with the tensor's name.
        """

    @abstractmethod
    def samples(self, question: Any) -> int:
        """Return the batch size of a question."""

    @abstractmethod
    def answer_floats(self, question: Any) -> int:
        """Return how many numbers the answer to a question has."""

    @abstractmethod
    def keys(self, question: Any) -> Sequence[NDArray[np.int64]]:
        """Return the keys that a question has of each table."""

    @abstractmethod
    def _answer(self, questions: Sequence[Any]) -> Sequence[Any]:
        """See ``answer``."""

    @abstractmethod
    def outputs(self, answer: Any) -> Outputs:
        """Return an answer as arrays by output name, and the answer's parameters."""

    @abstractmethod
    def triton_config(self) -> dict[str, Any]:
        """Return the model's configuration as Triton's ``ModelConfig``."""


class PredictModel(ServedModel):
    """A model with a dense network: batches in, probabilities out."""

    def __init__(self, session: InferenceSession) -> None:
        """Serve ``session``."""
        super().__init__(session.config, ctr.signature_of(session.config), session.health)
        self._session = session
        self.can_merge = not session.graph.mixes_samples
        self.never_waits = session.never_waits

    def read(self, inputs: dict[str, Array]) -> Batch:
        """See ``ServedModel.read``."""
        return ctr.batch_of(self.config, inputs)

    def samples(self, question: Batch) -> int:
        """See ``ServedModel.samples``."""
        return question.samples

    def answer_floats(self, question: Batch) -> int:
        """See ``ServedModel.answer_floats``."""
        return question.samples * self.config.label_dim

    def keys(self, question: Batch) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.keys``."""
        return [of_table.keys for of_table in question.tables]

    def _answer(self, questions: Sequence[Batch]) -> Sequence[Prediction]:
        if len(questions) == 1:
            return [self._session.predict_batch(questions[0])]
        return self._session.predict_batches(questions)

    def outputs(self, answer: Prediction) -> Outputs:
        """See ``ServedModel.outputs``."""
        return {ctr.PROBABILITIES: answer.probabilities}, {"defaulted_keys": answer.defaulted_keys}

    def triton_config(self) -> dict[str, Any]:
        """See ``ServedModel.triton_config``."""
        return ctr.triton_config(self.name, self.config)


class LookupModel(ServedModel):
    """A model without a dense network: keys in, rows out."""

    def __init__(self, session: LookupModelSession) -> None:
        """Serve ``session``."""
        super().__init__(session.config, lookup.signature_of(session.config), session.health)
        self._session = session
        self.never_waits = session.never_waits

    def read(self, inputs: dict[str, Array]) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.read``."""
        return lookup.keys_of(self.config, inputs)

    def samples(self, question: Sequence[NDArray[np.int64]]) -> int:
        """See ``ServedModel.samples``; the keys may be those of more samples."""
        return lookup.least_samples(self.config, question)

    def answer_floats(self, question: Sequence[NDArray[np.int64]]) -> int:
        """See ``ServedModel.answer_floats``."""
        return sum(keys.size * table.dim for keys, table in zip(question, self.config.tables, strict=True))

    def keys(self, question: Sequence[NDArray[np.int64]]) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.keys``."""
        return question

    def _answer(self, questions: Sequence[Sequence[NDArray[np.int64]]]) -> Sequence[LookupResult]:
        if len(questions) == 1:
            return [self._session.lookup(questions[0])]
        return self._session.lookup_together(questions)

    def outputs(self, answer: LookupResult) -> Outputs:
        """See ``ServedModel.outputs``."""
        return {lookup.ROWS: lookup.answer_of(answer.embeddings)}, {"defaulted_keys": answer.defaulted_keys}

    def triton_config(self) -> dict[str, Any]:
        """See ``ServedModel.triton_config``."""
        return lookup.triton_config(self.name, self.config)


def served_model(session: InferenceSession | LookupModelSession) -> ServedModel:
    """Return the model of a session."""
    return LookupModel(session) if isinstance(session, LookupModelSession) else PredictModel(session)


def batches(requests: Iterable[_T], samples: Callable[[_T], int], max_samples: int) -> Iterator[list[_T]]:
    """Divide requests into batches of neighbours with at most ``max_samples`` samples; a larger request is alone."""
    batch: list[_T] = []
    total = 0
    for one in requests:
        if batch and total + samples(one) > max_samples:
            yield batch
            batch, total = [], 0
        batch.append(one)
        total += samples(one)
    if batch:
        yield batch


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
