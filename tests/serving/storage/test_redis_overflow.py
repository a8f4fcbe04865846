"""HPS's overflow policies on Redis: how many rows stay, which of them, and what lies beside them."""

import struct
import time

import numpy as np
import pytest

from serving.config import RedisOverflow
from serving.errors import StoreError
from serving.model.hps_hash import mix
from serving.storage import Marker, TableSpec
from serving.storage.redis import overflow as redis_overflow
from serving.storage.redis import store as redis_store
from tests.serving.storage.redis_stores import SPEC, evicted_rows, open_store
from tests.tools.redis_servers import wait_until

PARTITIONS = 8
MARGIN = 50
TARGET = 40


def opened(server, policy="random", margin=MARGIN, spec=SPEC, **change):
    overflow = RedisOverflow(margin_rows=margin, policy=policy, target_ratio=TARGET / MARGIN, **change)
    store = open_store(server, num_partitions=PARTITIONS, overflow=overflow)
    store.table(spec).open(0)
    return store


def rows_of(keys):
    return np.repeat(np.asarray(keys, dtype=np.float32)[:, None], SPEC.dim, axis=1)


def insert(store, keys):
    store.tables[SPEC.name].insert(np.asarray(keys), rows_of(keys))


def found(store, keys):
    """The keys that are there; their rows must be right."""
    out = np.empty((len(keys), SPEC.dim), dtype=np.float32)
    mask = store.tables[SPEC.name].fetch(np.asarray(keys), out)
    assert (out[mask] == rows_of(keys)[mask]).all()
    return np.asarray(keys)[mask].tolist()


def keys_of_partition(number, count):
    keys = np.arange(count * PARTITIONS * 2 + 100)
    return keys[mix(keys) % np.uint64(PARTITIONS) == number][:count].tolist()


def times(number):
    return f"hps_et{{hps_et.{SPEC.name}/p{number}}}t"


@pytest.mark.parametrize("policy", ["random", "least_used", "oldest"])
def test_a_partition_that_grows_beyond_its_margin_is_brought_down_to_the_target(redis_server, client, policy):
    store = opened(redis_server, policy)
    keys = keys_of_partition(3, MARGIN + 1)

    insert(store, keys[:MARGIN])
    assert store.tables[SPEC.name].count() == MARGIN
    insert(store, keys[MARGIN:])

    assert store.tables[SPEC.name].count() == TARGET
    assert evicted_rows(store) == MARGIN + 1 - TARGET
    assert keys[-1] in found(store, keys)
    assert client.hlen(times(3)) == (0 if policy == "random" else TARGET)
    assert not client.keys("*evicting*")


@pytest.mark.parametrize("policy", ["random", "least_used", "oldest"])
def test_memory_stays_bounded_however_much_is_inserted(redis_server, policy):
    store = opened(redis_server, policy)

    for start in range(0, 5000, 500):
        insert(store, range(start, start + 500))
        assert store.tables[SPEC.name].count() <= MARGIN * PARTITIONS

    assert store.tables[SPEC.name].capacity_rows == MARGIN * PARTITIONS
    assert store.tables[SPEC.name].count() == 5000 - evicted_rows(store)


def test_random_victims_differ_from_time_to_time(redis_server):
    keys = keys_of_partition(0, MARGIN + 1)
    store = opened(redis_server)
    kept = set()

    for _ in range(4):
        store.tables[SPEC.name].evict(np.array(keys))
        insert(store, keys[:MARGIN])
        insert(store, keys[MARGIN:])
        kept.add(tuple(found(store, keys)))

    assert len(kept) > 1


def test_the_least_used_rows_go_first(redis_server, client):
    store = opened(redis_server, "least_used")
    keys = keys_of_partition(0, MARGIN + 1)
    insert(store, keys[:MARGIN])
    used = keys[5 : 5 + TARGET - 1]
    for _ in range(3):
        found(store, used)
    wait_until(lambda: sum(map(int, client.hvals(times(0)))) == MARGIN + 3 * len(used), "the uses are written down")

    insert(store, keys[MARGIN:])

    assert found(store, keys) == [*used, keys[MARGIN]]


