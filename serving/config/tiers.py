"""The storage tiers of a ``ps.json``: one record for each type of ``volatile_db``, and one for ``persistent_db``."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, model_validator

from kernels.host import OverflowPolicy, RowDtype
from serving.config import keys_without_effect
from serving.config.clause import (
    Clause,
    Count,
    FilePath,
    Magnitude,
    Milliseconds,
    Part,
    Switch,
    Text,
    Whole,
    at_key,
    spelled,
    unquoted,
)
from serving.errors import ConfigError, did_you_mean
from serving.model.capacity import MOST_ROWS

NO_MARGIN = 2**64 - 1  # HPS's default
# HPS's spellings and their meaning here. Only Hotrow has "snapshot".
VOLATILE_TYPES = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("hash_map", "hashmap", "hash", "map"), "hash_map"),
    **dict.fromkeys(("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"), "hash_map"),
    **dict.fromkeys(
        ("multi_process_hash_map", "multi_process_hashmap", "multi_process_hash", "multi_process_map"),
        "multi_process_hash_map",
    ),
    **dict.fromkeys(("redis_cluster", "redis"), "redis_cluster"),
    "snapshot": "snapshot",
}
_PERSISTENT_TYPES = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("rocks_db", "rocksdb", "rocks"), "rocks_db"),
}
_RANDOM, _LEAST_USED, _OLDEST = (
    ("evict_random", "random"),
    ("evict_least_used", "least_used"),
    ("evict_oldest", "oldest"),
)
_RAM_POLICIES = {spelling: one[0] for one in (_RANDOM, _LEAST_USED, _OLDEST) for spelling in one}
_REDIS_POLICIES = {spelling: one[1] for one in (_RANDOM, _LEAST_USED, _OLDEST) for spelling in one}
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>[0-9]{1,5})")


class DisabledConfig(Clause):
    """No tier. Only the names of the other keys are checked."""

    where: ClassVar[str] = "volatile_db"

    type: Literal["disabled"] = "disabled"

    @classmethod
    def known_keys(cls) -> set[str]:
        """See ``Clause``."""
        return _keys_of_all_types()


class _VolatileTier(Clause):
    """The keys that every type of ``volatile_db`` has."""

    where: ClassVar[str] = "volatile_db"

    cache_missed_embeddings: Switch = False
    initialize_after_startup: Switch = True
    initial_cache_rate: Annotated[Magnitude, Field(le=1.0)] = 1.0

    @classmethod
    def known_keys(cls) -> set[str]:
        """See ``Clause``."""
        return _keys_of_all_types()

    @classmethod
    def refuse(cls, key: str) -> None:
        """Raise the error for a key of another type, or for an unknown key."""
        having = (one for one in _TYPES if key in one.fields_by_key() or key in one.ignored_keys(one.type_name()))
        if owners := sorted(one.type_name() for one in having):
            raise ValueError(f"{key}: only a {' or '.join(owners)} has it, the type is {cls.type_name()}")
        super().refuse(key)

    @classmethod
    def type_name(cls) -> str:
        """Return the type as a ``ps.json`` spells it."""
        return str(cls.model_fields["type"].default)

    @model_validator(mode="after")
    def _fills_what_can_be_filled(self) -> Self:
        if self.initial_cache_rate < 1.0 and not isinstance(self, HashMapConfig):
            raise ValueError("initial_cache_rate: only RAM is filled in part; other tiers get whole tables")
        for key in ("initial_cache_rate", "hot_keys"):
            if key in self.model_fields_set and not self.initialize_after_startup:
                raise ValueError(f"{key}: initialize_after_startup is false, so nothing is loaded")
        return self


class _MemoryTier(_VolatileTier):
    """A tier whose rows this process reads as memory."""

    row_dtype: RowDtype = "fp32"
    row_dtype_per_table: dict[str, RowDtype] | None = None
    lookup_threads: Annotated[Count, Field(le=64)] | None = None


class HashMapConfig(_MemoryTier):
    """RAM of this process.

    Attributes:
        overflow_margin: the most rows of a partition; HPS's form of ``capacity_rows_of_each_table``.
        stated_policy: ``overflow_policy`` in the file.
        hot_keys: a folder with the keys of each table that are loaded first. None means the first rows of the files.
    """

    type: Literal["hash_map"] = "hash_map"
    capacity_rows: Count | None = None
    capacity_bytes: Count | None = None
    capacity_rows_per_table: dict[str, Whole] | None = None
    overflow_margin: Count | None = None
    num_partitions: Count = 16
    stated_policy: Annotated[
        Literal["evict_random", "evict_least_used", "evict_oldest"] | None, spelled(_RAM_POLICIES)
    ] = Field(default=None, validation_alias="overflow_policy")
    overflow_resolution_target: Part = 0.8
    refresh_time_after_fetch: Switch = True
    hot_keys: FilePath | None = None

    @property
    def capacity_rows_of_each_table(self) -> int | None:
        """The most rows of each table, instead of one budget for all tables."""
        return None if self.overflow_margin is None else self.overflow_margin * self.num_partitions

    @property
    def overflow_policy(self) -> OverflowPolicy | None:
        """The rows that leave a full table when new keys come. None means that no row leaves."""
        if self.overflow_margin is None and not self._capacities():
            return None
        policy = self.stated_policy or (None if self._capacities() else "evict_random")
        return policy if policy != "evict_oldest" or self.refresh_time_after_fetch else "evict_oldest_written"

    @property
    def evicts(self) -> bool:
        """Whether rows leave a table that is full."""
        return self.overflow_policy is not None

    @property
    def evicts_oldest(self) -> bool:
        """Whether the oldest rows leave."""
        return self.stated_policy == "evict_oldest"

    def _capacities(self) -> list[str]:
        names = ("capacity_bytes", "capacity_rows", "capacity_rows_per_table")
        return [name for name in names if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _has_one_capacity(self) -> Self:
        capacities = self._capacities() + (["overflow_margin"] if self.overflow_margin is not None else [])
        if len(capacities) > 1 and self._capacities():
            raise ValueError(f"expected one capacity, got {' and '.join(capacities)}")
        return self


class SharedMemoryConfig(_MemoryTier):
    """RAM that the processes of a machine share, if they use the same name."""

    type: Literal["multi_process_hash_map"] = "multi_process_hash_map"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")] = Field(
        default="hctr_mp_hash_map_database", validation_alias="shared_memory_name"
    )
    size_bytes: Count = Field(default=16 << 30, validation_alias="shared_memory_size")
    auto_remove: Switch = Field(default=True, validation_alias="shared_memory_auto_remove")

    @classmethod
    def refuse(cls, key: str) -> None:
        """See ``_VolatileTier``."""
        if key == "overflow_margin":
            raise ValueError(
                "overflow_margin: memory that processes share evicts nothing; shared_memory_size bounds it"
            )
        super().refuse(key)

    @model_validator(mode="after")
    def _holds_all(self) -> Self:
        if self.cache_missed_embeddings:
            raise ValueError("cache_missed_embeddings: memory that processes share has every row of the models' files")
        return self


class SnapshotConfig(_MemoryTier):
    """Snapshot files that processes map.

    Attributes:
        path: the folder for new snapshots. None means that the file of every table is a snapshot.
        overlay_capacity_rows: the most rows of each table that can change during serving. None means a sixteenth.
    """

    type: Literal["snapshot"] = "snapshot"
    path: FilePath | None = None
    overlay_capacity_rows: Annotated[Whole, Field(le=MOST_ROWS)] | None = None
    warm_up: Switch = True

    @model_validator(mode="after")
    def _holds_all(self) -> Self:
        if not self.initialize_after_startup:
            raise ValueError("initialize_after_startup: must be true where the type is snapshot, which holds all rows")
        return self


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
        policy: which rows are evicted: random, least used or oldest.
        target_ratio: the part of ``margin_rows`` that stays after an eviction.
        refreshes: with ``"oldest"``, a row that is read counts as written.
    """

    margin_rows: Count = Field(validation_alias="overflow_margin")
    policy: Annotated[Literal["random", "least_used", "oldest"], spelled(_REDIS_POLICIES)] = Field(
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


class RedisConfig(_VolatileTier):
    """A Redis server or cluster that holds embedding tables.

    Attributes:
        addresses: the nodes that are asked for the other nodes, in this order.
        num_partitions: the Redis hashes of one table. The number must not change after a table is written.
        num_node_connections: the most connections to one node.
        max_batch_size: the most keys of one round of commands.
        connect_timeout_ms: the most time to connect, including TLS and authentication.
        timeout_ms: the most time of one round of commands, including connecting and retrying.
        tls: None means no encryption.
        overflow: None means that every row stays.
        row_dtype: the row type in this tier, which must be that of the tables. None means float32.
    """

    parts: ClassVar[dict[str, type[Clause]]] = {"tls": RedisTlsConfig, "overflow": RedisOverflow}

    type: Literal["redis_cluster"] = "redis_cluster"
    addresses: Annotated[tuple[tuple[str, int], ...], BeforeValidator(_addresses)] = Field(
        default=(("127.0.0.1", 7000),), validation_alias="address"
    )
    user_name: Text = "default"
    password: SecretStr = SecretStr("")
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
    def evicts(self) -> bool:
        """Whether rows leave a table that is full."""
        return self.overflow is not None

    @property
    def evicts_oldest(self) -> bool:
        """Whether the oldest rows leave."""
        return self.overflow is not None and self.overflow.policy == "oldest"

    @model_validator(mode="after")
    def _partitions_suffice(self, info: ValidationInfo) -> Self:
        if info.context is not None and not self.num_node_connections <= self.num_partitions <= 65535:
            raise ValueError(
                f"num_partitions: expected num_node_connections ({self.num_node_connections}) to 65535, "
                f"got {self.num_partitions}"
            )
        return self


VolatileDbConfig = HashMapConfig | SharedMemoryConfig | SnapshotConfig | RedisConfig
_TYPES: tuple[type[_VolatileTier], ...] = (HashMapConfig, SharedMemoryConfig, SnapshotConfig, RedisConfig)


def _keys_of_all_types() -> set[str]:
    return keys_without_effect.all_keys("volatile_db").union(*(one.fields_by_key() for one in _TYPES))


def _with_meaning(value: Any) -> Any:
    """Return the JSON object with Hotrow's name of the type, and without a margin that HPS treats as no limit."""
    if not isinstance(value, dict):
        return value
    margin = unquoted(value.get("overflow_margin"))
    is_none = isinstance(margin, int) and margin >= NO_MARGIN
    kept = {key: one for key, one in value.items() if key != "overflow_margin" or not is_none}
    kind = _type_of(value, VOLATILE_TYPES)
    if kind == "redis_cluster" and value.get("layout", "hashes") not in ("hashes", "hps"):
        removed = " was removed: HPS's hashes are the only layout" if value["layout"] == "strings" else ""
        raise at_key("layout", f"expected hashes, got {value['layout']!r}{removed and f', which{removed}'}")
    return kept | {"type": kind}


def _type_of(value: dict[str, Any], types: dict[str, str]) -> str:
    if "type" not in value:
        raise at_key("type", "required, but absent")
    kind = value["type"]
    if not isinstance(kind, str) or kind not in types:
        came = "expected a value, got null" if kind is None else f"expected one of {', '.join(types)}, got {kind!r}"
        raise at_key("type", came + did_you_mean(kind, types))
    return types[kind]


VolatileDb = Annotated[
    Annotated[VolatileDbConfig | DisabledConfig, Field(discriminator="type")], BeforeValidator(_with_meaning)
]
"""One tier of ``volatile_db``. The type selects the record."""


def _persistent_with_meaning(value: Any) -> Any:
    return {**value, "type": _type_of(value, _PERSISTENT_TYPES)} if isinstance(value, dict) else value


class PersistentDbConfig(Clause):
    """The durable tier.

    Attributes:
        path: the database's folder; None only if the tier is disabled.
        read_only: read a database that another process may write. The database must already have the tables.
        catch_up_interval_ms: how often a ``read_only`` tier reads the other process's writes. None means never.
        num_threads: the background threads of the database.
        max_batch_size: the most keys of one database call, up to ``MOST_ROCKSDB_BATCH_ROWS``.
        timeout_ms: the most time that a lookup waits for the database. None means no limit.
        initialize_after_startup: load the models' files. Otherwise the database must already have the tables.
        row_dtype: the row type in this tier, which must be that of the tables. None means float32.
        warm_up: ask the system to read the files ahead when they are opened or loaded.
    """

    where: ClassVar[str] = "persistent_db"

    type: Literal["disabled", "rocks_db"] = "disabled"
    path: FilePath | None = None
    read_only: Switch = False
    catch_up_interval_ms: Milliseconds | None = None
    num_threads: Annotated[Count, Field(le=1024)] = 16
    max_batch_size: Count = 65536
    timeout_ms: Milliseconds | None = None
    initialize_after_startup: Switch = True
    row_dtype: RowDtype | None = None
    warm_up: Switch = True

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Drop the other keys of a disabled database."""
        return given if given["type"] == "rocks_db" else {"type": "disabled"}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.type != "disabled" and self.path is None:
            raise ValueError("path is required where the type is rocks_db")
        if self.catch_up_interval_ms is not None and not self.read_only:
            raise ValueError("catch_up_interval_ms: needs read_only, because only then another process writes")
        return self


PersistentDb = Annotated[PersistentDbConfig, BeforeValidator(_persistent_with_meaning)]


def check_together(
    volatile: Sequence[tuple[str, VolatileDbConfig | DisabledConfig]], persistent: PersistentDbConfig, source: str
) -> None:
    """Refuse tiers that do not fit together.

    Args:
        volatile: the tiers of ``volatile_db`` with their JSON paths, fastest first.
        persistent: the tier after them.
        source: the file, for messages.

    Raises:
        ConfigError: no tier has every row, or a tier would never be read.
    """
    if len(volatile) > 1:
        _check_order(volatile, source)
    fastest, has_persistent = volatile[0][1], persistent.type != "disabled"
    if fastest.type == "disabled" and not has_persistent:
        raise ConfigError(source, "", "volatile_db and persistent_db are both disabled: no tier would hold a row")
    if fastest.type == "snapshot" and has_persistent:
        reason = "a volatile_db of the type snapshot holds every row, so this tier would never be read"
        raise ConfigError(source, "persistent_db.type", reason)
    if not has_persistent:
        _check_holds_all(*volatile[-1], source)


def _check_order(volatile: Sequence[tuple[str, VolatileDbConfig | DisabledConfig]], source: str) -> None:
    listed = ("hash_map", "redis_cluster")  # from fastest to slowest
    last = -1
    for path, tier in volatile:
        if tier.type not in listed:
            reason = f"expected {' and '.join(listed)} in a list of tiers, got {tier.type}"
            if tier.type != "disabled":
                reason += ", which has every row of the models' files, so no slower tier would be read"
            raise ConfigError(source, f"{path}.type", reason)
        place = listed.index(tier.type)
        if place == last:
            raise ConfigError(source, f"{path}.type", f"two tiers of the type {tier.type}")
        if place < last:
            reason = f"{listed[last]} is slower than {tier.type}: put the faster tier first"
            raise ConfigError(source, f"{path}.type", reason)
        last = place


def _check_holds_all(path: str, slowest: VolatileDbConfig | DisabledConfig, source: str) -> None:
    """Refuse a slowest tier that does not have every row."""
    if isinstance(slowest, HashMapConfig) and not slowest.initialize_after_startup:
        reason = "false without a persistent_db: no tier would hold a row"
        raise ConfigError(source, f"{path}.initialize_after_startup", reason)
    if isinstance(slowest, HashMapConfig) and slowest.initial_cache_rate < 1.0:
        reason = "below 1 without a persistent_db: no tier would hold the other rows"
        raise ConfigError(source, f"{path}.initial_cache_rate", reason)
    if isinstance(slowest, RedisConfig) and slowest.overflow is not None:
        reason = "another tier must hold the rows that Redis evicts: add a persistent_db, or leave the margin out"
        raise ConfigError(source, f"{path}.overflow_margin", reason)
