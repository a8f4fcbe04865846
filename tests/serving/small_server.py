"""A model of one table of twelve rows, stores to serve it from, and one that can be out of order."""

from collections import Counter
from dataclasses import replace

import numpy as np

from serving.config import ModelConfig, TableConfig
from serving.errors import StoreError, StoreUnreachableError
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.storage import RocksDbStore
from serving.storage.memory import MemoryStore, MemoryTable
from serving.storage.rocksdb.table import RocksDbTable
from serving.storage.store import LastingStore, LastingTable, Store, StoreTable

KEYS = list(range(1, 13))
UNKNOWN = [777, -5]
# Rows whose float32 sums depend on the order of addition, and zeros of both signs.
ROWS = np.array([[1e8, 1.0, -0.0], [-1e8, 1e-8, -0.0], [0.1, 3e7, 0.0], [1e-40, -1.0, -0.0]] * 3, dtype=np.float32)
ROWS *= np.arange(1, 13, dtype=np.float32)[:, None]
NEW = np.array([[7.0, 8.0, 9.0]], dtype=np.float32)  # a row that no key has


class DictTable(StoreTable):
    """A table whose calls are methods of its store, which tests override."""

    capacity_rows = None

    def open(self, rows):
        self.store.rows.setdefault(self.spec.name, {})
        self.store.add(self)

    def count(self):
        return len(self.store.rows[self.spec.name])

    def fetch(self, keys, out):
        return self.store.fetch(self.spec.name, keys, out)

    def insert(self, keys, rows):
        self.store.insert(self.spec.name, keys, rows)

    def insert_absent(self, keys, rows):
        return self.store.insert_absent(self.spec.name, keys, rows)

    def evict(self, keys):
        self.store.evict(self.spec.name, keys)

    def items(self, batch_rows=65536):
        return self.store.items(self.spec.name, batch_rows)

    def close(self):
        self.store.remove(self)
        if not isinstance(self.store, LastingStore):
            self.store.rows.pop(self.spec.name, None)


class DictStore(Store):
    """A store that is a dict, does not pool, and can be out of order."""

    name = ""

    def __init__(self, name="dict"):
        super().__init__()
        self.name, self.rows, self.is_down, self.calls = name, {}, False, Counter()

    def _new_table(self, spec):
        return DictTable(self, spec)

    def fetch(self, table, keys, out):
        self.calls["fetch"] += 1
        if self.is_down:
            raise StoreUnreachableError(self.name, table, "no answer")
        rows = dict(self.rows.get(table, {}))  # another thread may insert
        out[...] = 0.0
        for place, key in enumerate(keys.tolist()):
            if key in rows:
                out[place] = rows[key]
        return np.array([key in rows for key in keys.tolist()], dtype=bool)

    def insert(self, table, keys, rows):
        self.calls["insert"] += 1
        self.rows[table] |= dict(zip(keys.tolist(), rows.copy(), strict=True))

    def insert_absent(self, table, keys, rows):
        return StoreTable.insert_absent(self.tables[table], keys, rows)

    def evict(self, table, keys):
        for key in keys.tolist():
            self.rows[table].pop(key, None)

    def erase(self, table):
        self.rows.pop(table, None)

    def items(self, table, batch_rows=65536):
        for key, row in list(self.rows.get(table, {}).items()):  # as they are when the walk begins
            yield np.array([key]), row[None]

    def close(self):
        self.calls["close"] += 1


class DurableDictTable(DictTable, LastingTable):
    """The same, with a marker."""

    @property
    def is_whole(self):
        return self.store.is_whole

    def marker(self):
        return self.store.marker(self.spec.name)

    def load(self, batches, marker, *, keep):
        self.store.load(self.spec, batches, marker, keep=keep)
        self.open(0)

    def write_flags(self, *, changed=None, current_caches=None):
        self.store.write_flags(self.spec.name, changed=changed, current_caches=current_caches)