def test_counts_of_rows_that_stay_are_halved(redis_server, client):
    store = opened(redis_server, "least_used")
    keys = keys_of_partition(0, MARGIN + 1)
    insert(store, keys[:MARGIN])
    client.hset(times(0), mapping={struct.pack("<q", key): 101 for key in keys[: TARGET - 1]})

    insert(store, keys[MARGIN:])

    counts = client.hgetall(times(0))
    assert {counts[struct.pack("<q", key)] for key in keys[: TARGET - 1]} == {b"50"}
    assert counts[struct.pack("<q", keys[MARGIN])] == b"1"


@pytest.mark.parametrize("refreshes", [False, True])
def test_the_oldest_rows_go_first_and_a_read_counts_as_a_write_where_the_option_says_so(
    redis_server, client, refreshes
):
    store = opened(redis_server, "oldest", refreshes=refreshes)
    keys = keys_of_partition(0, MARGIN + 1)
    insert(store, keys[:MARGIN])
    written = {struct.pack("<q", key): struct.pack("<q", 1000 + at) for at, key in enumerate(keys[:MARGIN])}
    client.hset(times(0), mapping=written)

    found(store, keys[:5])
    if refreshes:
        young = struct.pack("<q", keys[4])
        wait_until(lambda: client.hget(times(0), young) != written[young], "the read is written down")
    insert(store, keys[MARGIN:])

    gone = 11 + (5 if refreshes else 0)
    assert found(store, keys) == [*(keys[:5] if refreshes else []), *keys[gone:]]


def test_rows_of_which_nothing_is_known_go_before_all_others(redis_server, client):
    plain = open_store(redis_server, num_partitions=PARTITIONS)
    plain.table(SPEC).open(0)
    keys = keys_of_partition(0, MARGIN + 1)
    insert(plain, keys[:20])
    store = opened(redis_server, "least_used")
    insert(store, keys[20:MARGIN])

    insert(store, keys[MARGIN:])

    assert found(store, keys) == [*found(store, keys[:20]), *keys[20:]]
    assert len(found(store, keys[:20])) == 20 - 11


class TestWhatLiesBesideTheRows:
    """As HPS reads and writes it."""

    @pytest.mark.parametrize(("key_bytes", "code"), [(8, "<q"), (4, "<I")])
    def test_least_used_counts_in_decimal_text(self, redis_server, client, key_bytes, code):
        store = opened(redis_server, "least_used", spec=TableSpec(SPEC.name, SPEC.dim, key_bytes))
        key = keys_of_partition(2, 1)[0]
        client.hset(times(2), struct.pack(code, key), "41")

        insert(store, [key])

        assert client.hgetall(times(2)) == {struct.pack(code, key): b"42"}

    @pytest.mark.parametrize(("key_bytes", "code"), [(8, "<q"), (4, "<I")])
    def test_oldest_has_eight_bytes_of_time(self, redis_server, client, key_bytes, code):
        store = opened(redis_server, "oldest", spec=TableSpec(SPEC.name, SPEC.dim, key_bytes))
        key = keys_of_partition(2, 1)[0]
        before = int(time.time())

        insert(store, [key])

        ((name, value),) = client.hgetall(times(2)).items()
        assert name == struct.pack(code, key)
        assert before <= struct.unpack("<q", value)[0] <= time.time()

    def test_what_is_evicted_by_hand_leaves_nothing(self, redis_server, client):
        store = opened(redis_server, "least_used")
        insert(store, range(30))

        store.tables[SPEC.name].evict(np.arange(30))

        assert not client.keys("*")


