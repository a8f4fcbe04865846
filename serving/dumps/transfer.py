"""Write all rows of a table into a file, and load a file's rows into the tiers that outlive the process."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving.config import (
    ModelConfig,
    ParameterServerConfig,
    PersistentDbConfig,
    TableConfig,
    read_repository,
)
from serving.dumps.formats import Dump, check_target, open_dump, write_dump
from serving.errors import ConfigError, ModelFileError, StoreError, StoreInUseError, did_you_mean
from serving.model.sparse_rows import fault_of_values
from serving.parameter_server import ParameterServer
from serving.parameter_server.loading import has_rows, with_kept_tables
from serving.parameter_server.opening import open_stores, tier_settings
from serving.parameter_server.table_files import CountedRows, Progress, table_source, table_spec
from serving.parameter_server.truth import LOAD_BATCH_ROWS
from serving.storage import SharedMemoryStore
from serving.storage.marker import Marker
from serving.storage.rocksdb.table import RocksDbTable
from serving.storage.row_codec import rounded
from serving.storage.store import Batches, LastingStore, LastingTable, Store, StoreTable, TableSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _HeldRows:
    """All rows of a table in its tier. With ``in_key_order`` they are sorted by the raw bytes of their keys."""

    spec: TableSpec
    rows_hint: int
    batches: Batches
    in_key_order: bool = False


def dump_table(
    source: str | Path | ParameterServerConfig | ParameterServer,
    table: str,
    file: str | Path,
    progress: Progress | None = None,
) -> int:
    """Write all rows of a table into a file, in batches of bounded memory.

    The rows come from the slowest tier, RocksDB or Redis, which has all rows. Other processes may have RocksDB open. If
    RAM or a snapshot is the only tier, the rows come from the model's file and are rounded as RAM would hold them. Rows
    that other processes write during the dump may be missing from the file.

    Args:
        source: a ``ps.json``, a repository, its configuration, or a running parameter server.
        table: the table's name, ``<model>.<table>``; of a repository's model the newest version that is served.
        file: the file to write: HPS's format for ``.bin``, RocksDB's for ``.sst``, else a folder with ``key`` and
            ``emb_vector``. An existing file is replaced when every row is on the disk, and unchanged after an error.
        progress: see ``Progress``.

    Returns:
        Rows written.

    Raises:
        ConfigError: the configuration cannot be accepted, or has no such table.
        OutputError: the file cannot be written, or would replace something that is not a dump.
        StoreError: the tier does not answer, is damaged, or does not hold the table.
        ModelFileError: RAM or a snapshot is the only tier, and the model's file is missing or damaged.
        MissingExtraError: a package is needed that is not installed.
    """
    file = Path(file)
    check_target(file)
    with _held_rows(source, table) as stored:
        counted = CountedRows(f"{table} to {file.name}", stored.rows_hint, progress)
        write_dump(file, stored.spec, counted(stored.batches), stored.in_key_order)
    return counted.done


def load_table(
    target: str | Path | ParameterServerConfig | ParameterServer,
    table: str,
    file: str | Path,
    replace: bool = False,
    progress: Progress | None = None,
) -> int:
    """Load the rows of a file into every tier that outlives the process: Redis and RocksDB.

    The whole file is read and checked before a row changes. Rows are inserted batch by batch, and each batch goes into
    all tiers. A load that was stopped has inserted some of the rows, and you can repeat it. With ``replace`` each tier
    changes at once. A model that was never loaded into a tier is loaded first. The rows stay until the model's own
    files change. Running processes do not see the rows in their RAM.

    Args:
        target: a ``ps.json``, a repository, its configuration, or a running parameter server. No other process may
            have the RocksDB of a configuration open for writing. A running server gets the rows in all of its tiers,
            RAM too.
        table: the table's name, ``<model>.<table>``; of a repository's model the newest version that is served.
        file: a dump by ``dump_table`` or HPS, which ends in ``.bin`` or ``.sst``, or a table of another system in any
            form that ``hotrow import --table`` takes.
        replace: remove all other rows of the table.
        progress: see ``Progress``.

    Returns:
        Rows of the file.

    Raises:
        ConfigError: the configuration cannot be accepted, has no such table, or no tier that outlives the process.
        ModelFileError: the file is missing or damaged, does not fit the table, or has a value that is NaN or infinite.
            No row has changed.
        StoreError: a tier does not answer or does not take the rows, or a value does not fit the table's row type.
        MissingExtraError: a package is needed that is not installed.
        ValueError: ``replace`` is set and ``target`` is a running server, whose lookups would miss rows.
    """
    file = Path(file)
    if isinstance(target, ParameterServer):
        if replace:
            raise ValueError("a table of a running parameter server cannot be replaced, only changed")
        return _load_live(target, table, file, progress)
    config = _configuration(target)
    model, table_config = _table_of(config.models, table, config.source)
    spec = table_spec(model, table_config)
    with open_dump(file, spec, table_config.name) as dump:
        rows = _check_rows(file, spec, dump, progress)
        with ExitStack() as opened:
            try:
                stores = [opened.enter_context(closing(store)) for store in open_stores(config)]
            except StoreInUseError as err:
                reason = f"{err.reason}, and start it again after the load"
                raise StoreInUseError(err.store, err.table, reason) from err
            shared = [store for store in stores if isinstance(store, SharedMemoryStore)]
            durable = [store for store in stores if isinstance(store, LastingStore) and store not in shared]
            if not durable:
                reason = "no tier outlives the process, as Redis and RocksDB do: the loaded rows would be lost"
                raise ConfigError(config.source, "", reason)
            for memory in shared:
                memory.erase(spec.name)  # left by a killed process
            model = _with_kept_tables(durable[-1], model, config)
            spec = table_spec(model, table_config)
            if replace:
                # Later starts see the digest of the model's files and keep these rows.
                marker = Marker(table_source(model, table_config).digest, rows, changed=True, current_caches=())
                for stored in reversed([store.table(spec) for store in durable]):  # the source of truth first
                    counted = CountedRows(f"{file.name} to {stored.store.name}", dump.rows, progress)
                    stored.load(counted(dump.batches(LOAD_BATCH_ROWS)), marker, keep=False)
                identities = tuple(store.identity for store in durable[:-1])
                durable[-1].table(spec).write_flags(current_caches=identities)
                return rows
            said, names = tier_settings(config), {store.name for store in durable}
            settings = {name: table_config for name, table_config in said.items() if name in names}
            with ParameterServer(durable, settings=settings) as server:
                server.load_model(model.model_copy(update={"tables": (table_config,)}))
                _insert(server, spec.name, file, dump, progress)
    return rows


def _load_live(server: ParameterServer, table: str, file: Path, progress: Progress | None) -> int:
    model, table_config = _table_of(server.models(), table, "the parameter server")
    spec = table_spec(model, table_config)
    with open_dump(file, spec, table_config.name) as dump:
        rows = _check_rows(file, spec, dump, progress)
        _insert(server, spec.name, file, dump, progress)
    return rows


def _check_rows(file: Path, spec: TableSpec, dump: Dump, progress: Progress | None) -> int:
    """Read and check every row before a row changes, and return the number of rows."""
    counted = CountedRows(f"checking {file.name}", dump.rows, progress)
    for keys, rows in counted(dump.batches(LOAD_BATCH_ROWS)):
        if fault := fault_of_values(keys, rows):
            raise ModelFileError(file, fault)
        rounded(str(file), spec.name, spec.row_dtype, keys, rows)
    return counted.done


def _insert(server: ParameterServer, table: str, file: Path, dump: Dump, progress: Progress | None) -> None:
    counted = CountedRows(f"{file.name} to {table}", dump.rows, progress)
    for keys, rows in counted(dump.batches(LOAD_BATCH_ROWS)):
        server.insert(table, keys, rows)


def _configuration(ps: str | Path | ParameterServerConfig) -> ParameterServerConfig:
    return ps if isinstance(ps, ParameterServerConfig) else read_repository(ps)


def _table_of(models: Sequence[ModelConfig], table: str, source: str) -> tuple[ModelConfig, TableConfig]:
    tables = [(model, table_config) for model in models for table_config in model.tables]
    named = {name: (model.of_tables, of_model) for model, of_model in tables for name in _names_of(model, of_model)}
    if table not in named:
        known = ", ".join(sorted({repr(model.hps_name(table_config)) for model, table_config in tables})) or "none"
        raise ConfigError(source, "", f"no table {table[:128]!r}; the tables are {known}{did_you_mean(table, named)}")
    return named[table]


def _names_of(model: ModelConfig, table: TableConfig) -> Sequence[str]:
    """The names by which an operator may ask for a table, the most exact last."""
    return model.hps_name(table), f"{model.name}@{model.version}.{table.name}", model.full_name(table)


def _with_kept_tables(truth: Store, model: ModelConfig, config: ParameterServerConfig) -> ModelConfig:
    """Name the model's tables as a server with this configuration does."""
    return with_kept_tables(truth, model, is_filled=tier_settings(config)[truth.name].fills_at_start)


