"""Reads protobuf's text format, in which Triton's ``config.pbtxt`` is written, without protobuf.

A document is the members of a message: by name, the values in their order. A value is a message or a text: a number, a
name, or a string with its quotes.
"""

import re
from collections.abc import Iterator
from typing import NoReturn

from serving.errors import ConfigError
from serving.model.strict_json import shorten

Message = dict[str, list["Message | str"]]

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|[-+.\w]+|[{}\[\]<>:,;]""", re.ASCII
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ENDS = {"{": "}", "<": ">"}
_PUNCTUATION = frozenset("{}[]<>:,;")
_MOST_LEVELS = 32


def parse_text_format(text: str, source: str) -> Message:
    """Parse ``text``; ``source`` names it in messages.

    Raises:
        ConfigError: it is not text format; the message has the line.
    """
    return _Parser(text, source).members("", 0)


class _Parser:
    """Reads one token after the other; the token after the last one is ``""``."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0  # where the current token begins
        self._tokens = self._split()
        self._token = next(self._tokens)

    def members(self, end: str, level: int) -> Message:
        """Read the members of a message and the token that ends it."""
        if level > _MOST_LEVELS:
            self._refuse(f"at most {_MOST_LEVELS} levels")
        found: Message = {}
        while not self._skips(end):
            if not _NAME.fullmatch(self._token):
                self._refuse(f"a field's name or {end}" if end else "a field's name")
            name = self._take()
            has_colon = self._skips(":")
            if not has_colon and self._token not in ("[", *_ENDS):
                self._refuse("a colon")
            found.setdefault(name, []).extend(self._values(level))
            if not self._skips(","):
                self._skips(";")
        return found

    def _values(self, level: int) -> Iterator[Message | str]:
        if not self._skips("["):
            yield self._value(level)
            return
        if self._skips("]"):
            return
        yield self._value(level)
        while not self._skips("]"):
            if not self._skips(","):
                self._refuse("a comma or ]")
            yield self._value(level)

    def _value(self, level: int) -> Message | str:
        if self._token in _ENDS:
            return self.members(_ENDS[self._take()], level + 1)
        if not self._token or self._token in _PUNCTUATION:
            self._refuse("a value")
        value = self._take()
        while value[0] in "\"'" and self._token[:1] in ("'", '"'):  # strings in a row are one string
            value = value[:-1] + self._take()[1:]
        return value

    def _skips(self, token: str) -> bool:
        """Take the token if it is this one, and return whether it was."""
        if self._token != token:
            return False
        self._take()
        return True

    def _take(self) -> str:
        token = self._token
        if token:
            self._token = next(self._tokens)
        return token

    def _split(self) -> Iterator[str]:
        while self._at < len(self._text):
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                self._token = self._text[self._at]
                self._refuse("protobuf's text format")
            if match["space"] is None:
                yield match[0]
            self._at = match.end()
        yield ""

    def _refuse(self, expected: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        came = repr(shorten(self._token)) if self._token else "the end"
        raise ConfigError(self._source, f"line {line}", f"expected {expected}, got {came}")
