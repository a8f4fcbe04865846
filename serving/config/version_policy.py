"""Which versions of a repository's model are served: Triton's ``version_policy``."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.errors import ConfigError, MissingExtraError, did_you_mean, nearest
from serving.model.regular_file import read_regular

CONFIG_FILE = "config.pbtxt"
_KEY = "version_policy"
_KEYS = ("latest", "all", "specific", "num_versions", "versions")
_UNKNOWN = "extra_forbidden"  # pydantic's name of the fault
_FIELD = re.compile(r"\b[A-Za-z_]+(?=\s*[:{])")
_ALMOST = 0.85  # how similar a misspelt version_policy is to the right one
_MOST_BYTES = 4 << 20


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

    def choose(self, there: Collection[int], source: str, broken: Collection[int] = ()) -> list[int]:
        """Return the versions to serve of the versions that are there but not ``broken``, newest first.

        Raises:
            ConfigError: a named version is not there; ``source`` is the file that names it.
        """
        newest_first = sorted(there, reverse=True)
        if self.specific is not None:
            wanted = sorted(set(self.specific.versions), reverse=True)
            missing = [version for version in wanted if version not in there]
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
        reason = f"unknown key{did_you_mean(fault['loc'][-1], _KEYS)}" if fault["type"] == _UNKNOWN else fault["msg"]
        raise ConfigError(source, path, reason) from err
    if len(policy.model_fields_set) != 1:
        raise ConfigError(source, _KEY, "expected one of latest, all and specific")
    return policy


def read_policy(directory: Path) -> VersionPolicy:
    """Return the policy in the ``config.pbtxt`` of a model's folder; the newest version without one.

    Raises:
        ConfigError: the file cannot be read, or its policy is not one of Triton's.
        MissingExtraError: the file has a policy, and the package that reads the file is not installed.
    """
    file = directory / CONFIG_FILE
    try:
        text = read_regular(file, _MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        return LATEST
    except OSError as err:
        raise ConfigError(str(file), "", f"cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(str(file), "", f"cannot be read: {err}") from err
    # Most files have no policy, so most repositories need no protobuf.
    if _KEY in text:
        return policy_from(_parse(text, file), str(file))
    misspelt = nearest(_KEY, _FIELD.findall(text), cutoff=_ALMOST)
    if misspelt:
        raise ConfigError(str(file), misspelt[0], f"unknown key; did you mean {_KEY!r}?")
    return LATEST


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        from google.protobuf import json_format, text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as err:
        raise MissingExtraError(err.name or "tritonclient", "grpc", f"{_KEY} in {file}") from err
    try:
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as err:
        raise ConfigError(str(file), "", str(err)) from err
    parsed: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return parsed
