"""What a configuration says, as frozen records: one per model, one per table, one per storage tier."""

from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from kernels.host import OverflowPolicy, RowDtype
from serving.config.gpu_records import GpuCacheConfig, GpuNetworkConfig
from serving.config.record import Record
from serving.model.records import Combiner
from serving.model.sparse_rows import KeyType, RowLayout

# A write batch of RocksDB's is applied with Python's global lock held, so it is kept short. The lock is held too while
# keys and values are converted; values of a short read are still in the CPU's cache then.
MOST_ROCKSDB_BATCH_ROWS = 2048


class TableConfig(Record):
    """One embedding table of one model.

    Attributes:
        name: table name inside the model; ``ModelConfig.full_name`` is what stores know it by.
        dim: D.
        slots: S.
        combiner: how the rows of one slot are pooled.
        default_value: every float of an unknown key's vector.
        file: the sparse model, a directory (``key`` + ``emb_vector``) or a single file.
        row_layout: form of a single file's rows.
        max_keys_per_sample: over all slots of this table; None means no limit.
        row_dtype: the form in which RAM keeps the rows (``kernels.host.HostTable``); answers are made of the rows as
            that form rounds them, whichever tier they come from.
    """

    name: str
    dim: int
    slots: int
    combiner: Combiner
    default_value: float = 0.0
    file: Path
    row_layout: RowLayout = "distributed"
    max_keys_per_sample: int | None = None
    row_dtype: RowDtype = "fp32"


class ModelConfig(Record):
    """One model, ready to be opened.

    Attributes:
        name: the model's name.
        version: 0 where the model has no version folder.
        graph_file: the layer graph (for v3.0 the inference JSON itself).
        dense_file: the dense ``.model`` file, or the ``.onnx`` file of a network of its own.
        onnx_file: the ``.model`` file's network as ONNX, when it lies beside; None otherwise.
        tables: one record per table, in graph order.
        key_type: ``"I64"`` or ``"I32"`` (uint32 keys).
        max_batchsize: most samples one request may bring.
        dense_dim: F.
        label_dim: L.
        gpu_cache: its embedding caches, where there is a GPU.
        gpu_network: its dense network, where there is a GPU.
    """

    name: str
    version: int = 0
    graph_file: Path
    dense_file: Path
    onnx_file: Path | None = None
    tables: tuple[TableConfig, ...]
    key_type: KeyType
    max_batchsize: int
    dense_dim: int
    label_dim: int
    gpu_cache: GpuCacheConfig = GpuCacheConfig()
    gpu_network: GpuNetworkConfig = GpuNetworkConfig()

    def full_name(self, table: TableConfig) -> str:
        """The name under which stores and counters know ``table``: ``"<model>.<table>"``, as in HPS, of any version."""
        return f"{self.name}.{table.name}"


class RedisTlsConfig(Record):
    """How connections to Redis are encrypted.

    Attributes:
        ca_certificate: authorities a server's certificate must come from, a file or a folder; None: the system's.
        client_certificate: what the client shows a server that asks; None: nothing.
        client_key: the private key of it; None: it is in the same file.
        server_name: the name that is asked for and that the server's certificate must be for; empty: any.
    """

    ca_certificate: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    server_name: str = ""


class RedisOverflow(Record):
    """What a Redis tier does with more rows than it is to have.

    Attributes:
        margin_rows: most rows of a partition.
        policy: which rows go: any, those that were used least, those that were written longest ago.
        target_ratio: share of ``margin_rows`` that an overflow leaves.
        refreshes: with ``"oldest"``, a row that is read counts as written.
    """

    margin_rows: int
    policy: Literal["random", "least_used", "oldest"] = "random"
    target_ratio: float = 0.8
    refreshes: bool = True


class RedisConfig(Record):
    """A Redis server or cluster that holds embedding tables.

    Attributes:
        addresses: ``(host, port)`` of nodes that are asked which nodes there are, in this order.
        user_name: ``"default"``, or a user of Redis 6's access control lists.
        password: empty where the user needs none.
        num_partitions: Redis hashes that share the rows of one table; must not change once a table is written.
        num_node_connections: most connections to one node.
        max_batch_size: most keys of one round of commands.
        connect_timeout_ms: most time one connection may take, TLS and authentication included.
        timeout_ms: most time one round of commands may take, connecting and retrying included.
        tls: None: not encrypted.
        overflow: None: every row stays.
        row_dtype: the form in which the rows of every table are kept, which is the tables' own; None: float32.
        layout: ``"hps"``: hashes, as HPS has them; ``"strings"``: each row under a key of its own.
    """

    addresses: tuple[tuple[str, int], ...] = (("127.0.0.1", 7000),)
    user_name: str = "default"
    password: SecretStr = SecretStr("")
    num_partitions: int = 16
    num_node_connections: int = 5
    max_batch_size: int = 65536
    connect_timeout_ms: int = 500
    timeout_ms: int = 2000
    tls: RedisTlsConfig | None = None
    overflow: RedisOverflow | None = None
    row_dtype: RowDtype | None = None
    layout: Literal["hps", "strings"] = "hps"


