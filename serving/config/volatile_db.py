"""``volatile_db`` of a ``ps.json``: RAM, RAM that processes share, snapshots, or a Redis server or cluster."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kernels.host import OverflowPolicy, RowDtype
from serving.config.capacity import MOST_ROWS
from serving.config.hps_keys import OVERFLOW_POLICIES, VOLATILE_TYPES, spelling
from serving.config.records import RedisConfig, RedisOverflow, RedisTlsConfig, SharedMemoryConfig, VolatileDbConfig
from serving.config.scalars import Count, FileName, Magnitude, Milliseconds, Part, Switch, Whole
from serving.config.validation import Clause

NO_MARGIN = 2**64 - 1  # HPS's default
# Hotrow's own keys say something about some types only; of HPS's, those of another type have no effect.
CAPACITIES = frozenset({"capacity_rows", "capacity_bytes", "capacity_rows_per_table"})
ROW_DTYPES = frozenset({"row_dtype", "row_dtype_per_table"})
OWN_KEYS = {
    "hash_map": CAPACITIES | ROW_DTYPES | {"lookup_threads", "hot_keys"},
    "multi_process_hash_map": ROW_DTYPES | {"lookup_threads"},
    "redis_cluster": frozenset({"connect_timeout_ms", "layout", "row_dtype", "timeout_ms"}),
    "snapshot": ROW_DTYPES | {"lookup_threads", "path", "overlay_capacity_rows", "warm_up"},
}
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>[0-9]{1,5})")


def _volatile_type(value: Any) -> str:
    return spelling(value, VOLATILE_TYPES)


def _overflow_policy(value: Any) -> str:
    return spelling(value, OVERFLOW_POLICIES)


def _addresses(value: Any) -> tuple[tuple[str, int], ...]:
    """``host:port``, one or several, separated by ``;`` or ``,``; an IPv6 host stands in brackets."""
    addresses = []
    for part in re.split(r"[;,]", value if isinstance(value, str) else repr(value)):
        match = _HOST_AND_PORT.fullmatch(part.strip())
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(f"expected <host>:<port>, got {part!r}")
        addresses.append((match["v6"] or match["host"], int(match["port"])))
    return tuple(addresses)


class VolatileDbClause(Clause):
    """``volatile_db`` (source: HPS's configuration, HugeCTR v24.06).

    Attributes:
        type: RAM, snapshots, Redis, or none.
        capacity_rows: Hotrow's own: most rows in RAM, over all tables.
        capacity_bytes: Hotrow's own: the same in bytes.
        capacity_rows_per_table: Hotrow's own: most rows in RAM of each table, by full name; one of the three.
        row_dtype: Hotrow's own: the form in which rows are kept.
        row_dtype_per_table: Hotrow's own: the same for some tables, by full name.
        lookup_threads: Hotrow's own: most threads at one big lookup.
        path: Hotrow's own: the folder in which snapshots are made.
        overlay_capacity_rows: Hotrow's own: most rows of each table that can be changed over its snapshot.
        warm_up: Hotrow's own: read snapshots that fit into memory beside the first lookups.
        cache_missed_embeddings: copy rows that ``persistent_db`` held into this tier, beside the lookups.
        initialize_after_startup: load the models' files into it.
        initial_cache_rate: the part of each table's rows that RAM is filled with, as far as its capacity goes.
        hot_keys: Hotrow's own: a folder of the keys that are loaded into RAM first, by table; see ``FirstRows``.
        overflow_margin: most rows of each partition, so most rows of each table in RAM are ``num_partitions`` times it.
        overflow_policy: which rows leave a table beyond the margin, or, where it is given, beyond a capacity.
        overflow_resolution_target: the part of the bound that an overflow leaves.
        refresh_time_after_fetch: whether ``evict_oldest`` goes by the last use, the default, or the last write.
        connect_timeout_ms: Hotrow's own: see ``RedisConfig``.
        timeout_ms: Hotrow's own: see ``RedisConfig``.
        layout: Hotrow's own: see ``RedisConfig``.

    From ``address`` to ``tls_server_name_identification`` the attributes are ``RedisConfig``'s, the three behind them
    ``SharedMemoryConfig``'s; no effect on other types. The attributes behind these shape HPS's hash maps, or the
    updates from Kafka (``update_source``); no effect here.
    """

    type: Annotated[
        Literal["disabled", "hash_map", "multi_process_hash_map", "redis_cluster", "snapshot"],
        BeforeValidator(_volatile_type),
    ]
    capacity_rows: Count | None = None
    capacity_bytes: Count | None = None
    capacity_rows_per_table: dict[str, Whole] | None = None
    row_dtype: RowDtype = "fp32"
    row_dtype_per_table: dict[str, RowDtype] | None = None
    lookup_threads: Annotated[Count, Field(le=64)] | None = None
    path: FileName | None = None
    overlay_capacity_rows: Annotated[Whole, Field(le=MOST_ROWS)] | None = None
    warm_up: Switch = True
    cache_missed_embeddings: Switch = False
    initialize_after_startup: Switch = True
    initial_cache_rate: Annotated[Magnitude, Field(le=1.0)] = 1.0
    hot_keys: FileName | None = None
    overflow_margin: Count | None = None
    overflow_policy: Annotated[OverflowPolicy | None, BeforeValidator(_overflow_policy)] = None
    overflow_resolution_target: Part = 0.8
    refresh_time_after_fetch: Switch | None = None
    connect_timeout_ms: Milliseconds = 500
    timeout_ms: Milliseconds = 2000
    layout: Literal["hps", "strings"] = "hps"

    address: Annotated[tuple[tuple[str, int], ...], BeforeValidator(_addresses)] = (("127.0.0.1", 7000),)
    user_name: FileName = "default"
    password: SecretStr = SecretStr("")
    num_partitions: Count = 16
    num_node_connections: Count = 5
    max_batch_size: Count = 65536
    enable_tls: Switch = False
    tls_ca_certificate: FileName | None = None
    tls_client_certificate: FileName | None = None
    tls_client_key: FileName | None = None
    tls_server_name_identification: str = ""

    shared_memory_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")] = (
        "hctr_mp_hash_map_database"
    )
    shared_memory_size: Count = 16 << 30
    shared_memory_auto_remove: Switch = True

    algorithm: str | None = None
    allocation_rate: Count | None = None
    max_get_batch_size: Count | None = None
    max_set_batch_size: Count | None = None
    update_filters: list[str] | None = None

    @model_validator(mode="after")
    def _own_keys_fit_the_type(self) -> Self:
        own = frozenset().union(*OWN_KEYS.values())
        for key in sorted(self.model_fields_set & own - OWN_KEYS.get(self.type, frozenset())):
            kinds = " or ".join(kind for kind, keys in OWN_KEYS.items() if key in keys)
            raise ValueError(f"{key}: only a {kinds} has it, the type is {self.type}")
        capacities = [name for name in sorted(CAPACITIES) if getattr(self, name) is not None]
        if capacities and self.margin is not None:
            capacities.append("overflow_margin")
        if len(capacities) > 1:
            raise ValueError(f"expected one capacity, got {' and '.join(capacities)}")
        return self

    @model_validator(mode="after")
    def _fills_what_can_be_filled(self) -> Self:
        if self.initial_cache_rate < 1.0 and self.type != "hash_map":
            raise ValueError(
                "initial_cache_rate: only RAM is filled in part; Redis is given whole tables, and so are snapshots"
            )
        for key in ("initial_cache_rate", "hot_keys"):
            if key in self.model_fields_set and not self.initialize_after_startup:
                raise ValueError(f"{key}: initialize_after_startup is false, so nothing is loaded")
        return self

    @model_validator(mode="after")
    def _snapshots_hold_all_rows(self) -> Self:
        if self.type == "snapshot" and not self.initialize_after_startup:
            raise ValueError("initialize_after_startup: must be true where the type is snapshot, which holds all rows")
        return self

    @model_validator(mode="after")
    def _shared_memory_holds_all(self) -> Self:
        if self.type != "multi_process_hash_map":
            return self
        if self.margin is not None:
            raise ValueError(
                "overflow_margin: memory that processes share evicts nothing; shared_memory_size bounds it"
            )
        if self.cache_missed_embeddings:
            raise ValueError("cache_missed_embeddings: memory that processes share has every row of the models' files")
        return self

    @model_validator(mode="after")
    def _redis_is_consistent(self) -> Self:
        if self.type != "redis_cluster":
            return self
        if not self.num_node_connections <= self.num_partitions <= 65535:
            raise ValueError(
                f"num_partitions: expected num_node_connections ({self.num_node_connections}) to 65535, "
                f"got {self.num_partitions}"
            )
        if self.tls_client_key is not None and self.tls_client_certificate is None:
            raise ValueError("tls_client_key: without tls_client_certificate")
        if self.layout == "strings" and self._redis_overflow() is not None:
            raise ValueError("overflow_margin: with layout 'strings' no partition is there to overflow")
        given = sorted(key for key in self.model_fields_set if key.startswith("tls_"))
        if given and "enable_tls" not in self.model_fields_set:
            raise ValueError(f"{given[0]}: enable_tls is absent, so nothing would be encrypted")
        return self

    def record(self, folder: Path) -> VolatileDbConfig:
        """The clause as a record; relative files start from ``folder``."""
        policy = self._policy()
        redis = self._redis(folder) if self.type == "redis_cluster" else None
        return VolatileDbConfig(
            type=self.type,
            capacity_rows=self.capacity_rows,
            capacity_bytes=self.capacity_bytes,
            capacity_rows_per_table=self.capacity_rows_per_table,
            row_dtype=self.row_dtype,
            row_dtype_per_table=self.row_dtype_per_table,
            lookup_threads=self.lookup_threads,
            capacity_rows_of_each_table=self._rows_of_each_table(),
            overflow_policy=policy,
            overflow_resolution_target=self.overflow_resolution_target if policy else 0.8,
            initial_cache_rate=self.initial_cache_rate,
            hot_keys=None if self.hot_keys is None else folder / self.hot_keys,
            path=folder / self.path if self.path is not None else None,
            overlay_capacity_rows=self.overlay_capacity_rows,
            warm_up=self.warm_up,
            shared_memory=self._shared_memory() if self.type == "multi_process_hash_map" else None,
            redis=redis,
            cache_missed_embeddings=self.cache_missed_embeddings,
            initialize_after_startup=self.initialize_after_startup,
        )

    def _shared_memory(self) -> SharedMemoryConfig:
        return SharedMemoryConfig(
            name=self.shared_memory_name, size_bytes=self.shared_memory_size, auto_remove=self.shared_memory_auto_remove
        )

    @property
    def margin(self) -> int | None:
        """``overflow_margin``; None where there is none."""
        return None if self.overflow_margin is None or self.overflow_margin >= NO_MARGIN else self.overflow_margin

    @property
    def evicts(self) -> bool:
        """Whether rows leave a table that is full."""
        return self._policy() is not None or (self.type == "redis_cluster" and self.margin is not None)

    def _rows_of_each_table(self) -> int | None:
        return self.margin * self.num_partitions if self.type == "hash_map" and self.margin is not None else None

    def _policy(self) -> OverflowPolicy | None:
        """The policy of RAM that has a bound; HPS's default where only its margin is given."""
        has_capacity = any(getattr(self, name) is not None for name in CAPACITIES)
        if self.type != "hash_map" or not (has_capacity or self.margin is not None):
            return None
        policy = self.overflow_policy or (None if has_capacity else "evict_random")
        return "evict_oldest_written" if policy == "evict_oldest" and self.refresh_time_after_fetch is False else policy

    def _redis(self, folder: Path) -> RedisConfig:
        def file(name: str | None) -> Path | None:
            return None if name is None else folder / name

        tls = RedisTlsConfig(
            ca_certificate=file(self.tls_ca_certificate),
            client_certificate=file(self.tls_client_certificate),
            client_key=file(self.tls_client_key),
            server_name=self.tls_server_name_identification,
        )
        return RedisConfig(
            addresses=self.address,
            user_name=self.user_name,
            password=self.password,
            num_partitions=self.num_partitions,
            num_node_connections=self.num_node_connections,
            max_batch_size=self.max_batch_size,
            connect_timeout_ms=self.connect_timeout_ms,
            timeout_ms=self.timeout_ms,
            tls=tls if self.enable_tls else None,
            overflow=self._redis_overflow(),
            layout=self.layout,
            row_dtype=self.row_dtype if "row_dtype" in self.model_fields_set else None,
        )

    def _redis_overflow(self) -> RedisOverflow | None:
        if self.margin is None:
            return None
        policies: dict[str, Literal["random", "least_used", "oldest"]] = {
            "evict_random": "random",
            "evict_least_used": "least_used",
            "evict_oldest": "oldest",
        }
        return RedisOverflow(
            margin_rows=self.margin,
            policy=policies[self.overflow_policy or "evict_random"],
            target_ratio=self.overflow_resolution_target,
            refreshes=self.refresh_time_after_fetch is not False,
        )
