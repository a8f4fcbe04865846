"""Every error that serving raises on purpose, on one page.

A request flows frontend -> protocol -> repository -> batch -> session -> lookup -> storage. Frontend, protocol,
repository and batch raise a RequestError: the request cannot be answered, and sending it again will not help. Storage
raises a StoreError: the same request may succeed later. Opening a model raises ConfigError and ModelFileError, before
any request is accepted. Commands that write a model raise OutputError, and the planner raises TraceError; servers
raise neither. Reading and writing streams of updates raises StreamError and BadMessageError, apart from any request.
``serving.frontend.codes`` is the only table that maps these errors to HTTP codes.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import TypeVar

from kernels.errors import HotrowError

_E = TypeVar("_E", bound=Exception)
_MOST_CANDIDATES = 1000
_LONGEST_CANDIDATE = 64
#: Characters that end a line, move the cursor or turn the direction of text, and halves of characters.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class ServingError(HotrowError):
    """Base of all errors raised on purpose by serving."""


class RequestError(ServingError):
    """The caller sent something that cannot be answered; sending it again will not help."""


class FeatureValueError(RequestError):
    """A raw feature is unknown, or a value of it cannot be used.

    Attributes:
        feature: the feature's name.
        sample: the number of the sample; None: the fault is not in one sample.
        reason: what was expected, and what came.
    """

    def __init__(self, feature: str, sample: int | None, reason: str) -> None:
        """Name the feature, the sample and the fault."""
        where = "" if sample is None else f" of sample {sample}"
        super().__init__(f"{printable(feature)}{where}: {reason}")
        self.feature = feature
        self.sample = sample
        self.reason = reason

    def __reduce__(self) -> tuple[type["FeatureValueError"], tuple[str, int | None, str]]:
        """Make the error picklable."""
        return type(self), (self.feature, self.sample, self.reason)


class UnknownModelError(RequestError):
    """No loaded model has this name and version."""


class UnknownRouteError(RequestError):
    """The server has no such route."""


class UnauthenticatedError(RequestError):
    """The request's token is missing or unknown."""


class ForbiddenError(RequestError):
    """The client may not do this."""


class VersionConflictError(RequestError):
    """Other files of a version are served, and they cannot be swapped while the version is loaded."""


class LateBodyError(RequestError):
    """The request body did not arrive in time."""


class PayloadTooLargeError(RequestError):
    """The request body is larger than the server accepts."""


class UnsupportedEncodingError(RequestError):
    """The server cannot read the encoding of the request body."""


class ConfigError(ServingError):
    """A configuration cannot be accepted.

    The message starts with the file and the JSON path: ``ps.json: models[0].max_batch_size: ...``.
    """

    def __init__(self, source: str, path: str, reason: str) -> None:
        """Name the file (or other source), the path inside it (may be empty), and what is wrong there."""
        super().__init__(": ".join(part for part in (source, path, reason) if part))
        self.source = source
        self.path = path
        self.reason = reason


class ModelFileError(ServingError):
    """A model file is missing, truncated, oversized, corrupted, or not the file it should be."""

    def __init__(self, file: object, reason: str) -> None:
        """Name the file. Say what was expected and what came."""
        super().__init__(f"{file}: {reason}")
        self.file = str(file)
        self.reason = reason


class OutputError(ServingError):
    """A file or folder cannot be written to the requested path."""


class TraceError(ServingError):
    """A recorded trace cannot be read, or does not fit its model."""

    def __init__(self, where: str, reason: str) -> None:
        """Name the file and the position in it. Say what was expected and what came."""
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class StoreError(ServingError):
    """A storage tier did not answer, or cannot take the rows. The request may succeed later."""

    def __init__(self, store: str, table: str, reason: str) -> None:
        """Name the tier, the table's full name (may be empty) and what happened."""
        super().__init__(": ".join(part for part in (store, f"table {table!r}" if table else "", reason) if part))
        self.store = store
        self.table = table
        self.reason = reason


class StoreUnreachableError(StoreError):
    """A storage tier cannot be reached: the tier or the network is down."""


class StoreTimeoutError(StoreUnreachableError):
    """A storage tier did not answer within its time budget."""


class StoreInUseError(StoreError):
    """Another process has the storage tier open, and only one process can write to it."""


class AdditionError(StoreError):
    """A source of truth cannot add to rows, because the sums would not be exact. The call wrote nothing."""


class RowTypeError(StoreError):
    """A value does not fit a table's row type. The call wrote nothing."""


class StoreFullError(StoreError):
    """A storage tier has no room for the rows. The call wrote nothing."""


