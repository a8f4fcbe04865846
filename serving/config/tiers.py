"""The storage tiers of a ``ps.json``: one record for each type of ``volatile_db``, and one for ``persistent_db``.

``docs/configuration.md`` describes each key.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, model_validator

from kernels.host import OverflowPolicy, RowDtype
from serving.config import keys_without_effect
from serving.config.clause import (
    AS_TUPLE,
    Clause,
    Count,
    FilePath,
    Magnitude,
    Milliseconds,
    Part,
    Secret,
    Switch,
    Text,
    Whole,
    at_key,
    spelled,
    unquoted,
    with_type,
)
from serving.model.capacity import MOST_ROWS

_POLICIES = ("random", "least_used", "oldest")
# HPS's spellings of overflow_policy, with their names in HPS and without the verb.
RAM_POLICIES = {spelling: f"evict_{name}" for name in _POLICIES for spelling in (f"evict_{name}", name)}
REDIS_POLICIES = {spelling: name.removeprefix("evict_") for spelling, name in RAM_POLICIES.items()}
_CAPACITIES = ("capacity_bytes", "capacity_rows", "capacity_rows_per_table")
_NO_MARGIN = 2**64 - 1  # HPS's default
EVERY_MODEL = ("^hps_.+$",)  # HPS's default: with HPS's prefix of tags, it takes every model
_LISTED = ("hash_map", "redis_cluster")  # from fastest to slowest
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>[0-9]{1,5})")


def _compiled(filters: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a filter that is not a regular expression."""
    for text in filters:
        try:
            re.compile(text)
        except re.error as err:
            raise ValueError(f"{text!r} is not a regular expression: {err}") from err
    return filters


UpdateFilters = Annotated[tuple[str, ...], AS_TUPLE, AfterValidator(_compiled)]


class VolatileClause(Clause):
    """One tier of ``volatile_db``. It may have the names of the keys of all types.

    Attributes:
        spellings: HPS's spellings of the type. The first is the value of ``type``.
    """

    where: ClassVar[str] = "volatile_db"
    spellings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def known_keys(cls) -> set[str]:
        """See ``Clause``."""
        return keys_without_effect.all_keys(cls.where).union(*(kind.fields_by_key() for kind in _TYPES))

    @classmethod
    def refuse(cls, key: str) -> None:
        """Raise the error for a key of another type, or for an unknown key."""
        having = (kind for kind in _TYPES if key in kind.fields_by_key() or key in kind.ignored_keys(kind.spellings[0]))
        if owners := {kind.spellings[0] for kind in having if kind is not DisabledConfig}:
            raise ValueError(f"{key}: only a {' or '.join(sorted(owners))} has it, but the type is {cls.spellings[0]}")
        super().refuse(key)


class DisabledConfig(VolatileClause):
    """No tier. Only the names of the other keys are checked."""

    spellings: ClassVar[tuple[str, ...]] = ("disabled", "disable", "none")

    type: Literal["disabled"] = "disabled"


class VolatileTier(VolatileClause):
    """The keys of every type that holds rows."""

    cache_missed_embeddings: Switch = False
    update_filters: UpdateFilters = EVERY_MODEL
    initialize_after_startup: Switch = True
    initial_cache_rate: Annotated[Magnitude, Field(le=1.0)] = 1.0

    @model_validator(mode="after")
    def _fills_what_can_be_filled(self) -> Self:
        if self.initial_cache_rate < 1.0 and self.spellings[0] != "hash_map":
            raise ValueError("initial_cache_rate: only RAM is filled in part; other tiers get whole tables")
        for key in ("initial_cache_rate", "hot_keys"):
            if key in self.model_fields_set and not self.initialize_after_startup:
                raise ValueError(f"{key}: initialize_after_startup is false, so nothing is loaded")
        return self


class _MemoryTier(VolatileTier):
    """A tier whose rows this process reads as memory."""

    row_dtype: RowDtype = "fp32"
    row_dtype_per_table: dict[str, RowDtype] | None = None
    lookup_threads: Annotated[Count, Field(le=64)] | None = None


