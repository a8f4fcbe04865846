"""The errors that NumPy raises for a ``.npy`` or ``.npz`` that is damaged, cut short, or something else."""

import tokenize
import zipfile
import zlib
from typing import Final

_MOST_CHARACTERS = 200  # NumPy quotes the whole header, which may have 10,000

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


def explain(fault: Exception) -> str:
    """Return an error's message as one line of bounded length."""
    text = " ".join(str(fault).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
