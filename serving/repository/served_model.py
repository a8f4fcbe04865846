"""One version of a model as the requests of every protocol see it, and its end."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.errors import HotrowError
from serving.background import InFlightCounter
from serving.batch import Batch
from serving.config import ModelConfig
from serving.errors import RequestError, UnknownModelError
from serving.features import FeatureReader
from serving.lookup import LookupResult
from serving.metrics import ModelStatistics
from serving.model.manifest import Stamp
from serving.model.names import TOP_INDEX, TOP_SCORE
from serving.outputs import NOTHING, Asked, answers_of, asking, ranking
from serving.parameter_server.updates import ModelUpdates
from serving.protocol import ctr, lookup
from serving.protocol.tensors import Array, Signature
from serving.reading import read_batch
from serving.repository.version_tables import VersionTables
from serving.routes import Prediction
from serving.session import InferenceSession, LookupOnlySession, ModelSession

logger = logging.getLogger("hotrow.repository")

#: How long a swap waits for the requests of an old version. After a longer request, a thread drops the version.
DRAIN_TIMEOUT_S = 30.0

Outputs = tuple[dict[str, Array], dict[str, int]]


class ServedModel(ABC):
    """One version of a model that answers requests. Any thread may use it.

    A request is read into a question, the question is answered, and the answer becomes the request's outputs.

    Attributes:
        name: the model's name.
        version: the version that is served.
        config: the model.
        session: answers the questions.
        tables: what the session looks up, if a repository has loaded it.
        signature: the tensors of its requests and answers.
        statistics: how long its requests took.
        stamp: of its files when they were read; None: they are not looked at again.
        can_merge: whether the questions of several requests may be answered together.
        updates: reads the updates of its rows; None: this process reads none for it.
        waits_for: says which position the tables must still reach before it may answer; empty: it may.
        never_waits: an answer waits for no disk, network, GPU or other process.
    """

    can_merge = True

    tables: VersionTables

    def __init__(self, session: ModelSession, signature: Signature) -> None:
        """Take a session, which ``close`` closes."""
        self.config = session.config
        self.name = self.config.name
        self.version = str(self.config.version)
        self.session = session
        self.signature = signature
        self.statistics = ModelStatistics()
        self.stamp: Stamp | None = None
        self.updates: ModelUpdates | None = None
        self.waits_for: Callable[[], str] = str
        self.never_waits = session.never_waits
        self._health = session.health
        # No reference to this object: the cycle would keep the model in memory until the garbage collector runs.
        self._calls = InFlightCounter(partial(_was_dropped, session.config))
        self._lock = threading.Lock()  # guards the two fields below
        self._releases: list[Callable[[], None]] = [session.close]
        self._is_closed = False

    def begin(self) -> None:
        """Keep the version loaded until ``end``; UnknownModelError if it is being dropped."""
        self._calls.begin()

    def end(self) -> None:
        """Let the version go that ``begin`` has kept."""
        self._calls.end()

    def on_close(self, release: Callable[[], None]) -> None:
        """Call ``release`` after the session is closed; now, if a swap has closed it already."""
        with self._lock:
            if not self._is_closed:
                self._releases.append(release)
                return
        release()

    def close(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Wait for the requests in flight, and close the session."""
        if not self._calls.close(self._release, timeout_s):
            logger.warning("model %s version %s: requests take longer than %g s", self.name, self.version, timeout_s)

    def _release(self) -> None:
        with self._lock:
            self._is_closed = True
            releases, self._releases = self._releases, []  # a release may lead back here, which would be a cycle
        with ExitStack() as stack:  # calls every release, also after one of them fails
            for release in reversed(releases):
                stack.callback(release)

    def answer(self, questions: Sequence[Any]) -> Sequence[Any]:
        """Answer one question, or several together if ``can_merge``.

        If several questions get no answer, answer each alone. Only a question that fails alone counts as failed.

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

    @property
    def features(self) -> FeatureReader | None:
        """Reads the values that requests may have by name; None if they have keys alone."""
        return None

    def freshness(self) -> dict[str, int]:
        """How new the rows are, as parameters of an answer; empty if this process reads no updates."""
        return {} if self.updates is None else self.updates.counters.freshness()

    @abstractmethod
    def warm_up(self) -> None:
        """Answer a request without keys, so that the first request does not wait for code to be compiled."""

    @abstractmethod
    def read(self, inputs: Mapping[str, Any], asked: Asked = NOTHING) -> Any:
        """Check the arrays of a request, and return the question.

        Args:
            inputs: they have the datatypes of ``signature``.
            asked: what the request asks for.

        Raises:
            RequestError: an array is wrong; the message begins with the tensor's name.
        """

    @abstractmethod
    def samples(self, question: Any) -> int:
        """Return the batch size of a question."""

    @abstractmethod
    def answer_floats(self, question: Any, output: str | None = None) -> int:
        """Return how many numbers the answer to a question has, or one of its outputs."""

    @abstractmethod
    def keys(self, question: Any) -> Sequence[NDArray[np.int64]]:
        """Return the keys that a question has of each table."""

    @abstractmethod
    def _answer(self, questions: Sequence[Any]) -> Sequence[Any]:
        """See ``answer``."""

    @abstractmethod
    def outputs(self, question: Any, answer: Any) -> Outputs:
        """Return the answer to a question as arrays by output name, and the answer's parameters."""

    @abstractmethod
    def triton_config(self) -> dict[str, Any]:
        """Return the model's configuration as Triton's ``ModelConfig``."""


