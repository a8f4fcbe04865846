"""Every error serving raises on purpose, on one page.

A request flows frontend -> protocol -> repository -> batch -> session -> lookup -> storage. The first three and the
batch raise a RequestError: the caller sent something that cannot be answered, and sending it again will not help.
Storage raises a StoreError: the same request may succeed later. ConfigError and ModelFileError are raised while
something is opened, before any request is accepted; OutputError while a model is written and TraceError while
traffic is read back, which no server does.
``serving.frontend.codes`` is the one table from here to HTTP codes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.errors import HotrowError


class ServingError(HotrowError):
    """Base of all errors raised on purpose by serving."""


class RequestError(ServingError):
    """The caller sent something that cannot be answered; sending it again will not help."""


class UnknownModelError(RequestError):
    """No loaded model has this name and version."""


class PayloadTooLargeError(RequestError):
    """The request body is larger than the server accepts."""


class UnsupportedEncodingError(RequestError):
    """The request body is encoded in a way the server does not read."""


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
        """Name the file and say what was expected and what came."""
        super().__init__(f"{file}: {reason}")
        self.file = str(file)
        self.reason = reason


class OutputError(ServingError):
    """A model cannot be written where it was asked to go."""


class TraceError(ServingError):
    """A recorded trace cannot be read, or does not fit the model it is said to be of."""

    def __init__(self, where: str, reason: str) -> None:
        """Name the file, and the place in it; say what was expected and what came."""
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class StoreError(ServingError):
    """A storage tier did not answer, or cannot take what it was given; the request may succeed later."""

    def __init__(self, store: str, table: str, reason: str) -> None:
        """Name the tier, the table's full name (may be empty) and what happened."""
        super().__init__(": ".join(part for part in (store, f"table {table!r}" if table else "", reason) if part))
        self.store = store
        self.table = table
        self.reason = reason


class StoreUnreachableError(StoreError):
    """A storage tier could not be asked: it is down, or something between is."""


class StoreTimeoutError(StoreUnreachableError):
    """A storage tier did not answer within its time budget."""


class StoreFullError(StoreError):
    """A storage tier has no room for the rows; nothing of the call was written."""


class DeviceMemoryError(ServingError):
    """A device has too little free memory for what it is to hold."""

    def __init__(self, device: str, reason: str) -> None:
        """Name the device, and say what is to be held there and what there is room for."""
        super().__init__(f"{device}: {reason}")
        self.device = device
        self.reason = reason


class MissingExtraError(ServingError):
    """An optional package is needed for what was asked; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """Name the missing package, Hotrow's extra that brings it, and what needs it."""
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'hotrow[{extra}]'")
        self.package = package
        self.extra = extra


class OverloadedError(ServingError):
    """The server has as many requests in hand as it accepts; the same request may succeed later."""


@contextmanager
def about(model: str, faults: list[HotrowError] | None = None) -> Iterator[None]:
    """Note on an error inside the block which model it is about; ``told`` shows that.

    Args:
        model: the model's name.
        faults: where given, the error is added to it and goes no further.
    """
    try:
        yield
    except HotrowError as err:
        err.add_note(f"model {model[:64]!r}")
        if faults is None:
            raise
        faults.append(err)


def is_about_a_model(error: HotrowError) -> bool:
    """Whether somebody noted on the error which model it is about."""
    return bool(getattr(error, "__notes__", ()))


def told(error: HotrowError) -> str:
    """One line for an operator: what the error is about, as far as somebody noted it, and its message."""
    return ": ".join((*getattr(error, "__notes__", ()), str(error)))
