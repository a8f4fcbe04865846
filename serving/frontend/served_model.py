"""One loaded model as the requests of every protocol see it."""

from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Protocol, TypeVar

from serving.batch import Batch
from serving.metrics import ModelStatistics, RequestMetrics
from serving.protocol.ctr import PROBABILITIES, batch_of, signature_of
from serving.protocol.infer import InferDecoder
from serving.protocol.request import InferRequest
from serving.protocol.shared_memory import SharedMemory
from serving.protocol.tensors import Array, Signature
from serving.routes import Prediction
from serving.session import InferenceSession

_T_co = TypeVar("_T_co", covariant=True)


@dataclass(slots=True)
class Stopwatch:
    """When a request passed the stages of ``ModelStatistics``.

    Attributes:
        times_ns: when it arrived, and when each stage ended.
        samples: its batch size, once it is known.
    """

    times_ns: list[int] = field(default_factory=list)
    samples: int = 0

    def note(self) -> None:
        """Note that the request has arrived, or that a stage has ended."""
        self.times_ns.append(perf_counter_ns())


class ServedModel:
    """One loaded model as requests see it. Requests may come from any thread.

    Attributes:
        name: the model's name.
        version: the version that is served.
        session: answers batches.
        signature: the tensors of its requests and answers.
        decoder: reads KServe v2 requests over HTTP.
        statistics: how long its requests took.
    """

    def __init__(self, name: str, session: InferenceSession, metrics: RequestMetrics, regions: SharedMemory) -> None:
        """Serve ``session`` under ``name``; the tensors of its requests may be in ``regions``."""
        self.name = name
        self.session = session
        self.version = str(session.config.version)
        self.signature: Signature = signature_of(session.config)
        self.decoder = InferDecoder(self.signature, regions)
        self.statistics = ModelStatistics()
        self._metrics = metrics

    def read(self, request: InferRequest) -> Batch:
        """Check the arrays of a decoded KServe v2 request."""
        with request.locating_errors():
            return batch_of(self.session.config, request.inputs)

    def answer(self, batch: Batch) -> Prediction:
        """Predict and count the samples."""
        prediction = self.session.predict_batch(batch)
        self._metrics.predicted(self.name, batch.samples)
        return prediction

    def outputs(self, prediction: Prediction) -> tuple[dict[str, Array], dict[str, int]]:
        """Return an answer as arrays by output name, and the answer's parameters."""
        return {PROBABILITIES: prediction.probabilities}, {"defaulted_keys": prediction.defaulted_keys}


class Exchange(Protocol[_T_co]):
    """One request in the form of its protocol. Both methods run in the same thread, one after the other."""

    def read(self, model: ServedModel) -> Batch:
        """Decode and check the request.

        Raises:
            RequestError: the request cannot be answered.
        """

    def write(self, model: ServedModel, prediction: Prediction) -> _T_co:
        """Encode the answer."""