class ServedNetwork(ServedModel):
    """A model with a dense network: batches in, answers out."""

    session: InferenceSession

    def __init__(self, session: InferenceSession) -> None:
        """Serve ``session``."""
        super().__init__(session, ctr.signature_of(session.config, session.features))
        self.can_merge = not session.graph.mixes_samples
        self._widths = {output.name: output.width for output in session.outputs}

    @property
    def features(self) -> FeatureReader | None:
        """See ``ServedModel.features``."""
        return self.session.features

    def warm_up(self) -> None:
        """See ``ServedModel.warm_up``."""
        slots = sum(table.slots for table in self.config.tables)
        dense, keys = np.zeros((1, self.config.dense_dim), np.float32), np.empty(0, np.int64)
        with suppress(RequestError):  # a network may refuse so few samples, or have no finite answer to zeros
            batch = read_batch(self.config, dense, keys, np.zeros(slots + 1, np.int32))
            self.session.predict_batch(replace(batch, wanted=()))  # nobody reads its outputs

    def read(self, inputs: Mapping[str, Any], asked: Asked = NOTHING) -> Batch:
        """See ``ServedModel.read``."""
        batch = ctr.batch_of(self.config, inputs, self.session.features_for(asked), self.session.max_candidates)
        return asking(batch, self.session.outputs, asked)

    def samples(self, question: Batch) -> int:
        """See ``ServedModel.samples``."""
        return question.samples

    def answer_floats(self, question: Batch, output: str | None = None) -> int:
        """See ``ServedModel.answer_floats``."""
        if output in (TOP_INDEX, TOP_SCORE) and question.top is not None:
            return question.counts_of_users.size * question.top.k
        return question.samples * (self.config.label_dim if output is None else self._widths[output])

    def keys(self, question: Batch) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.keys``."""
        return [of_table.keys for of_table in question.tables]

    def _answer(self, questions: Sequence[Batch]) -> Sequence[Prediction]:
        if len(questions) == 1:
            return [self.session.predict_batch(questions[0])]
        return self.session.predict_batches(questions)

    def outputs(self, question: Batch, answer: Prediction) -> Outputs:
        """See ``ServedModel.outputs``."""
        arrays: dict[str, Array] = answers_of(answer.values, self.session.wanted(question))
        if question.top is not None:
            best = ranking(answer.values, question, question.top)
            arrays |= {TOP_INDEX: best.index, TOP_SCORE: best.score}
        return arrays, {"defaulted_keys": answer.defaulted_keys}

    def triton_config(self) -> dict[str, Any]:
        """See ``ServedModel.triton_config``."""
        return ctr.triton_config(self.name, self.config, self.session.features)


class ServedTables(ServedModel):
    """A model without a dense network: keys in, rows out."""

    session: LookupOnlySession

    def __init__(self, session: LookupOnlySession) -> None:
        """Serve ``session``."""
        super().__init__(session, lookup.signature_of(session.config))

    def warm_up(self) -> None:
        """See ``ServedModel.warm_up``."""
        self.session.lookup([np.empty(0, np.int64)] * len(self.config.tables))

    def read(self, inputs: Mapping[str, Any], asked: Asked = NOTHING) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.read``."""
        return lookup.keys_of(self.config, inputs)

    def samples(self, question: Sequence[NDArray[np.int64]]) -> int:
        """See ``ServedModel.samples``; the keys may be those of more samples."""
        return lookup.least_samples(self.config, question)

    def answer_floats(self, question: Sequence[NDArray[np.int64]], output: str | None = None) -> int:
        """See ``ServedModel.answer_floats``."""
        return sum(keys.size * table.dim for keys, table in zip(question, self.config.tables, strict=True))

    def keys(self, question: Sequence[NDArray[np.int64]]) -> Sequence[NDArray[np.int64]]:
        """See ``ServedModel.keys``."""
        return question

    def _answer(self, questions: Sequence[Sequence[NDArray[np.int64]]]) -> Sequence[LookupResult]:
        if len(questions) == 1:
            return [self.session.lookup(questions[0])]
        return self.session.lookup_together(questions)

    def outputs(self, question: Sequence[NDArray[np.int64]], answer: LookupResult) -> Outputs:
        """See ``ServedModel.outputs``."""
        return {lookup.ROWS: lookup.answer_of(answer.embeddings)}, {"defaulted_keys": answer.defaulted_keys}

    def triton_config(self) -> dict[str, Any]:
        """See ``ServedModel.triton_config``."""
        return lookup.triton_config(self.name, self.config)


def served_model(session: InferenceSession | LookupOnlySession) -> ServedModel:
    """Return the model of a session."""
    return ServedTables(session) if isinstance(session, LookupOnlySession) else ServedNetwork(session)


def _was_dropped(config: ModelConfig) -> HotrowError:
    return UnknownModelError(f"version {config.version} of model {config.name!r} was unloaded")