@pytest.mark.parametrize("policy", ["random", "least_used", "oldest"])
def test_a_load_takes_the_first_rows_that_fit_each_partition(redis_server, client, policy):
    store = opened(redis_server, policy)
    keys = np.arange(2000)
    batches = iter([(keys[start : start + 300], rows_of(keys[start : start + 300])) for start in range(0, 2000, 300)])

    store.table(SPEC).load(batches, Marker("digest"), keep=False)

    places = mix(keys) % np.uint64(PARTITIONS)
    first = np.concatenate([keys[places == number][:MARGIN] for number in range(PARTITIONS)])
    assert found(store, range(2000)) == sorted(first.tolist())
    assert store.tables[SPEC.name].marker().digest == "digest"
    for number in range(PARTITIONS):
        assert client.hlen(times(number)) == (0 if policy == "random" else MARGIN)
        assert client.ttl(times(number)) < 0
    assert not client.keys("*loading*")


def test_keys_that_were_evicted_are_absent_and_no_outage(redis_server):
    store = opened(redis_server)
    store.table(SPEC).load(iter([(np.arange(10), rows_of(range(10)))]), Marker("digest"), keep=False)

    assert found(store, [5, 1000]) == [5]


def test_while_another_process_evicts_nobody_else_does(redis_server, client):
    store = opened(redis_server)
    keys = keys_of_partition(1, MARGIN + 1)
    client.set(f"hps_et{{hps_et.{SPEC.name}/p1}}.hotrow.evicting", "1")

    insert(store, keys)

    assert store.tables[SPEC.name].count() == MARGIN + 1
    assert evicted_rows(store) == 0


def test_uses_that_cannot_be_written_down_cost_no_answer(redis_server, monkeypatch):
    monkeypatch.setattr(redis_store, "MOST_WAITING_TOUCHES", 1)
    store = opened(redis_server, "least_used")
    insert(store, range(20))

    for _ in range(50):
        assert found(store, range(20)) == list(range(20))

    table = store.tables[SPEC.name]
    store.close()
    with pytest.raises(StoreError, match="closed"):
        table.fetch(np.array([1]), rows_of([1]))


def test_the_first_eviction_is_warned_of(redis_server, caplog):
    store = opened(redis_server)

    for start in range(0, 2000, 500):
        insert(store, range(start, start + 500))

    assert len([record for record in caplog.records if "rows evicted" in record.message]) == 1


@pytest.mark.parametrize("policy", ["least_used", "oldest"])
def test_what_was_noted_of_rows_that_are_gone_is_forgotten(redis_server, client, policy):
    store = opened(redis_server, policy)
    keys = keys_of_partition(0, 3 * MARGIN)
    insert(store, keys[:MARGIN])
    client.hset(times(0), mapping={struct.pack("<q", key): b"12345678" for key in keys[MARGIN + 1 :]})

    insert(store, keys[MARGIN : MARGIN + 1])

    assert set(client.hkeys(times(0))) == {struct.pack("<q", key) for key in found(store, keys)}


def test_what_another_policy_noted_is_counted_from_one(redis_server, client):
    insert(opened(redis_server, "oldest"), range(30))
    store = opened(redis_server, "least_used")

    insert(store, range(20))
    found(store, range(20))

    key = keys_of_partition(0, 1)[0]
    wait_until(lambda: client.hget(times(0), struct.pack("<q", key)) == b"2", "the use is written down")


@pytest.mark.parametrize("policy", ["random", "least_used", "oldest"])
def test_a_partition_that_another_process_has_just_brought_down_loses_no_more(redis_server, monkeypatch, policy):
    store, other = opened(redis_server, policy), opened(redis_server, policy)
    keys = keys_of_partition(0, MARGIN + 4)
    insert(store, keys[:MARGIN])
    trim = redis_overflow.Overflow._trim

    def late(overflow, partition, spared):
        if overflow is other.tables[SPEC.name].overflow:
            return trim(overflow, partition, spared)
        monkeypatch.setattr(redis_overflow.Overflow, "_trim", trim)
        insert(other, keys[MARGIN : MARGIN + 1])  # which evicts
        insert(other, keys[MARGIN + 1 :])
        return trim(overflow, partition, spared)

    monkeypatch.setattr(redis_overflow.Overflow, "_trim", late)
    insert(store, keys[MARGIN : MARGIN + 1])

    assert evicted_rows(other) == MARGIN + 1 - TARGET
    assert evicted_rows(store) == 0
    assert store.tables[SPEC.name].count() == TARGET + 3