@contextmanager
def _held_rows(source: str | Path | ParameterServerConfig | ParameterServer, table: str) -> Iterator[_HeldRows]:
    if isinstance(source, ParameterServer):
        spec = table_spec(*_table_of(source.models(), table, "the parameter server"))
        yield _rows_in(source.stores[-1].table(spec))
        return
    config = _configuration(source)
    model, table_config = _table_of(config.models, table, config.source)
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(store)) for store in open_stores(_slowest_tier(config))]
        store = stores[-1]
        spec = table_spec(_with_kept_tables(store, model, config), table_config)
        # Shared memory goes with its last process.
        is_gone = isinstance(store, SharedMemoryStore) and store.table(spec).marker() is None
        if isinstance(store, LastingStore) and not is_gone:
            stored = store.table(spec)
            stored.open(0)
            yield _rows_in(stored)
        else:
            rows = table_source(model, table_config).model
            yield _HeldRows(spec, rows.rows, _as_held(store.name, spec, rows.batches(LOAD_BATCH_ROWS)))


def _slowest_tier(config: ParameterServerConfig) -> ParameterServerConfig:
    """Return the configuration with only its slowest tier, opened read-only."""
    persistent = config.persistent_db
    if persistent.type == "disabled":
        return config.model_copy(update={"volatile_tiers": config.volatile_tiers[-1:]})
    only_read: PersistentDbConfig = persistent.model_copy(
        update={"read_only": True, "catch_up_interval_ms": None, "warm_up": False}
    )
    return config.model_copy(update={"volatile_tiers": (), "persistent_db": only_read})


def _rows_in(stored: StoreTable) -> _HeldRows:
    if isinstance(stored, LastingTable) and stored.marker() is None:
        name, table = stored.store.name, stored.spec.name
        if not has_rows(stored):
            raise StoreError(name, table, "no such table: no model with this table was loaded into this tier")
        logger.warning("%s: table %s has no marker: HPS filled it, or a load did not end", name, table)
    batches = stored.items(LOAD_BATCH_ROWS)
    if isinstance(stored, RocksDbTable):
        return _HeldRows(stored.spec, stored.estimated_rows, batches, in_key_order=True)
    return _HeldRows(stored.spec, stored.count(), batches)


def _as_held(store: str, spec: TableSpec, batches: Batches) -> Batches:
    for keys, rows in batches:
        yield keys, rounded(store, spec.name, spec.row_dtype, keys, rows)
