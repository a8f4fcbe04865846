"""Read JSON strictly: what RFC 8259 does not allow, and what it leaves ambiguous, is an error that says where."""

import json
import math
from pathlib import Path
from typing import Any

from serving.errors import ConfigError


def read_json(path: str | Path) -> Any:
    """Read one JSON file; see ``parse_json``.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is not strict JSON; the message names the file.
    """
    source = str(path)
    try:
        if Path(path).exists() and not Path(path).is_file():  # reading a pipe would wait for ever
            raise ConfigError(source, "", "not a regular file")
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError as err:
        raise ConfigError(source, "", "no such file") from err
    except OSError as err:
        raise ConfigError(source, "", f"cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(source, "", f"not UTF-8: byte {err.start} is 0x{err.object[err.start]:02x}") from err
    return parse_json(text, source)


def parse_json(text: str, source: str) -> Any:
    """Parse ``text``; ``source`` names it in messages.

    Refused beside syntax errors: a key twice in one object, ``NaN`` and ``Infinity``, numbers too large for a float.

    Raises:
        ConfigError: with the line and column of a syntax error.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(source, "", f"the key {json.dumps(twice)} appears twice in one object")
        return members

    def finite(token: str) -> float:
        number = float(token)
        if not math.isfinite(number):
            raise ConfigError(source, "", f"{token} is not a finite number")
        return number

    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=finite, parse_float=finite)
    except json.JSONDecodeError as err:
        raise ConfigError(source, f"line {err.lineno} column {err.colno}", _syntax_reason(err)) from err
    except RecursionError as err:
        raise ConfigError(source, "", "nested too deeply") from err
    except ValueError as err:  # an integer of more digits than Python converts
        raise ConfigError(source, "", str(err)) from err


def _syntax_reason(err: json.JSONDecodeError) -> str:
    """Say what is wrong at the place where the parser stopped, in the words of someone who wrote the file."""
    rest = err.doc[err.pos :].lstrip()
    before = err.doc[: err.pos].rstrip()
    if not err.doc.strip():
        return "the file is empty"
    if rest.startswith(("//", "/*", "#")):
        return "comments are not JSON"
    if rest.startswith("'"):
        return "strings need double quotes"
    if (before.endswith(",") and rest.startswith(("}", "]"))) or rest.startswith((",}", ",]")):
        return "a comma before the closing bracket"
    if not rest or err.msg.startswith("Unterminated string"):
        return f"the text ends too early ({err.msg})"
    return err.msg
