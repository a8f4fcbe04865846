"""One request of any protocol from its arrival to its written answer: the steps that all front ends share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.config import ModelConfig
from serving.errors import DeadlineError
from serving.repository import ServedModel
from serving.session import ModelSession
from serving.stages import listening

if TYPE_CHECKING:
    from serving.frontend.tracing import RequestTrace
    from serving.protocol.request import InferRequest  # which Triton's backend does not need

Record = Callable[[ModelConfig, Sequence[NDArray[np.int64]]], None]
Log = Callable[[ModelSession, Any, Any, str], None]

#: Merging requests with larger answers saves no time.
_LARGE_ANSWER_FLOATS = 1 << 18


class Exchange(ABC):
    """One request in the form of its protocol, and its answer. A protocol defines ``read`` and ``write``.

    Attributes:
        times_ns: when it arrived, and when each stage of ``ModelStatistics`` ended.
        samples: its batch size, once it is known.
        batch_samples: the size of the batch that it was the first request of; 0 if it was not the first.
        deadline_s: when its client gives up, by ``perf_counter``; None: never.
        record: records its keys of each table; None: they are not recorded.
        log: logs it with its answer; None: it is not logged.
        request_id: its id; "" if it needs none.
        trace: its trace; None: it has none.
        question: what ``read`` returned.
        written: what ``write`` returned.
        error: why ``answer_together`` could not answer it.
    """

    samples = batch_samples = 0
    deadline_s: float | None = None
    record: Record | None = None
    log: Log | None = None
    request_id = ""
    trace: "RequestTrace | None" = None
    question: Any = None
    written: Any = None
    error: Exception | None = None

    def __init__(self) -> None:
        """Note the arrival."""
        self.times_ns = [perf_counter_ns()]

    @property
    def timeout_us(self) -> int:
        """Once the request was read: how many microseconds it may wait for its turn; 0: as long as it takes."""
        return 0

    def with_id(self, request: "InferRequest") -> "InferRequest":
        """Return a request whose answer has the id of the request log: the client's if the request has one."""
        if self.log is None:
            return request
        self.request_id = request.id or self.request_id
        return replace(request, id=self.request_id)

    @abstractmethod
    def read(self, model: ServedModel) -> Any:
        """Decode and check the request, and return the question.

        Raises:
            RequestError: the request cannot be answered.
        """

    @abstractmethod
    def write(self, model: ServedModel, answer: Any) -> Any:
        """Encode the answer."""

    def note(self) -> None:
        """Note that a stage has ended."""
        self.times_ns.append(perf_counter_ns())

    def traced_by(self, trace: "RequestTrace | None") -> None:
        """Have ``trace`` follow the request."""
        if trace is not None:
            self.trace, trace.times_ns = trace, self.times_ns

    def take_error(self) -> Any:
        """Return the error and forget it.

        The error's traceback leads to this request. If the request led to the error as well, both would stay in memory
        until a garbage collection.
        """
        error, self.error = self.error, None
        return error


def answer_alone(model: ServedModel, exchange: Exchange) -> None:
    """Read a request, answer it and write its answer.

    Raises:
        HotrowError: see ``ServedModel`` and ``Exchange``.
    """
    exchange.note()
    _read(model, exchange)
    _answer(model, exchange)


def answer_together(model: ServedModel, exchanges: Sequence[Exchange], max_samples: int) -> None:
    """Answer requests in as few batches as possible; each gets what ``write`` returned, or its error.

    Every request is read and written on its own, so a bad request fails alone. If a batch fails as a whole, each of its
    requests is answered alone.

    Args:
        model: answers them.
        exchanges: the requests.
        max_samples: maximum samples of a batch.
    """
    for exchange in exchanges:
        exchange.note()
        try:
            _read_in_time(model, exchange)
        except Exception as err:  # noqa: BLE001  # the front end answers it or logs it
            exchange.error = err
    read = [exchange for exchange in exchanges if exchange.error is None]
    for batch in _batches(model, read, max_samples if model.can_merge else 1):
        _answer_batch(model, batch)


def _read(model: ServedModel, exchange: Exchange) -> None:
    exchange.question = question = exchange.read(model)
    if exchange.record is not None:
        exchange.record(model.config, model.keys(question))
    exchange.samples = model.samples(question)
    exchange.note()


def _read_in_time(model: ServedModel, exchange: Exchange) -> None:
    arrived_ns, began_ns = exchange.times_ns
    if exchange.deadline_s is not None and began_ns / 1e9 > exchange.deadline_s:
        raise DeadlineError("the request's time limit passed before a thread was free")
    _read(model, exchange)
    timeout_s, waited_s = exchange.timeout_us / 1e6, (began_ns - arrived_ns) / 1e9
    if timeout_s and waited_s > timeout_s:
        raise DeadlineError(f"the request waited {waited_s:.3f} s, but its timeout is {timeout_s:g} s")


def _batches(model: ServedModel, exchanges: Iterable[Exchange], max_samples: int) -> Iterator[list[Exchange]]:
    """Divide requests into batches of neighbours with at most ``max_samples`` samples.

    A larger request has a batch of its own, and so has a request with a large answer, because batches take memory.
    """
    batch: list[Exchange] = []
    total = 0
    for exchange in exchanges:
        is_large = model.answer_floats(exchange.question) > _LARGE_ANSWER_FLOATS
        samples = max_samples if is_large else exchange.samples
        if batch and total + samples > max_samples:
            yield batch
            batch, total = [], 0
        batch.append(exchange)
        total += samples
    if batch:
        yield batch


def _answer_batch(model: ServedModel, batch: Sequence[Exchange]) -> None:
    answers: Sequence[Any] | None = None
    if len(batch) > 1:
        with suppress(Exception):  # one of the requests may be the reason, so each is answered alone
            answers = _answers(model, batch)
    ended_ns = perf_counter_ns()
    for place, exchange in enumerate(batch):
        try:
            if answers is None:
                _answer(model, exchange)
            else:
                exchange.times_ns.append(ended_ns)
                _write(model, exchange, answers[place])
        except Exception as err:  # noqa: BLE001  # the front end answers it or logs it
            exchange.error = err
    if answers is not None:
        answered = (exchange for exchange in batch if exchange.error is None)
        first = next(answered, batch[0])  # a failed request counts no batch
        first.batch_samples = sum(exchange.samples for exchange in batch)


def _answer(model: ServedModel, exchange: Exchange) -> None:
    exchange.batch_samples = exchange.samples
    (answer,) = _answers(model, [exchange])
    exchange.note()
    _write(model, exchange, answer)


def _answers(model: ServedModel, exchanges: Sequence[Exchange]) -> Sequence[Any]:
    """Answer questions together; each trace gets the stages of all."""
    questions = [exchange.question for exchange in exchanges]
    traces = [exchange.trace for exchange in exchanges if exchange.trace is not None]
    if not traces:
        return model.answer(questions)
    with listening() as stages:
        try:
            return model.answer(questions)
        finally:
            for trace in traces:
                trace.stages += stages


def _write(model: ServedModel, exchange: Exchange, answer: Any) -> None:
    exchange.written = exchange.write(model, answer)
    exchange.note()
    if exchange.log is not None:
        exchange.log(model.session, exchange.question, answer, exchange.request_id)
