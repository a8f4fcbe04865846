"""The table of errors and their HTTP status codes, for every route."""

from kernels.errors import DeviceFaultError, DeviceUnavailableError, HotrowError, ReservedKeyError
from serving.errors import (
    DeviceMemoryError,
    OverloadedError,
    PayloadTooLargeError,
    RequestError,
    StoreError,
    UnknownModelError,
    UnsupportedEncodingError,
)

#: With a code below 500 the caller must change the request. With a 503 the same request may succeed later.
HTTP_CODES: dict[type[HotrowError], int] = {
    UnknownModelError: 404,
    PayloadTooLargeError: 413,
    UnsupportedEncodingError: 415,
    RequestError: 400,
    ReservedKeyError: 400,
    OverloadedError: 503,
    StoreError: 503,
    DeviceUnavailableError: 503,
    DeviceFaultError: 503,
    DeviceMemoryError: 503,
    HotrowError: 500,
}

#: Seconds a client should wait before it repeats a request that was answered 503.
RETRY_AFTER_S = 1


def http_code(error: HotrowError) -> int:
    """Return the status code of the nearest base class of ``error`` in the table."""
    return next(HTTP_CODES[kind] for kind in type(error).__mro__ if kind in HTTP_CODES)
