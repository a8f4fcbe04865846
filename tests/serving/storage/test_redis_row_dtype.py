"""Redis tables of narrow rows: their bytes, their records, and what is refused."""

import struct

import numpy as np
import pytest

from kernels.host import encode_rows, round_rows
from serving.config import RedisConfig, RedisOverflow
from serving.errors import StoreError
from serving.storage import RedisStore, TableSpec
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
    return out, store.fetch("model.table", keys, out)


@pytest.mark.parametrize("layout", ["hps", "strings"])
@pytest.mark.parametrize("row_dtype", NARROW)
def test_rows_come_back_as_the_form_rounds_them(redis_server, client, row_dtype, layout):
    store = open_store(redis_server, row_dtype=row_dtype, layout=layout)
    store.bulk_load(spec(row_dtype), iter([(KEYS[:400], ROWS[:400])]), "digest")
    store.insert("model.table", KEYS[400:], ROWS[400:])

    rows, found = fetched(store)
    assert store.keeps_row_dtype
    assert found.all()
    assert (rows == rounded(row_dtype)).all()
    rows, found = fetched(store, np.array([3, 10**6, 4]))
    assert found.tolist() == [True, False, True]
    assert (rows == [rounded(row_dtype)[3], np.zeros(6), rounded(row_dtype)[4]]).all()
    for keys, some in store.items("model.table", 100):
        assert (some == rounded(row_dtype)[keys]).all()
    if layout == "strings":
        assert client.get(b"hps_et.model.table:" + struct.pack("<q", 7)) == encode_rows(ROWS, row_dtype)[7].tobytes()


def test_without_a_form_of_its_own_redis_keeps_float32(redis_server):
    store = open_store(redis_server)
    store.bulk_load(spec("int8"), iter([(KEYS, ROWS)]), "digest")

    assert not store.keeps_row_dtype
    assert (fetched(store)[0] == ROWS).all()


@pytest.mark.parametrize("layout", ["hps", "strings"])
@pytest.mark.parametrize("changed", [False, True])
def test_rows_of_another_form_count_as_not_loaded(redis_server, layout, changed):
    store = open_store(redis_server, row_dtype="int8", layout=layout)
    store.bulk_load(spec("int8"), iter([(KEYS, ROWS)]), "digest")
    if changed:
        store.mark_changed("model.table")

    assert store.loaded_from("model.table") == ("digest+changed" if changed else "digest")
    for other in (None, "fp16", "uint8"):
        assert open_store(redis_server, row_dtype=other, layout=layout).loaded_from("model.table") is None


def test_values_of_another_form_are_refused_by_their_length(redis_server):
    writer = open_store(redis_server)
    writer.bulk_load(spec("fp32"), iter([(KEYS, ROWS)]), "digest")

    with pytest.raises(StoreError, match=r"the value of key \d+ has 24 bytes, 6 floats as fp16 are 12"):
        open_store(redis_server, row_dtype="fp16").open_table(spec("fp16"), 0)


def test_a_table_of_another_form_than_the_stores_is_refused(redis_server):
    with pytest.raises(StoreError, match="a table of fp16 rows in a store that was told to keep int8"):
        open_store(redis_server, row_dtype="int8").open_table(spec("fp16"), 0)


def test_a_value_that_the_form_cannot_hold_is_refused_by_its_key(redis_server):
    store = open_store(redis_server, row_dtype="fp16")
    store.open_table(spec("fp16"), 0)
    rows = ROWS.copy()
    rows[17, 2] = 1e30

    with pytest.raises(StoreError, match="17"):
        store.insert("model.table", KEYS, rows)

    assert store.count("model.table") == 0


def test_narrow_rows_overflow_like_others(redis_server):
    overflow = RedisOverflow(margin_rows=10, policy="least_used")
    config = RedisConfig(addresses=(redis_server.address,), row_dtype="int8", overflow=overflow)
    store = RedisStore(config)
    OPENED.append(store)
    store.open_table(spec("int8"), 0)

    store.insert("model.table", KEYS, ROWS)

    rows, found = fetched(store)
    assert 0 < found.sum() <= 160
    assert (rows[found] == rounded("int8")[found]).all()