class BadMessageError(ServingError):
    """A message of a stream of updates cannot be read, or cannot be written. Sending it again will not help."""

    def __init__(self, reason: str, text: str) -> None:
        """Say what was expected and what came.

        Args:
            reason: one word for counting, see ``serving.stream.message``.
            text: the message.
        """
        super().__init__(text)
        self.reason = reason


class StreamError(ServingError):
    """An update log did not do what it was asked."""

    def __init__(self, log: str, reason: str) -> None:
        """Name the log, without its secrets, and what happened."""
        super().__init__(f"{log}: {reason}")
        self.log = log
        self.reason = reason


class SourceUnreachableError(StreamError):
    """An update log cannot be read now: it is away, or it refuses. Reading may succeed later."""


class PositionLostError(StreamError):
    """An update log no longer has the records after a position, so some updates can never be read."""

    def __init__(
        self, log: str, partition: str, wanted: str, earliest: str, latest: str, *, is_another: bool = False
    ) -> None:
        """Name the log and the partition, the position, and the log's first and last positions; empty: it has none.

        ``is_another``: the record before the position is another record than the one that was read there.
        """
        has = f"the log has {earliest} to {latest}" if earliest or latest else "the log is empty"
        reason = f"the records after position {wanted} are gone; {has}"
        if is_another:
            reason = f"the log was recreated: another record is before position {wanted}; {has}"
        super().__init__(log, f"partition {partition}: {reason}")
        self.partition = partition
        self.wanted = wanted
        self.earliest = earliest
        self.latest = latest


class SinkError(StreamError):
    """An update log did not take every message."""


class DeviceMemoryError(ServingError):
    """A device has too little free memory."""

    def __init__(self, device: str, reason: str) -> None:
        """Name the device. Say what should go there and how much room there is."""
        super().__init__(f"{device}: {reason}")
        self.device = device
        self.reason = reason


class MissingExtraError(ServingError):
    """An optional package is not installed. The message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """Name the missing package, the extra of Hotrow that installs it, and the feature that needs it."""
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'hotrow[{extra}]'")
        self.package = package
        self.extra = extra


class LoadEndedError(ServingError):
    """The load of a model was ended before it served: the model was unloaded, or the server is stopping."""


class WorkerError(ServingError):
    """Another worker of this server did not do what it was asked. The request may succeed later."""

    def __init__(self, worker: int, reason: str) -> None:
        """Name the worker and what happened."""
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class OverloadedError(ServingError):
    """The server already has as many requests in flight as it accepts. The same request may succeed later."""


class DeadlineError(ServingError):
    """The client's time limit passed before the server began to answer."""


def nearest(name: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the names that are most similar to ``name``, which may come from a user and be of any length.

    Capitals and small letters are the same.
    """
    # difflib takes quadratic time for each candidate
    candidates = [candidate for candidate in islice(known, _MOST_CANDIDATES) if len(candidate) <= _LONGEST_CANDIDATE]
    folded = {candidate.casefold(): candidate for candidate in reversed(candidates)}
    close = get_close_matches(str(name)[:_LONGEST_CANDIDATE].casefold(), folded, n=count, cutoff=cutoff)
    return [folded[one] for one in close]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, or an empty text.

    A vector's name is unknown where each of its values has a name of its own.
    """
    known = list(islice(known, _MOST_CANDIDATES))
    values = [other for other in known if other.startswith(f"{name}[")]
    if len(values) > 1:
        return f"; did you mean {values[0]!r} to {values[-1]!r}, each with one value?"
    close = nearest(name, known)
    return f"; did you mean {close[0]!r}?" if close else ""


def without_frames(error: _E) -> _E:
    """Return a copy of ``error`` without its traceback and without the errors that led to it.

    A traceback keeps the local variables of all functions that the error passed, and of their callers. If one of these
    variables leads back to the error, only the garbage collector frees them, and a request's body with them. So
    store or return only such a copy, and raise a copy of a stored error.
    """
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


@contextmanager
def about(model: str, faults: list[HotrowError] | None = None) -> Iterator[None]:
    """Set ``model`` of any error that the block raises. ``told`` and tracebacks show the name.

    Args:
        model: the model's name.
        faults: if given, the error is added to this list instead of being raised.
    """
    try:
        yield
    except HotrowError as err:
        if not err.model:
            err.model = model
            err.add_note(_named(model))
        if faults is None:
            raise
        faults.append(err)


def told(error: HotrowError) -> str:
    """Return one line for an operator: the model, if the error is about a model, and the message."""
    return printable(f"{_named(error.model)}: {error}" if error.model else str(error))


def _named(model: str) -> str:
    return f"model {model[:64]!r}"


def printable(text: str) -> str:
    """Return text as one line that cannot control a terminal: clients and names of files choose parts of messages."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
