"""The table of errors and their HTTP and gRPC codes, for every front end."""

from kernels.errors import DeviceFaultError, DeviceUnavailableError, HotrowError, ReservedKeyError
from serving.errors import (
    DeadlineError,
    DeviceMemoryError,
    ForbiddenError,
    LateBodyError,
    LoadEndedError,
    OverloadedError,
    PayloadTooLargeError,
    RequestError,
    StoreError,
    UnauthenticatedError,
    UnknownModelError,
    UnknownRouteError,
    UnsupportedEncodingError,
    VersionConflictError,
    WorkerError,
)

#: After 408, 429 or 503, the same request may succeed later. After other codes below 500, the caller must change it.
CODES: dict[type[Exception], tuple[int, str]] = {
    UnauthenticatedError: (401, "UNAUTHENTICATED"),
    ForbiddenError: (403, "PERMISSION_DENIED"),
    UnknownModelError: (404, "NOT_FOUND"),
    UnknownRouteError: (404, "UNIMPLEMENTED"),
    LateBodyError: (408, "DEADLINE_EXCEEDED"),
    PayloadTooLargeError: (413, "RESOURCE_EXHAUSTED"),
    VersionConflictError: (409, "FAILED_PRECONDITION"),
    UnsupportedEncodingError: (415, "UNIMPLEMENTED"),
    RequestError: (400, "INVALID_ARGUMENT"),
    ReservedKeyError: (400, "INVALID_ARGUMENT"),
    OverloadedError: (429, "RESOURCE_EXHAUSTED"),
    MemoryError: (429, "RESOURCE_EXHAUSTED"),
    DeadlineError: (504, "DEADLINE_EXCEEDED"),
    StoreError: (503, "UNAVAILABLE"),
    LoadEndedError: (503, "UNAVAILABLE"),
    WorkerError: (503, "UNAVAILABLE"),
    DeviceUnavailableError: (503, "UNAVAILABLE"),
    DeviceFaultError: (503, "UNAVAILABLE"),
    DeviceMemoryError: (503, "UNAVAILABLE"),
    HotrowError: (500, "INTERNAL"),
}

#: The errors that are answers; any other error is a bug.
ANSWERED = (HotrowError, MemoryError)

#: Seconds a client should wait before it repeats a request that was answered 429 or 503.
RETRY_AFTER_S = 1


def codes_of(error: HotrowError | MemoryError) -> tuple[int, str]:
    """Return the HTTP status and the name of the gRPC status of the nearest base class of ``error`` in the table."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
