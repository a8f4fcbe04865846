"""What NumPy raises for a ``.npy`` or ``.npz`` that is not what it says, is cut short, or was changed."""

import tokenize
import zipfile
import zlib
from typing import Final

_MOST_CHARACTERS = 200  # NumPy quotes the whole header, which may have ten thousand

#: Besides OSError, and MemoryError where a header claims more than there can be.
UNREADABLE: Final = (
    # of the header and of pickled objects
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    # of the archive
    zipfile.BadZipFile,
    zlib.error,
)


def explain(fault: Exception) -> str:
    """Return the message of a fault as one line of a bounded length."""
    text = " ".join(str(fault).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
