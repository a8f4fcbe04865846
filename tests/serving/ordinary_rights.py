"""Drop root's right to read and write every file, for tests of files without permission."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_CAPABILITY_VERSION = 0x20080522  # of linux/capability.h, two 32-bit words of each set
_OVERRIDE, _READ_SEARCH = 1, 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Apply the modes of files to this thread and to the threads that it starts."""
    if os.geteuid() != 0:
        yield
        return
    effective, *others = _sets()
    _set(effective & ~(1 << _OVERRIDE | 1 << _READ_SEARCH), *others)
    try:
        yield
    finally:
        _set(effective, *others)


def _sets():
    """Return the effective, permitted and inheritable capabilities, and the upper half of all three."""
    data = ctypes.create_string_buffer(24)
    _call("capget", data)
    effective, permitted, inheritable, *upper = struct.unpack("6I", data.raw)
    return effective, permitted, inheritable, upper


def _set(effective, permitted, inheritable, upper):
    data = ctypes.create_string_buffer(struct.pack("6I", effective, permitted, inheritable, *upper), 24)
    _call("capset", data)


def _call(name, data):
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0), 8)
    if getattr(libc, name)(header, data):
        raise OSError(ctypes.get_errno(), name)