class HashMapConfig(_MemoryTier):
    """RAM of this process. ``stated_policy`` is ``overflow_policy`` in the file."""

    spellings: ClassVar[tuple[str, ...]] = (
        *("hash_map", "hashmap", "hash", "map"),
        *("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"),
    )

    type: Literal["hash_map"] = "hash_map"
    capacity_rows: Count | None = None
    capacity_bytes: Count | None = None
    capacity_rows_per_table: dict[str, Whole] | None = None
    overflow_margin: Count | None = None
    num_partitions: Count = 16
    stated_policy: Annotated[
        Literal["evict_random", "evict_least_used", "evict_oldest"] | None, spelled(RAM_POLICIES)
    ] = Field(default=None, validation_alias="overflow_policy")
    overflow_resolution_target: Part = 0.8
    refresh_time_after_fetch: Switch = True
    hot_keys: FilePath | None = None

    @property
    def capacity_rows_of_each_table(self) -> int | None:
        """The most rows of each table, instead of one budget for all tables."""
        return None if self.overflow_margin is None else self.overflow_margin * self.num_partitions

    @property
    def is_bounded(self) -> bool:
        """Whether there is a limit to the rows that it holds."""
        return self.overflow_margin is not None or bool(self._capacities())

    @property
    def overflow_policy(self) -> OverflowPolicy | None:
        """The rows that leave a full table when new keys come. None means that no row leaves."""
        if not self.is_bounded:
            return None
        policy = self.stated_policy or (None if self._capacities() else "evict_random")
        return policy if policy != "evict_oldest" or self.refresh_time_after_fetch else "evict_oldest_written"

    def _capacities(self) -> list[str]:
        return [name for name in _CAPACITIES if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _has_one_capacity(self) -> Self:
        capacities = self._capacities() + (["overflow_margin"] if self.overflow_margin is not None else [])
        if len(capacities) > 1:
            raise ValueError(f"expected one capacity, got {' and '.join(capacities)}")
        return self


class SharedMemoryConfig(_MemoryTier):
    """RAM that the processes of a machine share, if they use the same name."""

    spellings: ClassVar[tuple[str, ...]] = (
        *("multi_process_hash_map", "multi_process_hashmap", "multi_process_hash", "multi_process_map"),
    )

    type: Literal["multi_process_hash_map"] = "multi_process_hash_map"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")] = Field(
        default="hctr_mp_hash_map_database", validation_alias="shared_memory_name"
    )
    size_bytes: Count = Field(default=16 << 30, validation_alias="shared_memory_size")
    auto_remove: Switch = Field(default=True, validation_alias="shared_memory_auto_remove")

    @classmethod
    def refuse(cls, key: str) -> None:
        """See ``VolatileClause``."""
        if key == "overflow_margin":
            raise ValueError(f"{key}: shared RAM evicts nothing; shared_memory_size bounds it")
        super().refuse(key)

    @model_validator(mode="after")
    def _holds_all(self) -> Self:
        if self.cache_missed_embeddings:
            raise ValueError("cache_missed_embeddings: shared RAM has every row of the models' files")
        return self


class SnapshotConfig(_MemoryTier):
    """Snapshot files that processes map. Without a ``path`` the file of every table must be a snapshot."""

    spellings: ClassVar[tuple[str, ...]] = ("snapshot",)

    type: Literal["snapshot"] = "snapshot"
    path: FilePath | None = None
    overlay_capacity_rows: Annotated[Whole, Field(le=MOST_ROWS)] | None = None
    warm_up: Switch = True

    @model_validator(mode="after")
    def _holds_all(self) -> Self:
        if not self.initialize_after_startup:
            raise ValueError("initialize_after_startup: must be true if the type is snapshot, which holds all rows")
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


def parsed_addresses(value: Any) -> Any:
    """Read one or more ``host:port``, separated by ``;`` or ``,``. An IPv6 host is in brackets."""
    if isinstance(value, tuple):
        return value
    addresses = []
    for part in re.split(r"[;,]", value if isinstance(value, str) else repr(value)):
        match = _HOST_AND_PORT.fullmatch(part.strip())
        if match is None or not 0 < int(match["port"]) < 65536:
            shown = part.rpartition("@")[2]  # a URL may have a password before it
            raise ValueError(f"expected <host>:<port> with a port from 1 to 65535, got {shown!r}")
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
    addresses: Annotated[tuple[tuple[str, int], ...], BeforeValidator(parsed_addresses)] = Field(
        default=(("127.0.0.1", 7000),), validation_alias="address"
    )
    user_name: Text = "default"
    password: Secret = SecretStr("")
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


VolatileDbConfig = HashMapConfig | SharedMemoryConfig | SnapshotConfig | RedisConfig
_TYPES: tuple[type[VolatileClause], ...]
_TYPES = (DisabledConfig, HashMapConfig, SharedMemoryConfig, SnapshotConfig, RedisConfig)
_VOLATILE_TYPES = {spelling: kind.spellings[0] for kind in _TYPES for spelling in kind.spellings}


def _with_meaning(value: Any) -> Any:
    """Return the JSON object with Hotrow's name of the type, and without a margin that HPS treats as no limit."""
    margin = unquoted(value.get("overflow_margin")) if isinstance(value, dict) else None
    if isinstance(margin, int) and margin >= _NO_MARGIN:
        value = {key: item for key, item in value.items() if key != "overflow_margin"}
    return with_type(value, _VOLATILE_TYPES)