class SharedMemoryConfig(Record):
    """RAM that the processes of a machine share.

    Attributes:
        name: processes with the same name share; a folder of /dev/shm.
        size_bytes: most memory of all tables together.
        auto_remove: the last process to leave removes the tables.
    """

    name: str = "hctr_mp_hash_map_database"
    size_bytes: int = 16 << 30
    auto_remove: bool = True


class VolatileDbConfig(Record):
    """A faster tier.

    Attributes:
        type: ``"hash_map"`` (RAM), ``"multi_process_hash_map"`` (RAM that processes share), ``"snapshot"``,
            ``"redis_cluster"`` or ``"disabled"``.
        capacity_rows: most rows in RAM over all tables; None means as many as the models need.
        capacity_bytes: most bytes in RAM over all tables, instead of ``capacity_rows``.
        capacity_rows_per_table: most rows in RAM of each table, by its full name, instead of one budget for all; a
            table that is not named gets all of its rows.
        capacity_rows_of_each_table: most rows in RAM of every table, instead of one budget for all.
        overflow_policy: which rows leave a table that its bound keeps small, when new keys come; None: none do.
        overflow_resolution_target: the part of its bound that an overflow leaves in a table.
        initial_cache_rate: the part of each table's rows that is loaded into RAM at first.
        hot_keys: a folder that says, by table, which rows are loaded into RAM first; None: the first of the file.
        row_dtype: the form in which RAM keeps rows; see ``TableConfig``.
        row_dtype_per_table: another form for some tables, by their full names.
        lookup_threads: most threads at one big lookup in RAM or a snapshot; for the whole process
            (``kernels.host.set_lookup_threads``). None leaves the number as it is.
        path: the folder in which snapshots are made; None where every table's file must be one.
        overlay_capacity_rows: most rows of each table that can be changed over its snapshot; None: a sixteenth of them.
        warm_up: snapshots that fit into half of the available memory are read into it beside the first lookups.
        shared_memory: where the type is ``"multi_process_hash_map"``; None otherwise.
        redis: where the type is ``"redis_cluster"``; None otherwise.
        cache_missed_embeddings: rows that the durable tier held are copied into this one.
        initialize_after_startup: the models' files are loaded into it; else RAM starts empty, and Redis keeps what it
            has.
    """

    type: Literal["disabled", "hash_map", "multi_process_hash_map", "redis_cluster", "snapshot"] = "hash_map"
    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    capacity_rows_per_table: dict[str, int] | None = None
    capacity_rows_of_each_table: int | None = None
    overflow_policy: OverflowPolicy | None = None
    overflow_resolution_target: float = 0.8
    initial_cache_rate: float = 1.0
    hot_keys: Path | None = None
    row_dtype: RowDtype = "fp32"
    row_dtype_per_table: dict[str, RowDtype] | None = None
    lookup_threads: int | None = None
    path: Path | None = None
    overlay_capacity_rows: int | None = None
    warm_up: bool = True
    shared_memory: SharedMemoryConfig | None = None
    redis: RedisConfig | None = None
    cache_missed_embeddings: bool = False
    initialize_after_startup: bool = True


class PersistentDbConfig(Record):
    """The durable tier.

    Attributes:
        type: ``"rocks_db"`` or ``"disabled"``.
        path: the database's folder; None only where disabled.
        read_only: open beside another process; the tables must already be there.
        catch_up_interval_ms: with ``read_only``: see the other process's writes as often as this; None: never.
        num_threads: background threads of the database.
        max_batch_size: most keys one database call carries; above ``MOST_ROCKSDB_BATCH_ROWS`` it counts as that.
        timeout_ms: most time a lookup waits for it; None: as long as it takes.
        initialize_after_startup: the models' files are loaded into it; else it must have the tables.
        row_dtype: the form in which the rows of every table are kept, which is the tables' own; None: float32.
        warm_up: have the system read the files ahead when they are opened or loaded.
    """

    type: Literal["disabled", "rocks_db"] = "disabled"
    path: Path | None = None
    read_only: bool = False
    catch_up_interval_ms: int | None = None
    num_threads: int = 16
    max_batch_size: int = 65536
    timeout_ms: int | None = None
    initialize_after_startup: bool = True
    row_dtype: RowDtype | None = None
    warm_up: bool = True


class ParameterServerConfig(Record):
    """A whole ps.json.

    Attributes:
        models: the models it lists; empty where a model repository's folders say which models there are.
        volatile_tiers: the faster tiers, in the order in which they are asked; none where ``volatile_db`` is disabled.
        persistent_db: the durable tier.
        key_type: ``supportlonglong``: ``"I64"`` or ``"I32"`` for all models.
        source: the file it was read from, for messages.
        idle_lines: what an operator is told of keys that have no effect.
    """

    models: tuple[ModelConfig, ...]
    volatile_tiers: tuple[VolatileDbConfig, ...]
    persistent_db: PersistentDbConfig
    key_type: KeyType
    source: str
    idle_lines: tuple[str, ...] = ()

    @property
    def volatile_db(self) -> VolatileDbConfig:
        """The fastest tier; of the type ``"disabled"`` where there is none before ``persistent_db``."""
        return self.volatile_tiers[0] if self.volatile_tiers else VolatileDbConfig(type="disabled")