class DurableDictStore(DictStore, LastingStore):
    """The same, with markers, as a store on a disk has them."""

    def __init__(self, name="durable"):
        super().__init__(name)
        self.markers, self.is_whole = {}, True

    def _new_table(self, spec):
        return DurableDictTable(self, spec)

    def kept_tables(self):
        return list(self.rows)

    def marker(self, table):
        return self.markers.get(table)

    def load(self, spec, batches, marker, *, keep):
        kept = self.rows.get(spec.name, {}) if keep else {}
        self.rows[spec.name] = dict(kept)
        for keys, rows in batches:
            self.insert(spec.name, keys, rows)
        changed = marker.changed or bool(kept)
        self.markers[spec.name] = replace(marker, rows=len(self.rows[spec.name]), changed=changed)

    def write_flags(self, table, *, changed=None, current_caches=None):
        if table in self.markers:
            flags = {"changed": changed, "current_caches": current_caches}
            given = {name: value for name, value in flags.items() if value is not None}
            self.markers[table] = replace(self.markers[table], **given)


HOOKS = ("open", "fetch", "fetch_pooled", "insert", "insert_absent", "evict", "items", "load", "write_flags", "close")


def hooked(store_class, table_class):
    """A class of stores whose tables' calls are methods of the store, with the table first, which tests override."""
    names = [name for name in HOOKS if hasattr(table_class, name)]

    def by_store(name):
        return lambda self, *args, **named: getattr(self.store, f"on_{name}")(self, *args, **named)

    def by_table(name):
        return lambda self, table, *args, **named: getattr(table_class, name)(table, *args, **named)

    table = type("HookedTable", (table_class,), {name: by_store(name) for name in names})
    hooks = {f"on_{name}": by_table(name) for name in names}
    return type("HookedStore", (store_class,), {"_new_table": lambda self, spec: table(self, spec), **hooks})


HookedMemory = hooked(MemoryStore, MemoryTable)
HookedRocksDb = hooked(RocksDbStore, RocksDbTable)


class RefusingMemory(HookedMemory):
    """RAM that can be told to take no changes."""

    refuses = False

    def on_insert(self, table, keys, rows):
        if self.refuses:
            raise StoreError(self.name, table.spec.name, "takes nothing")
        super().on_insert(table, keys, rows)


def write_model(folder, rows=ROWS):
    """One model of one table, "m.t", with the KEYS above and ``rows``."""
    write_sparse_directory(folder / "t", np.array(KEYS), rows)
    return model_of(folder)


def model_of(folder, default_value=0.0, version=0, row_dtype="fp32"):
    table = TableConfig(
        name="t",
        dim=3,
        slots=1,
        combiner="sum",
        default_value=default_value,
        file=folder / "t",
        row_dtype=row_dtype,
    )
    return ModelConfig(
        name="m",
        version=version,
        graph_file=folder / "graph.json",
        dense_file=folder / "dense.model",
        tables=(table,),
        key_type="I64",
        max_batchsize=64,
        dense_dim=0,
        label_dim=1,
    )


def serve(config, *stores, **options):
    server = ParameterServer(stores, **options)
    server.load_model(config)
    return server


def keep(store, keys):
    """Take from ``store`` all but ``keys``."""
    store.tables["m.t"].evict(np.array([key for key in KEYS if key not in keys], dtype=np.int64))


def rows_of(server, keys=(*KEYS, *UNKNOWN)):
    """What a parameter server, or a store, answers: {key: row}."""
    keys = np.array(keys, dtype=np.int64)
    if hasattr(server, "lookup"):
        rows, found = server.lookup("m.t", keys)
    else:
        rows = np.empty((keys.size, 3), dtype=np.float32)
        found = server.tables["m.t"].fetch(keys, rows)
    return {key: row for key, row, is_found in zip(keys.tolist(), rows.tolist(), found, strict=True) if is_found}


def errors_of(server, table="m.t"):
    """The calls that each tier did not answer, without tiers that answered all."""
    return {tier.tier: tier.errors for tier in server.counters()[table].tiers if tier.errors}


def held_by(store):
    """What ``store`` holds of the table: {key: row}."""
    return {
        key: row.tolist()
        for keys, rows in store.tables["m.t"].items()
        for key, row in zip(keys.tolist(), rows, strict=True)
    }
