"""Values that stand in a ``ps.json``. A number or a truth value may stand in a string."""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from serving.model.json_fields import LARGEST_FLOAT32


def _unquoted(value: Any) -> Any:
    """Return the number or truth value that a string holds: HugeCTR's Triton backend reads ``"64"`` as 64."""
    if not isinstance(value, str) or len(value) > 32:
        return value
    try:
        parsed = json.loads(value.lower())  # it reads "True", too
    except ValueError:
        return value
    return parsed if isinstance(parsed, (bool, int, float)) else value


_Unquoted = BeforeValidator(_unquoted)
FileName = Annotated[str, Field(min_length=1)]
Switch = Annotated[bool, _Unquoted]
Float32 = Annotated[float, _Unquoted, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]
Magnitude = Annotated[float, _Unquoted, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, _Unquoted, Field(ge=1)]
Whole = Annotated[int, _Unquoted, Field(ge=0)]
Milliseconds = Annotated[Count, Field(le=3_600_000)]
Part = Annotated[float, _Unquoted, Field(gt=0.0, lt=1.0)]


def only(accepted: bool | float, why: str = "") -> BeforeValidator:
    """A check that HPS's key says what Hotrow does in any case, and ``why`` it does nothing else."""

    def check(value: Any) -> Any:
        said = _unquoted(value)
        if isinstance(said, bool) != isinstance(accepted, bool) or said != accepted:
            raise ValueError(f"Hotrow supports only {json.dumps(accepted)} here, got {value!r}{why and f': {why}'}")
        return accepted

    return BeforeValidator(check)
