"""Turn a JSON document into a checked record. A ConfigError names the file and the JSON path of the first fault."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from serving.config import keys_without_effect
from serving.errors import ConfigError, did_you_mean
from serving.model.regular_file import read_regular
from serving.model.strict_json import LARGEST_FLOAT32

# More than any machine has. A larger number is a mistake, and must fail before anything is allocated.
MOST_GPUS, MOST_THREADS, MOST_BUFFERS = 1024, 4096, 1024
_MOST_SECRET_BYTES = 64 << 10
_IN_WORDS_OF_JSON = {
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "dict_type": "expected an object",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "too_short": "expected a list that is not empty",
}


class Record(BaseModel):
    """A checked part of a configuration: frozen, with strict types and no extra attributes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, populate_by_name=True, hide_input_in_errors=True
    )


class Clause(Record):
    """A record that is read from one JSON object. A field's JSON key is its alias, or its name.

    Attributes:
        where: the clause's name in ``keys_without_effect``.
        parts: fields that are clauses themselves. Their keys are in the same JSON object.
    """

    where: ClassVar[str] = "-"
    parts: ClassVar[dict[str, "type[Clause]"]] = {}

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """Return the fields by JSON key, including parts. A field whose alias is in parentheses has no key."""
        own = {str(field.validation_alias or name): field for name, field in cls.model_fields.items()}
        by_key = {key: field for key, field in own.items() if key not in cls.parts and not key.startswith("(")}
        for part in cls.parts.values():
            by_key |= part.fields_by_key()
        return by_key

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Replace older spellings in the JSON object."""
        return given

    @classmethod
    def known_keys(cls) -> set[str]:
        """Return every key that this JSON object may have."""
        return cls.fields_by_key().keys() | keys_without_effect.all_keys(cls.where)

    @classmethod
    def ignored_keys(cls, kind: Any) -> set[str]:
        """Return the keys that are accepted and dropped."""
        return cls.known_keys() if kind == "disabled" else keys_without_effect.always(cls.where, kind)

    @classmethod
    def refuse(cls, key: str) -> None:
        """Raise the error for a key that this clause cannot have."""
        raise at_key(key, f"unknown key{did_you_mean(key, sorted(cls.known_keys()))}")

    @model_validator(mode="before")
    @classmethod
    def _from_json(cls, given: Any, info: ValidationInfo) -> Any:
        """Check the names of the keys, drop keys without effect and group the keys of parts."""
        if not isinstance(given, dict) or info.context is None:
            return given
        fields = cls.fields_by_key()
        ignored = cls.ignored_keys(given.get("type"))
        for key, value in given.items():
            if key not in fields and key not in ignored:
                cls.refuse(key)
            if value is None and given.get("type") != "disabled":
                _refuse_null(key, fields.get(key))
        kept = cls.prepare({key: value for key, value in given.items() if key in fields})
        for name, part in cls.parts.items():
            inside = {key: kept.pop(key) for key in list(kept) if key in part.fields_by_key()}
            if inside:
                kept[name] = inside
        return kept


def _refuse_null(key: str, field: FieldInfo | None) -> None:
    """Refuse null, because HugeCTR's files have none and its meaning would be a guess."""
    if field is None or field.annotation is not Any:
        advice = "" if field is not None and field.is_required() else "; leave the key out for its default"
        raise at_key(key, f"expected a value, got null{advice}")


C = TypeVar("C", bound=Clause)


@dataclass(frozen=True, slots=True)
class Location:
    """A JSON object in a file, for messages."""

    source: str
    path: str

    def error(self, key: str, reason: str) -> ConfigError:
        """Return a ConfigError about ``key`` of this object."""
        return ConfigError(self.source, f"{self.path}.{key}" if self.path else key, reason)


def at_key(key: str, reason: str) -> PydanticCustomError:
    """Return an error about one key of the object that is being checked."""
    return PydanticCustomError("at_key", "{reason}", {"key": key, "reason": reason})


def read_clause(kind: type[C], document: Any, file: Path) -> C:
    """Check ``document``, which was read from ``file``, against ``kind``.

    Raises:
        ConfigError: with the JSON path of the first fault.
    """
    try:
        return kind.model_validate(document, context=file.parent)
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        raise ConfigError(str(file), _json_path(first), _reason(first)) from err


# Steps of pydantic's locations that are not keys: the parts of clauses, and the types that choose between clauses.
_NO_KEYS = frozenset({"gpu_cache", "overflow", "tls", "disabled", *keys_without_effect.TIER_TYPES})


def _json_path(error: Any) -> str:
    """Turn ``("models", 0, "model")`` into ``"models[0].model"``."""
    text = ""
    for part in (*(part for part in error["loc"] if part not in _NO_KEYS), *_key_of(error)):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _key_of(error: Any) -> list[str]:
    return [error["ctx"]["key"]] if error["type"] == "at_key" else []


