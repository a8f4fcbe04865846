"""``update_source`` of a ``ps.json``: where rows come from while models are served.

``docs/updates.md`` describes each key. ``brokers`` and the times are HPS's keys.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, model_validator

from serving.config.clause import Clause, FilePath, Magnitude, Milliseconds, Seconds, Secret, Text, secret, with_type
from serving.config.tiers import RedisTlsConfig, parsed_addresses
from serving.stream.kafka import OWN_SETTINGS

_SPELLINGS = {
    **dict.fromkeys(("null", "none"), "disabled"),
    **dict.fromkeys(("kafka_message_queue", "kafka_mq", "kafka"), "kafka_message_queue"),
    "redis_stream": "redis_stream",
    "folder": "folder",
}
# The keys of each type; the first is required.
_KEYS = {
    "kafka_message_queue": (
        *("brokers", "kafka", "metadata_refresh_interval_ms", "failure_backoff_ms", "poll_timeout_ms"),
    ),
    "redis_stream": ("address", "user_name", "password", "tls", "poll_timeout_ms"),
    "folder": ("path", "poll_timeout_ms"),
}
_OF_EVERY_TYPE = ("update_headroom_ratio", "rejected_file", "max_staleness_s")


def _brokers(value: Any) -> Any:
    """Read ``host:port`` addresses, separated by ``;`` as in HPS, or by ``,``."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in parsed_addresses(value))


def _settings(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Read secrets, and refuse settings of librdkafka that would break the order or the position of the updates."""
    settings = {}
    for name, setting in value.items():
        if name in OWN_SETTINGS:
            raise ValueError(f"{name}: Hotrow sets it itself")
        try:
            settings[name] = secret(setting, info)
        except ValueError as err:
            raise ValueError(f"{name}: {err}") from err
        if not isinstance(settings[name], str | int | float | SecretStr):
            raise ValueError(f"{name}: expected text, a number or a boolean")
    return settings


class UpdateSourceConfig(Clause):
    """The source of updates.

    Attributes:
        kafka: further settings of librdkafka by their own names, such as those of SASL and TLS. A ``SecretStr``
            is a secret.
        path: a folder of numbered files.
        poll_timeout_ms: the most time that one read waits for messages.
        update_headroom_ratio: the room for new keys in RAM without a bound, as a share of a table's rows.
        rejected_file: gets the messages that no server can take; None: they are only counted and logged.
        max_staleness_s: a model whose newest rows are older, while messages wait, is not ready. None means no limit.
    """

    where: ClassVar[str] = "update_source"
    parts: ClassVar[dict[str, type[Clause]]] = {"tls": RedisTlsConfig}

    type: Literal["disabled", "kafka_message_queue", "redis_stream", "folder"] = "disabled"
    brokers: Annotated[str, BeforeValidator(_brokers)] | None = None
    metadata_refresh_interval_ms: Milliseconds = 30_000
    failure_backoff_ms: Milliseconds = 50
    poll_timeout_ms: Milliseconds = 500
    kafka: Annotated[dict[str, Any], AfterValidator(_settings)] = Field(default_factory=dict, repr=False)
    address: Annotated[tuple[tuple[str, int], ...], BeforeValidator(parsed_addresses)] | None = None
    user_name: Text = "default"
    password: Secret = SecretStr("")
    tls: RedisTlsConfig | None = None
    path: FilePath | None = None
    update_headroom_ratio: Annotated[Magnitude, Field(le=100.0)] = 0.25
    rejected_file: FilePath | None = None
    max_staleness_s: Seconds | None = None

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Drop the other keys of a disabled source."""
        return {"type": "disabled"} if given["type"] == "disabled" else given

    @model_validator(mode="after")
    def _belongs_to_type(self) -> Self:
        if self.type == "disabled":
            return self
        if self.address is not None and len(self.address) > 1:
            raise ValueError("address: expected the address of one server")
        required = _KEYS[self.type][0]
        if getattr(self, required) is None:
            raise ValueError(f"{required} is required if the type is {self.type}")
        for key in self.model_fields_set - {"type", *_OF_EVERY_TYPE, *_KEYS[self.type]}:
            owners = [kind for kind, keys in _KEYS.items() if key in keys]
            raise ValueError(f"{key}: only a {' or '.join(owners)} has it, but the type is {self.type}")
        return self


UpdateSource = Annotated[UpdateSourceConfig, BeforeValidator(lambda value: with_type(value, _SPELLINGS))]