VolatileDb = Annotated[
    Annotated[VolatileDbConfig | DisabledConfig, Field(discriminator="type")], BeforeValidator(_with_meaning)
]
"""One tier of ``volatile_db``. The type selects the record."""

_PERSISTENT_TYPES = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("rocks_db", "rocksdb", "rocks"), "rocks_db"),
}


class PersistentDbConfig(Clause):
    """The durable tier.

    Attributes:
        path: the database's folder; None only if the tier is disabled.
        catch_up_interval_ms: how often a ``read_only`` tier reads the other process's writes. None means never.
        timeout_ms: the most time that a lookup waits for the database. None means no limit.
        row_dtype: the row type in this tier, which must be that of the tables. None means float32.
    """

    where: ClassVar[str] = "persistent_db"

    type: Literal["disabled", "rocks_db"] = "disabled"
    path: FilePath | None = None
    read_only: Switch = False
    catch_up_interval_ms: Milliseconds | None = None
    num_threads: Annotated[Count, Field(le=1024)] = 16
    max_batch_size: Count = 65536
    timeout_ms: Milliseconds | None = None
    update_filters: UpdateFilters = EVERY_MODEL
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
            raise ValueError("path is required if the type is rocks_db")
        if self.catch_up_interval_ms is not None and not self.read_only:
            raise ValueError("catch_up_interval_ms: needs read_only, because only then another process writes")
        return self


PersistentDb = Annotated[PersistentDbConfig, BeforeValidator(lambda value: with_type(value, _PERSISTENT_TYPES))]


def check_together(volatile: Sequence[VolatileDbConfig | DisabledConfig], persistent: PersistentDbConfig) -> None:
    """Refuse tiers that do not fit together: no tier has every row, or a tier would never be read.

    Args:
        volatile: the tiers of ``volatile_db``, fastest first.
        persistent: the tier after them.
    """
    if len(volatile) > 1:
        _check_order([tier.type for tier in volatile])
    fastest, has_persistent = volatile[0].type, persistent.type != "disabled"
    if fastest == "disabled" and not has_persistent:
        raise ValueError("volatile_db and persistent_db are both disabled: no tier would hold a row")
    if fastest == "snapshot" and has_persistent:
        reason = "a volatile_db of the type snapshot holds every row, so this tier would never be read"
        raise at_key("persistent_db.type", reason)
    check_filters(volatile, persistent)
    if not has_persistent:
        _check_holds_all(volatile[-1], f"volatile_db[{len(volatile) - 1}]")


def check_filters(volatile: Sequence[VolatileDbConfig | DisabledConfig], persistent: PersistentDbConfig) -> None:
    """Refuse a cache that would get updates of other models than the source of truth: the truth's filters decide."""
    tiers: dict[str, VolatileDbConfig | PersistentDbConfig] = {}
    for place, tier in enumerate(volatile):
        if not isinstance(tier, DisabledConfig):
            tiers[f"volatile_db[{place}]"] = tier
    if persistent.type != "disabled":
        tiers["persistent_db"] = persistent
    *caches, truth = tiers
    decides = tiers[truth].update_filters
    for path in caches:
        filters = tiers[path].update_filters
        if "update_filters" in tiers[path].model_fields_set and filters != decides:
            raise at_key(f"{path}.update_filters", f"{list(filters)}, but {truth} has {list(decides)}, which decides")


def _check_order(types: Sequence[str]) -> None:
    for place, kind in enumerate(types):
        if kind not in _LISTED:
            reason = f"expected {' and '.join(_LISTED)} in a list of tiers, got {kind}"
            if kind != "disabled":
                reason += ", which has every row of the models' files, so no slower tier would be read"
        elif kind == "hash_map" and "redis_cluster" in types[:place]:
            reason = f"redis_cluster is slower than {kind}: put the faster tier first"
        elif kind in types[:place]:
            reason = f"two tiers of the type {kind}"
        else:
            continue
        raise at_key(f"volatile_db[{place}].type", reason)


def _check_holds_all(slowest: VolatileDbConfig | DisabledConfig, path: str) -> None:
    """Refuse a slowest tier that does not have every row."""
    if isinstance(slowest, HashMapConfig) and not slowest.initialize_after_startup:
        reason = "false without a persistent_db: no tier would hold a row"
        raise at_key(f"{path}.initialize_after_startup", reason)
    if isinstance(slowest, HashMapConfig) and slowest.initial_cache_rate < 1.0:
        reason = "below 1 without a persistent_db: no tier would hold the other rows"
        raise at_key(f"{path}.initial_cache_rate", reason)
    if isinstance(slowest, RedisConfig) and slowest.overflow is not None:
        reason = "another tier must hold the rows that Redis evicts: add a persistent_db, or leave the margin out"
        raise at_key(f"{path}.overflow_margin", reason)