def _reason(error: Any) -> str:
    if error["type"] == "at_key":
        return str(error["ctx"]["reason"])
    if error["type"] == "missing":
        return "required, but absent"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    came = repr(error["input"])
    if error["loc"][-1:] in (("password",), ("kafka",)) or "password" in came or "secret" in came:
        came = "..."
    expected = _IN_WORDS_OF_JSON.get(error["type"], error["msg"][0].lower() + error["msg"][1:])
    close = ""
    if error["type"] == "literal_error":
        close = did_you_mean(error["input"], re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return f"{expected}, got {came if len(came) <= 80 else came[:77] + '...'}{close}"


def unquoted(value: Any) -> Any:
    """Return the number or boolean inside a string, because HugeCTR's Triton backend reads ``"64"`` as 64."""
    if not isinstance(value, str) or len(value) > 32:
        return value
    try:
        parsed = json.loads(value.lower())  # lower() also accepts "True"
    except ValueError:
        return value
    return parsed if isinstance(parsed, (bool, int, float)) else value


def _meaning(value: Any, spellings: dict[str, str]) -> str:
    if value is None:
        raise ValueError("expected a value, got null")
    if not isinstance(value, str) or value not in spellings:
        raise ValueError(f"expected one of {', '.join(spellings)}, got {value!r}{did_you_mean(value, spellings)}")
    return spellings[value]


def spelled(spellings: dict[str, str]) -> BeforeValidator:
    """Return a validator that replaces a spelling with its meaning."""
    return BeforeValidator(lambda value: _meaning(value, spellings))


def with_type(value: Any, spellings: dict[str, str]) -> Any:
    """Return the JSON object of a tier with the meaning of its type, which selects the tier's record."""
    if not isinstance(value, dict):
        return value
    if "type" not in value:
        raise at_key("type", "required, but absent")
    try:
        return {**value, "type": _meaning(value["type"], spellings)}
    except ValueError as err:
        raise at_key("type", str(err)) from err


def _refuse_fraction(value: Any) -> Any:
    """Refuse 64.0, which a choice of integers would accept as 64."""
    if isinstance(value, float):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


def _refuse_nul(text: str) -> str:
    """Refuse the character NUL, which a path cannot have."""
    if "\0" in text:
        raise ValueError("expected text without the character NUL")
    return text


def _in_folder(value: Any, info: ValidationInfo) -> Any:
    """Resolve a path from the folder of its JSON file."""
    if info.context is None or not isinstance(value, str):
        return value
    if not value:
        raise ValueError("string should have at least 1 character, got ''")
    if value.startswith(("~", "$")):  # of a shell, which has not read this file
        raise ValueError(f"a path is taken as it is: write {value.split('/')[0]!r} out")
    return Path(info.context) / _refuse_nul(value)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def secret(value: Any, info: ValidationInfo) -> Any:
    """Read a secret from where an object says it is; other values stay. No error shows a secret.

    ``{"env": NAME}`` is a variable of the environment, ``{"file": PATH}`` a file with the secret alone.
    """
    if not isinstance(value, dict):
        return value
    [(kind, place)] = value.items() if len(value) == 1 else [("", None)]
    if kind not in ("env", "file") or not isinstance(place, str) or not place:
        raise ValueError('expected text, {"env": "<variable>"} or {"file": "<path>"}')
    if kind == "env":
        found, what = os.environ.get(place), f"the variable {place}"
        if found is None:
            raise ValueError(f"{what} is not set")
    else:
        found, what = _secret_in(_in_folder(place, info)), f"the file {place}"
    if not found:
        raise ValueError(f"{what} is empty")
    return SecretStr(_refuse_nul(found))


def _secret_in(file: str | Path) -> str:
    try:
        return read_regular(file, _MOST_SECRET_BYTES).decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError(f"the file {file}: expected text in UTF-8") from None  # the cause has the bytes
    except OSError as err:
        raise ValueError(f"the file {file} cannot be read: {err.strerror}") from err


_Unquoted = BeforeValidator(unquoted)
INTEGERS = BeforeValidator(_refuse_fraction)  # for a choice of integers
AS_TUPLE = BeforeValidator(_as_tuple)
FilePath = Annotated[Path, BeforeValidator(_in_folder)]
PathText = Annotated[str, AfterValidator(_refuse_nul)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_refuse_nul)]
Secret = Annotated[SecretStr, BeforeValidator(secret)]
Switch = Annotated[bool, _Unquoted]
KeyBits = Annotated[Literal[32, 64], INTEGERS, _Unquoted]
LineKeys = Annotated[Literal[7, 15], INTEGERS, _Unquoted]
Float32 = Annotated[float, _Unquoted, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]
Magnitude = Annotated[float, _Unquoted, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, _Unquoted, Field(ge=1)]
Whole = Annotated[int, _Unquoted, Field(ge=0)]
Buffers = Annotated[Count, Field(le=MOST_BUFFERS)]
GpuIndex = Annotated[Whole, Field(lt=MOST_GPUS)]
Seconds = Annotated[Magnitude, Field(le=10 * 365 * 86_400)]  # ten years, because a thread's timeout is limited
Milliseconds = Annotated[Count, Field(le=3_600_000)]
Share = Annotated[float, _Unquoted, Field(ge=0.0, le=1.0)]
Part = Annotated[float, _Unquoted, Field(gt=0.0, lt=1.0)]
