"""From a JSON document to a checked clause: pydantic's errors become ConfigError with the JSON path, here only."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from serving.errors import ConfigError

Path = tuple[str | int, ...]
C = TypeVar("C", bound="Clause")
# What pydantic says with the names of Python's types, or of ours.
_IN_WORDS_OF_JSON = {
    "model_type": "expected an object",
    "dict_type": "expected an object",
    "list_type": "expected a list",
    "too_short": "expected a list that is not empty",
}


class Clause(BaseModel):
    """One object of a JSON document, keys and types exactly as written there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_null(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an explicit ``null``: HugeCTR has none, and who writes one may expect another thing than our default.

        What is not looked at (``Any``) may be anything.
        """
        field = cls.model_fields[str(info.field_name)]
        if value is None and field.annotation is not Any:
            advice = "" if field.is_required() else "; leave the key out for its default"
            raise ValueError(f"expected a value, got null{advice}")
        return value


def read_clause(kind: type[C], document: Any, source: str) -> C:
    """Check ``document`` against ``kind``.

    Args:
        kind: the clause it should be.
        document: what the JSON reader returned.
        source: the file, for messages.

    Raises:
        ConfigError: with the JSON path of the first thing that is wrong.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        raise ConfigError(source, json_path(first["loc"]), _reason(first)) from err


def json_path(location: Path) -> str:
    """``("models", 0, "model")`` as ``"models[0].model"``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _reason(error: Any) -> str:
    location = error["loc"]
    if error["type"] == "missing":
        return "required, but absent"
    if error["type"] == "extra_forbidden":
        return "unknown key"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    came = repr(error["input"])
    if "password" in (*location[-1:], *came.split("'")):
        came = "..."
    expected = _IN_WORDS_OF_JSON.get(error["type"], error["msg"][0].lower() + error["msg"][1:])
    return f"{expected}, got {came if len(came) <= 80 else came[:77] + '...'}"
