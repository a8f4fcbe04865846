"""The type of ``volatile_db`` that is a Redis server or cluster."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, model_validator

from kernels.host import RowDtype
from serving.config.clause import Clause, Count, FilePath, Milliseconds, Part, Switch, Text, spelled
from serving.config.tiers.volatile import REDIS_POLICIES, VolatileTier

_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>[0-9]{1,5})")


class RedisTlsConfig(Clause):
    """The encryption of connections to Redis. Without ``ca_certificate`` the system's certificates are used."""

    enabled: Switch = Field(default=True, validation_alias="enable_tls")
    ca_certificate: FilePath | None = Field(default=None, validation_alias="tls_ca_certificate")
    client_certificate: FilePath | None = Field(default=None, validation_alias="tls_client_certificate")
    client_key: FilePath | None = Field(default=None, validation_alias="tls_client_key")
    server_name: str = Field(default="", validation_alias="tls_server_name_identification")

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Refuse certificates without ``enable_tls``, because the user expects encryption."""
        if "enable_tls" not in given:
            raise ValueError(f"{min(given)}: needs enable_tls, because otherwise nothing is encrypted")
        if "tls_client_key" in given and "tls_client_certificate" not in given:
            raise ValueError("tls_client_key: needs tls_client_certificate")
        return given


class RedisOverflow(Clause):
    """The eviction of rows from a full Redis tier.

    Attributes:
        margin_rows: the most rows of a partition.
        policy: which rows are evicted.
        target_ratio: the part of ``margin_rows`` that stays after an eviction.
        refreshes: with ``"oldest"``, a row that is read counts as written.
    """

    margin_rows: Count = Field(validation_alias="overflow_margin")
    policy: Annotated[Literal["random", "least_used", "oldest"], spelled(REDIS_POLICIES)] = Field(
        default="random", validation_alias="overflow_policy"
    )
    target_ratio: Part = Field(default=0.8, validation_alias="overflow_resolution_target")
    refreshes: Switch = Field(default=True, validation_alias="refresh_time_after_fetch")


def _addresses(value: Any) -> Any:
    """Parse one or more ``host:port``, separated by ``;`` or ``,``. An IPv6 host is in brackets."""
    if isinstance(value, tuple):
        return value
    addresses = []
    for part in re.split(r"[;,]", value if isinstance(value, str) else repr(value)):
        match = _HOST_AND_PORT.fullmatch(part.strip())
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(f"expected <host>:<port>, got {part!r}")
        addresses.append((match["v6"] or match["host"], int(match["port"])))
    return tuple(addresses)


def _layout(value: Any) -> str:
    if value not in ("hashes", "hps"):
        removed = ", which was removed: HPS's hashes are the only layout" if value == "strings" else ""
        raise ValueError(f"expected hashes, got {value!r}{removed}")
    return "hashes"


class RedisConfig(VolatileTier):
    """A Redis server or cluster that holds embedding tables.

    Attributes:
        addresses: the nodes that are asked for the other nodes, in this order.
        num_partitions: the Redis hashes of one table. The number must not change after a table is written.
        connect_timeout_ms: the most time to connect, including TLS and authentication.
        timeout_ms: the most time of one round of commands, including connecting and retrying.
        tls: None means no encryption.
        overflow: None means that every row stays.
        row_dtype: the row type in this tier, which must be that of the tables. None means float32.
    """

    spellings: ClassVar[tuple[str, ...]] = ("redis_cluster", "redis")
    parts: ClassVar[dict[str, type[Clause]]] = {"tls": RedisTlsConfig, "overflow": RedisOverflow}

    type: Literal["redis_cluster"] = "redis_cluster"
    addresses: Annotated[tuple[tuple[str, int], ...], BeforeValidator(_addresses)] = Field(
        default=(("127.0.0.1", 7000),), validation_alias="address"
    )
    user_name: Text = "default"
    password: SecretStr = SecretStr("")
    layout: Annotated[Literal["hashes"], BeforeValidator(_layout)] = "hashes"
    num_partitions: Count = 16
    num_node_connections: Count = 5
    max_batch_size: Count = 65536
    connect_timeout_ms: Milliseconds = 500
    timeout_ms: Milliseconds = 2000
    tls: Annotated[RedisTlsConfig | None, AfterValidator(lambda tls: tls if tls and tls.enabled else None)] = None
    overflow: RedisOverflow | None = None
    row_dtype: RowDtype | None = None

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Drop the keys about overflows if there is no margin, because nothing overflows."""
        if "overflow_margin" in given:
            return given
        return {key: value for key, value in given.items() if key not in RedisOverflow.fields_by_key()}

    @property
    def overflow_policy(self) -> str | None:
        """The rows that leave a full partition. None means that no row leaves."""
        return None if self.overflow is None else self.overflow.policy

    @model_validator(mode="after")
    def _partitions_suffice(self, info: ValidationInfo) -> Self:
        if info.context is not None and not self.num_node_connections <= self.num_partitions <= 65535:
            raise ValueError(
                f"num_partitions: expected num_node_connections ({self.num_node_connections}) to 65535, "
                f"got {self.num_partitions}"
            )
        return self
