"""The errors that NumPy raises for a ``.npy`` or ``.npz`` that is damaged, cut short, or something else."""

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Final

from serving.model.regular_file import wrong_kind

#: How the two kinds of files begin. A .npz is a ZIP archive.
NPY, NPZ = b"\x93NUMPY", b"PK"

#: NumPy also raises OSError, and MemoryError if a header claims an impossible size.
UNREADABLE: Final = (
    # from the header and from pickled objects
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    # from the archive
    zipfile.BadZipFile,
    zlib.error,
)


def unreadable(path: Path, kind: str, fault: Exception, beginnings: tuple[bytes, ...] = (NPY, NPZ)) -> str:
    """Return why NumPy cannot read a file; see ``wrong_kind``."""
    if isinstance(fault, MemoryError):
        return "does not fit into memory"
    reason = wrong_kind(path, kind, beginnings)
    holds_objects = "object" in str(fault).lower() and reason.endswith("damaged")
    return f"expected {kind}, found Python objects in it, which may run code" if holds_objects else reason
