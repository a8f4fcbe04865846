"""Which versions of a repository's model are served: Triton's ``version_policy``."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.errors import ConfigError, MissingExtraError, did_you_mean
from serving.model.regular_file import read_regular
from serving.model.strict_json import shorten

CONFIG_FILE = "config.pbtxt"
_KEY = "version_policy"
_MOST_BYTES = 4 << 20
_MOST_REASON = 300  # characters of protobuf's message, which repeats the line
#: The members of a policy, and pydantic's name of the fault of another one.
_MEMBERS, _UNKNOWN = ("latest", "all", "specific", "num_versions", "versions"), "extra_forbidden"
#: The keys that an export writes for Triton, and those that mean the same to ``hotrow serve``.
_EXPORTED = frozenset(
    {"name", "platform", "backend", "max_batch_size", "input", "output", "instance_group", "version_policy"}
)


class _Latest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    num_versions: int = Field(default=1, ge=1)


class _All(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Specific(BaseModel):
    model_config = ConfigDict(extra="forbid")

    versions: list[int] = Field(min_length=1)


class VersionPolicy(BaseModel):
    """Triton's ``version_policy``, with one of its three members.

    Attributes:
        latest: serve the newest versions.
        all: serve every version.
        specific: serve the named versions.
    """

    model_config = ConfigDict(extra="forbid")

    latest: _Latest | None = None
    all: _All | None = None
    specific: _Specific | None = None

    @classmethod
    def of_versions(cls, versions: Iterable[int]) -> Self:
        """Return the policy that serves these versions."""
        return cls(specific=_Specific(versions=list(versions)))

    def choose(self, numbers: Collection[int], source: str, broken: Collection[int] = ()) -> list[int]:
        """Return the versions to serve of the versions that are there but not ``broken``, newest first.

        Raises:
            ConfigError: a named version is not there; ``source`` is the file that names it.
        """
        newest_first = sorted(numbers, reverse=True)
        if self.specific is not None:
            wanted = sorted(set(self.specific.versions), reverse=True)
            missing = [version for version in wanted if version not in numbers]
            if missing:
                reason = f"version {missing[0]} is not there; the versions are {', '.join(map(str, newest_first))}"
                raise ConfigError(source, f"{_KEY}.specific", reason)
            return [version for version in wanted if version not in broken]
        newest_first = [version for version in newest_first if version not in broken]
        return newest_first if self.all is not None else newest_first[: (self.latest or _Latest()).num_versions]


LATEST = VersionPolicy()


def policy_from(config: dict[str, Any], source: str) -> VersionPolicy:
    """Return the policy of Triton's model configuration as a JSON object; the newest version without a policy.

    Raises:
        ConfigError: the policy is not one of Triton's; ``source`` names the configuration.
    """
    if _KEY not in config:
        return LATEST
    try:
        policy = VersionPolicy.model_validate(config[_KEY])
    except ValidationError as err:
        fault = err.errors()[0]
        path = ".".join((_KEY, *map(str, fault["loc"])))
        reason = f"unknown key{did_you_mean(fault['loc'][-1], _MEMBERS)}" if fault["type"] == _UNKNOWN else fault["msg"]
        raise ConfigError(source, path, reason) from err
    if len(policy.model_fields_set) != 1:
        raise ConfigError(source, _KEY, "expected one of latest, all and specific")
    return policy


class TritonConfig(NamedTuple):
    """What ``hotrow serve`` makes of a model's ``config.pbtxt``.

    Attributes:
        policy: which versions it serves.
        without_effect: the keys that only Triton reads, except those that every export has.
    """

    policy: VersionPolicy = LATEST
    without_effect: Sequence[str] = ()


def read_triton_config(directory: Path) -> TritonConfig:
    """Read the ``config.pbtxt`` of a model's folder; the newest version is served without one.

    Raises:
        ConfigError: the file cannot be read, or Triton refuses it too.
        MissingExtraError: the file has a policy, and the package that reads the file is not installed.
    """
    file = directory / CONFIG_FILE
    try:
        text = read_regular(file, _MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        return TritonConfig()
    except OSError as err:
        raise ConfigError(str(file), "", f"cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(str(file), "", f"cannot be read: {err}") from err
    return _parse(text, str(file), directory.name)


@lru_cache(maxsize=1024)  # each look at a folder reads all files
def _parse(text: str, source: str, model: str) -> TritonConfig:
    try:
        from google.protobuf import json_format, text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as err:
        if _KEY in text:  # only Triton reads the rest
            raise MissingExtraError(err.name or "tritonclient", "grpc", f"{_KEY} in {source}") from err
        return TritonConfig()
    try:
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as err:
        raise ConfigError(source, f"line {err.GetLine()}", str(err).partition(" : ")[2][:_MOST_REASON]) from err
    if message.name not in ("", model):
        reason = f"expected {model!r}, the folder's name, got {shorten(repr(message.name))}"
        raise ConfigError(source, "name", reason)
    parsed = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if "latest" in parsed.get(_KEY, {}):
        parsed[_KEY]["latest"].setdefault("num_versions", 0)  # what protobuf leaves out
    ignored = (key for key, value in parsed.items() if key not in _EXPORTED and value != {})
    return TritonConfig(policy_from(parsed, source), tuple(sorted(ignored)))
