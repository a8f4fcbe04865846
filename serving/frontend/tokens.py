"""Tokens: random strings that clients send. A JSON file holds their SHA-256, their names and their scopes.

{"ranker": {"sha256": "<64 hexadecimal digits>", "scopes": ["infer"]}}
"""

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError, OutputError
from serving.frontend.watched_files import WatchedFiles, read_small_file
from serving.model.atomic import atomic_write
from serving.model.regular_file import real_path
from serving.model.strict_json import Fields, parse_json

INFER, CONTROL, METRICS = "infer", "control", "metrics"
SCOPES = (INFER, CONTROL, METRICS)
_OPTION = "--tokens"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TOKEN_BYTES = 32
_PREFIX = "hotrow_"  # programs that search for leaked secrets recognize it


@dataclass(frozen=True, slots=True)
class Token:
    """What the server knows of one token.

    Attributes:
        name: for people and for limits; unique in its file.
        digest: SHA-256 of the token.
        scopes: what the token allows.
    """

    name: str
    digest: bytes
    scopes: frozenset[str]


class Tokens:
    """The tokens of a file, which is read again when it changes. Any thread may use them."""

    def __init__(self, file: Path) -> None:
        """Read the file, and watch it until ``close``.

        Raises:
            ConfigError: the file cannot be read, or is not a file of tokens.
        """
        self._file = file
        self._tokens: Mapping[bytes, Token] = {}
        self._watched = WatchedFiles({_OPTION: file}, self._use)

    def find(self, token: bytes) -> Token | None:
        """Return a client's token, or None if it is unknown. The time that this takes says nothing about tokens."""
        digest = hashlib.sha256(token).digest()
        found = self._tokens.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def close(self) -> None:
        """Stop watching the file."""
        self._watched.close()

    def _use(self, contents: Sequence[bytes]) -> None:
        self._tokens = {token.digest: token for token in _parse(contents[0], f"{_OPTION} {self._file}")}


def add_token(file: Path, name: str, scopes: Iterable[str], show: Callable[[str], object]) -> None:
    """Make a token, show it, and add its SHA-256 to ``file``.

    Args:
        file: the file; it need not exist.
        name: the token's name.
        scopes: what the token allows.
        show: takes the token, which is not stored. If it raises, the file does not change, because nobody may have seen
            the token.

    Raises:
        ConfigError: the name or the file is not valid, or the file has a token with this name.
        OutputError: the file cannot be written.
    """
    _check_name(name, "NAME", "")
    token = _PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    file = real_path(file)  # a link stays a link
    try:
        descriptor = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as err:
        raise OutputError(f"{file.parent}: cannot be opened: {err.strerror}") from err
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # against another `hotrow token`; the file itself is replaced
        tokens = _parse(read_small_file(file, str(file)), str(file)) if _is_there(file) else []
        if any(known.name == name for known in tokens):
            raise ConfigError(
                str(file), name, "the file has a token with this name; choose another name, or delete the entry"
            )
        tokens.append(Token(name, hashlib.sha256(token.encode()).digest(), frozenset(scopes)))
        with _replaced(file, tokens):
            show(token)
    finally:
        os.close(descriptor)


def _is_there(file: Path) -> bool:
    try:
        file.lstat()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _replaced(file: Path, tokens: Iterable[Token]) -> Iterator[None]:
    """Write ``tokens``, and replace ``file`` after the block."""
    document = {
        token.name: {"sha256": token.digest.hex(), "scopes": [scope for scope in SCOPES if scope in token.scopes]}
        for token in tokens
    }
    try:
        earlier = file.stat() if file.exists() else None
        with atomic_write(file) as opened:
            os.fchmod(opened.fileno(), 0o600 if earlier is None else earlier.st_mode & 0o777)
            if earlier is not None:
                with suppress(PermissionError):  # only root may give a file to another user
                    os.fchown(opened.fileno(), earlier.st_uid, earlier.st_gid)
            opened.write(json.dumps(document, indent=2).encode() + b"\n")
            opened.flush()  # a full disk is found before the block
            yield
    except OSError as err:
        raise OutputError(f"{file}: cannot be written: {err.strerror}") from err


def _parse(content: bytes, source: str) -> list[Token]:
    """Read a file of tokens. No message shows a digest, because it might be a token by mistake."""
    try:
        text = content.decode()
    except UnicodeDecodeError as err:
        raise ConfigError(source, "", f"not UTF-8: byte {err.start} is 0x{content[err.start]:02x}") from err
    document = Fields(parse_json(text, source), source, "")
    tokens: dict[bytes, Token] = {}
    for name in document:
        _check_name(name, source, "")
        if not isinstance(document.value(name), dict):
            raise document.error("expected an object with sha256 and scopes", name)
        members = document.object(name, ("sha256", "scopes"))
        sha256 = members.value("sha256")
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise members.error("expected 64 hexadecimal digits in lower case", "sha256")
        scopes = [
            members.check_choice(scope, f"scopes[{index}]", {known: known for known in SCOPES})
            for index, scope in enumerate(members.items("scopes"))
        ]
        token = Token(name, bytes.fromhex(sha256), frozenset(scopes))
        if token.digest in tokens:
            raise members.error(f"this is the token of {tokens[token.digest].name!r}", "sha256")
        tokens[token.digest] = token
    return list(tokens.values())


def _check_name(name: str, source: str, path: str) -> None:
    if not _NAME.fullmatch(name):
        expected = "expected a name of 1 to 64 letters, digits, '.', '_' and '-'"
        raise ConfigError(source, path, f"{expected}, got {name[:32]!r}")
