"""A Redis that comes back as it was before rows changed: nobody gets an older row than was acknowledged."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from benchmarks.redis_servers import RedisServer, RedisServers, wait_until
from serving.config import RedisOverflow
from serving.errors import StoreError
from serving.storage import RocksDbStore, redis_changes
from serving.storage.hps_layout import mix
from serving.storage.redis.commands import SLOTS, Partition
from serving.storage.redis.nodes import RedisNodes
from tests.serving.small_server import KEYS, ROWS, DurableDictStore, rows_of, serve, write_model
from tests.serving.storage.redis_stores import open_store, said

TABLE, NEW_KEY = "m.t", 777
PARTITIONS = 4
FILE = {key: row.tolist() for key, row in zip(KEYS, ROWS, strict=True)}
RECORDS = [Partition(TABLE, number).record for number in range(PARTITIONS)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rdb_server(redis_binary, tmp_path):
    """A server that comes back with what it has saved last."""
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


def row_of(number):
    return np.full((1, 3), number, dtype=np.float32)


def state_of(client):
    """All that Redis has."""
    return {name: client.dump(name) for name in client.scan_iter()}


def bring_back(client, state):
    """Let Redis have ``state`` and nothing else."""
    with client.pipeline(transaction=True) as act:
        act.flushall()
        for name, value in state.items():
            act.restore(name, 0, value)
        act.execute()


def load_again(server, config):
    """What fills a Redis that lacks rows."""
    server.unload_model("m")
    server.load_model(config)


def redis_of(server, **options):
    return open_store(server, num_partitions=PARTITIONS, **options)


CHANGES = {
    "updated": (lambda server: server.insert(TABLE, np.array([3]), row_of(7)), FILE | {3: [7.0] * 3}),
    "removed": (
        lambda server: server.evict(TABLE, np.array([3])),
        {key: row for key, row in FILE.items() if key != 3},
    ),
    "new": (lambda server: server.insert(TABLE, np.array([NEW_KEY]), row_of(7)), FILE | {NEW_KEY: [7.0] * 3}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_redis_that_is_restarted_from_an_older_file_gives_no_row_that_has_changed_since(
    rdb_server, config, tmp_path, change
):
    apply, expected = CHANGES[change]
    with serve(config, redis_of(rdb_server), RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        server.insert(TABLE, np.array([5]), ROWS[4:5])  # so that the saved state has changes, too
        with rdb_server.client() as client:
            client.save()
        apply(server)
        assert rows_of(server) == expected

        rdb_server.kill()
        rdb_server.start()

        assert rows_of(server) == expected
        load_again(server, config)
        assert rows_of(server.stores[0]) == expected  # it has been filled again
        server.insert(TABLE, np.array([4]), row_of(8))
        assert rows_of(server) == expected | {4: [8.0] * 3}


def test_once_one_process_knows_that_a_partition_is_behind_no_other_serves_its_rows(
    redis_server, client, config, caplog
):
    other = redis_of(redis_server)
    with serve(config, redis_of(redis_server), DurableDictStore()) as server, serve(config, other, DurableDictStore()):
        before = state_of(client)
        server.insert(TABLE, np.array([3]), row_of(7))
        bring_back(client, before)
        assert rows_of(other, [3]) == {3: FILE[3]}  # as long as nobody who knows has asked

        assert rows_of(server, [3]) == {3: [7.0] * 3}

        with pytest.raises(StoreError, match="has lost the rows it was loaded with"):
            rows_of(other, [3])
        assert rows_of(server, [3]) == {3: [7.0] * 3}
        assert len(said(caplog, "came back older")) == 1


def test_a_change_that_meets_an_older_state_removes_it(redis_server, client, config, caplog):
    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        before = state_of(client)
        server.insert(TABLE, np.array([3]), row_of(7))
        bring_back(client, before)

        server.insert(TABLE, np.array([3]), row_of(8))

        assert len(said(caplog, "came back older")) == 1
        assert rows_of(server) == FILE | {3: [8.0] * 3}


class Story:
    """A parameter server, what is done to it and to its Redis, and the rows that it must answer with."""

    def __init__(self, server, client, config):
        self.server, self.client, self.config = server, client, config
        self.expected, self.saved = dict(FILE), state_of(client)

    def insert(self, key, number):
        self.server.insert(TABLE, np.array([key]), row_of(number))
        self.expected[key] = [float(number)] * 3

    def remove(self, key, number):
        self.server.evict(TABLE, np.array([key]))
        self.expected.pop(key, None)

    def overflow(self, key, number):
        if self.server.stores[0].capacity_rows(TABLE) is not None:
            self.server.stores[0].evict(TABLE, np.array([key]))

    def promote(self, key, number):
        rows_of(self.server)
        assert self.server.wait_for_promotions(60)

    def save(self, key, number):
        self.saved = state_of(self.client)

    def bring_back(self, key, number):
        bring_back(self.client, self.saved)

    def flush(self, key, number):
        self.client.flushall()

    def refill(self, key, number):
        for lost in self.server._served._losable.values():
            lost.try_to_load()

    def load(self, key, number):
        load_again(self.server, self.config)

    def look_up(self, key, number):
        for one in KEYS:
            assert rows_of(self.server, [one]) == {key: row for key, row in self.expected.items() if key == one}


DEEDS = ["insert", "remove", "overflow", "promote", "save", "bring_back", "flush", "refill", "load", "look_up"]


@settings(deadline=None, max_examples=40)
@given(
    overflow=st.sampled_from([None, RedisOverflow(margin_rows=100)]),
    deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from(KEYS[:4])), max_size=16),
)
def test_whatever_state_comes_back_every_row_is_the_one_that_was_acknowledged_last(
    shared_redis_server, config, overflow, deeds
):
    with shared_redis_server.client() as client:
        client.flushall()
        redis = redis_of(shared_redis_server, overflow=overflow)
        with serve(config, redis, DurableDictStore(), promote=True) as server:
            story = Story(server, client, config)
            for number, (deed, key) in enumerate(deeds):
                getattr(story, deed)(key, number)
            story.look_up(None, None)
            assert rows_of(server) == story.expected


def test_a_state_before_rows_were_only_promoted_is_no_outage(redis_server, client, config):
    redis = redis_of(redis_server, overflow=RedisOverflow(margin_rows=100))
    with serve(config, redis, DurableDictStore(), promote=True) as server:
        server.insert(TABLE, np.array(KEYS), ROWS)
        redis.evict(TABLE, np.array(KEYS[:6]))  # as it does when it overflows
        before = state_of(client)
        assert rows_of(server) == FILE
        assert server.wait_for_promotions(60)
        assert rows_of(redis) == FILE

        bring_back(client, before)

        assert rows_of(redis) == {key: FILE[key] for key in KEYS[6:]}


def test_where_redis_is_the_only_tier_it_answers_with_what_it_has(redis_server, client, config):
    with serve(config, redis_of(redis_server)) as server:
        before = state_of(client)
        server.insert(TABLE, np.array([3]), row_of(7))

        bring_back(client, before)

        assert rows_of(server) == FILE


@pytest.mark.parametrize("words", [1, 2])
def test_records_of_older_versions_are_numbered_by_the_next_change(redis_server, client, config, words):
    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        for record in RECORDS:
            start, _, state = client.get(record).rpartition(b" ")
            client.set(record, start + b" " + b":".join([state.split(b":")[0], b"filled"][:words]))
        server.stores[0].close()
    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        before = state_of(client)
        server.insert(TABLE, np.array([3]), row_of(7))
        assert rows_of(server.stores[0]) == FILE | {3: [7.0] * 3}

        bring_back(client, before)

        assert rows_of(server) == FILE | {3: [7.0] * 3}
        with pytest.raises(StoreError, match=r"has lost the rows|has come back without"):
            rows_of(server.stores[0])


def test_a_state_without_any_record_is_behind_where_rows_have_changed(redis_server, client, config):
    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        before = state_of(client)
        server.insert(TABLE, np.array([3]), row_of(7))

        bring_back(client, {name: value for name, value in before.items() if name not in RECORDS})

        assert rows_of(server) == FILE | {3: [7.0] * 3}


def test_rows_that_hps_wrote_are_read_and_changed_without_a_record(redis_server, client, config):
    redis = redis_of(redis_server)
    with serve(config, redis, DurableDictStore()) as server:
        client.delete(*RECORDS)
        redis.open_table(redis._tables[TABLE].spec, 0)  # as for the first time

        server.insert(TABLE, np.array([3]), row_of(7))

        assert rows_of(redis, KEYS) == FILE | {3: [7.0] * 3}
        assert not client.exists(*RECORDS)


def test_a_load_counts_for_more_than_what_was_before_it_though_the_clock_is_set_back(
    redis_server, client, config, monkeypatch
):
    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        server.insert(TABLE, np.array([3]), row_of(7))
        client.flushall()
        hour_ns = 3600 * 10**9
        monkeypatch.setattr(redis_changes.time, "time_ns", lambda now=time.time_ns: now() - hour_ns)

        load_again(server, config)

        assert rows_of(server.stores[0]) == FILE | {3: [7.0] * 3}


def test_numbers_are_compared_without_another_round_of_commands(redis_server, config, monkeypatch):
    calls, run = Counter(), RedisNodes.run

    def counted(nodes, commands):
        calls["rounds"] += 1
        return run(nodes, commands)

    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        server.insert(TABLE, np.array(KEYS), ROWS)
        monkeypatch.setattr(RedisNodes, "run", counted)
        assert rows_of(server, KEYS) == FILE

    assert calls == {"rounds": 1}


def test_a_change_numbers_the_partitions_of_its_keys_only(redis_server, client, config):
    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        begun_ns = time.time_ns()
        before = [redis_changes.number_of(client.get(record)) for record in RECORDS]
        server.insert(TABLE, np.array([3, 3]), np.repeat(row_of(7), 2, axis=0))
        after = [redis_changes.number_of(client.get(record)) for record in RECORDS]

    has_grown = np.array(after) > before
    place = int(mix(np.array([3]))[0] % np.uint64(PARTITIONS))
    assert has_grown.tolist() == [number == place for number in range(PARTITIONS)]
    assert after[place] >= begun_ns // 1000


@pytest.mark.slow
def test_a_replica_that_takes_over_without_the_last_writes_gives_no_row_that_has_changed_since(
    redis_binary, tmp_path, config
):
    cluster = RedisServers(tmp_path / "cluster", masters=3, replicas=1)
    at = int(key_slot(RECORDS[0])) * cluster.masters // SLOTS
    master, replica = cluster.nodes[at], cluster.nodes[at + cluster.masters]
    try:
        with serve(config, redis_of(cluster.nodes[0]), DurableDictStore()) as server, master.client() as client:
            assert client.wait(1, 30_000)  # until the replica has what was loaded
            replica.freeze()
            client.client_kill_filter(_type="replica")  # or it would find the writes in its socket
            server.insert(TABLE, np.array(KEYS), ROWS + 1)
            expected = {key: row.tolist() for key, row in zip(KEYS, ROWS + 1, strict=True)}
            master.kill()
            replica.thaw()

            def is_noticed():
                assert rows_of(server) == expected
                try:
                    rows_of(server.stores[0])
                except StoreError as err:
                    return "has come back without rows" in err.reason
                return False

            wait_until(is_noticed, "the replica has taken over, and is known to lack rows")
    finally:
        cluster.kill()
