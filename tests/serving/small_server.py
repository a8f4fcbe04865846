"""A model of one table of twelve rows, stores to serve it from, and one that can be out of order."""

from collections import Counter
from dataclasses import replace

import numpy as np

from serving.config import ModelConfig, TableConfig
from serving.errors import StoreUnreachableError
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.storage.store import Store

KEYS = list(range(1, 13))
UNKNOWN = [777, -5]
# Rows whose float32 sums depend on the order of addition, and zeros of both signs.
ROWS = np.array([[1e8, 1.0, -0.0], [-1e8, 1e-8, -0.0], [0.1, 3e7, 0.0], [1e-40, -1.0, -0.0]] * 3, dtype=np.float32)
ROWS *= np.arange(1, 13, dtype=np.float32)[:, None]
NEW = np.array([[7.0, 8.0, 9.0]], dtype=np.float32)  # a row that no key has


class DictStore(Store):
    """A store that is a dict, does not pool, and can be out of order."""

    name = ""
    keeps_row_dtype = False

    def __init__(self, name="dict"):
        self.name, self.rows, self.is_down, self.calls = name, {}, False, Counter()

    def open_table(self, spec, capacity_rows):
        self.rows.setdefault(spec.name, {})

    def capacity_rows(self, table):
        return None if table in self.rows else 0

    def count(self, table):
        return len(self.rows.get(table, {}))

    def fetch(self, table, keys, out):
        self.calls["fetch"] += 1
        if self.is_down:
            raise StoreUnreachableError(self.name, table, "no answer")
        held = dict(self.rows.get(table, {}))  # another thread may insert
        out[...] = 0.0
        for place, key in enumerate(keys.tolist()):
            if key in held:
                out[place] = held[key]
        return np.array([key in held for key in keys.tolist()], dtype=bool)

    def insert(self, table, keys, rows):
        self.calls["insert"] += 1
        self.rows[table] |= dict(zip(keys.tolist(), rows.copy(), strict=True))

    def evict(self, table, keys):
        for key in keys.tolist():
            self.rows[table].pop(key, None)

    def drop_table(self, table):
        self.rows.pop(table, None)

    def items(self, table, batch_rows=65536):
        for key, row in list(self.rows.get(table, {}).items()):  # as they are when the walk begins
            yield np.array([key]), row[None]

    def close(self):
        self.calls["close"] += 1


class DurableDictStore(DictStore):
    """The same, with markers, as a store on a disk has them."""

    outlives_process = True

    def __init__(self, name="durable"):
        super().__init__(name)
        self.markers = {}

    def marker(self, table):
        return self.markers.get(table)

    def load(self, spec, batches, marker, *, keep):
        held = self.rows.get(spec.name, {}) if keep else {}
        self.rows[spec.name] = dict(held)
        for keys, rows in batches:
            self.insert(spec.name, keys, rows)
        changed = marker.changed or bool(held)
        self.markers[spec.name] = replace(marker, rows=len(self.rows[spec.name]), changed=changed)

    def write_flags(self, table, *, changed=None, current_caches=None):
        if table in self.markers:
            flags = {"changed": changed, "current_caches": current_caches}
            given = {name: value for name, value in flags.items() if value is not None}
            self.markers[table] = replace(self.markers[table], **given)


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
    store.evict("m.t", np.array([key for key in KEYS if key not in keys], dtype=np.int64))


def rows_of(server, keys=(*KEYS, *UNKNOWN)):
    """What a parameter server, or a store, answers: {key: row}."""
    keys = np.array(keys, dtype=np.int64)
    if hasattr(server, "lookup"):
        rows, found = server.lookup("m.t", keys)
    else:
        rows = np.empty((keys.size, 3), dtype=np.float32)
        found = server.fetch("m.t", keys, rows)
    return {key: row for key, row, is_found in zip(keys.tolist(), rows.tolist(), found, strict=True) if is_found}


def errors_of(server, table="m.t"):
    """The calls that each tier did not answer, without tiers that answered all."""
    return {one.tier: one.errors for one in server.counters()[table].tiers if one.errors}


def held_by(store):
    """What ``store`` holds of the table: {key: row}."""
    return {
        key: row.tolist() for keys, rows in store.items("m.t") for key, row in zip(keys.tolist(), rows, strict=True)
    }
