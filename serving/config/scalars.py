"""Values that stand in a ``ps.json``. A number or a truth value may stand in a string."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from serving.model.strict_json import LARGEST_FLOAT32

# More than any machine has: a number beyond is a slip, and is told before something is made in such numbers.
MOST_GPUS, MOST_THREADS, MOST_BUFFERS = 1024, 4096, 1024


def _unquoted(value: Any) -> Any:
    """Return the number or truth value that a string holds: HugeCTR's Triton backend reads ``"64"`` as 64."""
    if not isinstance(value, str) or len(value) > 32:
        return value
    try:
        parsed = json.loads(value.lower())  # it reads "True", too
    except ValueError:
        return value
    return parsed if isinstance(parsed, (bool, int, float)) else value


def _refuse_fraction(value: Any) -> Any:
    """Refuse 64.0 where a choice of integers, which compares, would take it for 64: ``int`` refuses it too."""
    if isinstance(value, float):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


def _refuse_nul(text: str) -> str:
    """Refuse the character that ends a path for the system, at which Python's calls raise ValueError."""
    if "\0" in text:
        raise ValueError("expected text without the character NUL")
    return text


_Unquoted = BeforeValidator(_unquoted)
#: For a choice of integers.
INTEGERS = BeforeValidator(_refuse_fraction)
PathText = Annotated[str, AfterValidator(_refuse_nul)]
FileName = Annotated[str, Field(min_length=1), AfterValidator(_refuse_nul)]
Switch = Annotated[bool, _Unquoted]
KeyBits = Annotated[Literal[32, 64], INTEGERS, _Unquoted]
Float32 = Annotated[float, _Unquoted, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]
Magnitude = Annotated[float, _Unquoted, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, _Unquoted, Field(ge=1)]
Whole = Annotated[int, _Unquoted, Field(ge=0)]
GpuIndex = Annotated[Whole, Field(lt=MOST_GPUS)]
Seconds = Annotated[Magnitude, Field(le=10 * 365 * 86_400)]  # ten years: the clock of a thread ends somewhere
Milliseconds = Annotated[Count, Field(le=3_600_000)]
Share = Annotated[float, _Unquoted, Field(ge=0.0, le=1.0)]
Part = Annotated[float, _Unquoted, Field(gt=0.0, lt=1.0)]
