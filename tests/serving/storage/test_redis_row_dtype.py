"""Redis tables of narrow rows: their bytes, their markers, and what is refused."""

import struct

import numpy as np
import pytest

from kernels.host import encode_rows, round_rows
from serving.config import RedisConfig, RedisOverflow
from serving.errors import StoreError
from serving.storage import Marker, RedisStore, TableSpec
from serving.storage.redis.rows import Partitions
from tests.serving.small_server import DurableDictStore, model_of, rows_of, serve, write_model
from tests.serving.storage.redis_stores import OPENED, open_store

NARROW = ("fp16", "bf16", "int8", "uint8")
KEYS = np.arange(500)
ROWS = np.random.default_rng(0).normal(size=(500, 6)).astype(np.float32)


def spec(row_dtype):
    return TableSpec("model.table", 6, row_dtype=row_dtype)


def rounded(row_dtype, rows=ROWS):
    out = np.empty_like(rows)
    round_rows(rows, row_dtype, out)
    return out


def fetched(store, keys=KEYS):
    out = np.full((keys.size, 6), np.nan, dtype=np.float32)
    return out, store.tables["model.table"].fetch(keys, out)


def load(store, row_dtype, count=KEYS.size):
    store.table(spec(row_dtype)).load(iter([(KEYS[:count], ROWS[:count])]), Marker("digest"), keep=False)


@pytest.mark.parametrize("row_dtype", NARROW)
def test_rows_come_back_as_the_form_rounds_them(redis_server, client, row_dtype):
    store = open_store(redis_server, row_dtype=row_dtype)
    load(store, row_dtype, 400)
    store.tables["model.table"].insert(KEYS[400:], ROWS[400:])

    rows, found = fetched(store)
    assert store.keeps_row_dtype
    assert found.all()
    assert (rows == rounded(row_dtype)).all()
    rows, found = fetched(store, np.array([3, 10**6, 4]))
    assert found.tolist() == [True, False, True]
    assert (rows == [rounded(row_dtype)[3], np.zeros(6), rounded(row_dtype)[4]]).all()
    for keys, some in store.tables["model.table"].items(100):
        assert (some == rounded(row_dtype)[keys]).all()
    values = [client.hget(partition.values, struct.pack("<q", 7)) for partition in Partitions("model.table", 16)]
    assert [value for value in values if value] == [encode_rows(ROWS, row_dtype)[7].tobytes()]


def test_without_a_form_of_its_own_redis_keeps_float32(redis_server):
    store = open_store(redis_server)
    load(store, "int8")

    assert not store.keeps_row_dtype
    assert (fetched(store)[0] == ROWS).all()


@pytest.mark.parametrize("changed", [False, True])
def test_the_marker_says_in_which_form_rows_are_kept(redis_server, changed):
    store = open_store(redis_server, row_dtype="int8")
    load(store, "int8")
    if changed:
        store.tables["model.table"].write_flags(changed=True)

    for reader in (None, "int8", "fp16"):
        marker = open_store(redis_server, row_dtype=reader).table(spec(reader or "fp32")).marker()
        assert marker == Marker("digest", 500, "int8", changed)


@pytest.mark.parametrize("alone", [True, False])
def test_a_model_that_is_loaded_in_another_form_replaces_the_rows(redis_server, tmp_path, alone):
    config = write_model(tmp_path)
    narrow = model_of(tmp_path, row_dtype="bf16")

    def serving(model, **options):
        tiers = [open_store(redis_server, **options)] + ([] if alone else [DurableDictStore()])
        return serve(model, *tiers)

    with serving(config) as server:
        before = rows_of(server)
    with serving(narrow, row_dtype="bf16") as server:
        assert server.stores[0].tables["m.t"].is_whole
        rows = rows_of(server)
        assert rows.keys() == before.keys()
        expected = rounded("bf16", np.array(list(before.values()), dtype=np.float32))
        assert np.array(list(rows.values()), dtype=np.float32).tobytes() == expected.tobytes()
        assert server.counters()["m.t"].tiers[0].hits == len(rows)
        assert server.stores[0].tables["m.t"].marker().row_dtype == "bf16"


def test_values_of_another_form_are_refused_by_their_length(redis_server):
    writer = open_store(redis_server)
    load(writer, "fp32")

    with pytest.raises(StoreError, match=r"the value of key \d+ has 24 bytes, 6 floats as fp16 are 12"):
        open_store(redis_server, row_dtype="fp16").table(spec("fp16")).open(0)


def test_a_table_of_another_form_than_the_stores_is_refused(redis_server):
    with pytest.raises(StoreError, match="a table of fp16 rows in a store that keeps int8"):
        open_store(redis_server, row_dtype="int8").table(spec("fp16")).open(0)


def test_a_value_that_the_form_cannot_hold_is_refused_by_its_key(redis_server):
    store = open_store(redis_server, row_dtype="fp16")
    store.table(spec("fp16")).open(0)
    rows = ROWS.copy()
    rows[17, 2] = 1e30

    with pytest.raises(StoreError, match="17"):
        store.tables["model.table"].insert(KEYS, rows)

    assert store.tables["model.table"].count() == 0


def test_narrow_rows_overflow_like_others(redis_server):
    overflow = RedisOverflow(margin_rows=10, policy="least_used")
    config = RedisConfig(addresses=(redis_server.address,), row_dtype="int8", overflow=overflow)
    store = RedisStore(config)
    OPENED.append(store)
    store.table(spec("int8")).open(0)

    store.tables["model.table"].insert(KEYS, ROWS)

    rows, found = fetched(store)
    assert 0 < found.sum() <= 160
    assert (rows[found] == rounded("int8")[found]).all()
