"""Rows that arrive from Kafka and go into RocksDB, against a bare consumer and rocksdict.

Both sides read the same messages of 16,384 rows from librdkafka's mock cluster and end on the same disk. The peer reads
the key and row bytes of a message, writes one rocksdict `WriteBatch` per message, and syncs the log once a second.
Hotrow also checks the check sum, the keys and the values, and stores the position with the rows.

Target: at least the peer's rows per second.
"""

import tempfile
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import rocksdict
from confluent_kafka import Consumer, TopicPartition

from benchmarks.one_table import raw_keys, raw_rows, table_model, vectors_from, write_table
from benchmarks.report import Record, parse_arguments, publish, take_turns
from benchmarks.rocksdb_peer import peer_options
from serving.parameter_server import ParameterServer
from serving.parameter_server.updates import UpdateStream
from serving.storage import RocksDbStore
from serving.stream import Kind, UpdateMessage, encode
from serving.stream.kafka import KafkaSink, KafkaSource
from tests.tools.kafka_cluster import KafkaCluster

ROWS, DIM, PARTITIONS = 16_384, 8, 4
#: The brokers keep about 5 MB of each partition.
MESSAGES = 6 * PARTITIONS
HEADER_BYTES = 16


def main():
    arguments = parse_arguments(__doc__)
    rounds = 1 if arguments.quick else 9
    cluster = KafkaCluster()
    try:
        with tempfile.TemporaryDirectory() as folder:
            records = [measure(cluster.addresses, Path(folder), rounds)]
    finally:
        cluster.kill()
    publish(records, arguments.json)


def measure(brokers, folder, rounds):
    """Rows per second of both sides; each round has a topic and a table of its own."""
    write_table(folder / "t", np.arange(1000), partial(vectors_from, dim=DIM))
    topics = [publish_messages(brokers, number) for number in range(rounds + 1)]
    with closing(RocksDbStore(folder / "ours", num_threads=2)) as store:
        stream = UpdateStream(lambda model: KafkaSource(brokers, [f"hotrow.{model.name}"]), poll_s=0.5)
        with ParameterServer([store], updates=stream) as server, closing(Peer(folder / "peer", brokers)) as peer:

            def ours(model):
                config = table_model(folder / "t", DIM).model_copy(update={"name": model})
                server.load_model(config)
                updates = server.updates(config)
                while sum(map(int, updates.positions.values())) < MESSAGES:
                    time.sleep(0.001)
                store.sync()

            took = take_turns(ours, peer.follow, [[(model,)] for model in topics])[1:]
            check(server, peer, topics[-1])
    pairs = [tuple(MESSAGES * ROWS / seconds / 1e3 for seconds in one) for one in took]
    return Record.of("update_stream.kafka_to_rocksdb", {"rows": ROWS, "dim": DIM}, "krow/s", pairs)


def publish_messages(brokers, number):
    """Publish the messages of a round; returns the model's name."""
    rng, model = np.random.default_rng(number), f"m{number}"
    sink = KafkaSink(brokers, f"hotrow.{model}", {"message.max.bytes": "4000000"})
    with closing(sink):
        for message in range(MESSAGES):
            keys = rng.integers(0, 250_000, ROWS) * PARTITIONS + message % PARTITIONS
            rows = rng.normal(size=(ROWS, DIM)).astype(np.float32)
            sent = UpdateMessage(Kind.UPSERT, model, "t", keys, rows, publisher="p", sequence=message)
            sink.send(encode(sent), message % PARTITIONS)
        sink.flush()
    return model


class Peer:
    """A consumer of confluent-kafka, and rocksdict."""

    def __init__(self, folder, brokers):
        self.brokers = brokers
        self.options = peer_options()
        self.database = rocksdict.Rdict(str(folder), self.options)
        self.families = {}

    def follow(self, model):
        """Write the rows of every message of a topic."""
        self.families[model] = self.database.create_column_family(model, self.options)
        handle = self.database.get_column_family_handle(model)
        consumer = Consumer(
            {
                "bootstrap.servers": self.brokers,
                "group.id": "peer",
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
            }
        )
        topic = f"hotrow.{model}"
        partitions = consumer.list_topics(topic).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        done, synced_s = 0, time.monotonic()
        while done < MESSAGES:
            for message in consumer.consume(64, 0.5):
                self._write(handle, message.value())
                done += 1
            if time.monotonic() > synced_s + 1:
                self.database.flush_wal(True)
                synced_s = time.monotonic()
        self.database.flush_wal(True)
        consumer.close()

    def _write(self, handle, payload):
        begin = HEADER_BYTES + int.from_bytes(payload[8:12], "little")
        keys = np.frombuffer(payload, np.int64, ROWS, begin)
        rows = np.frombuffer(payload, np.float32, ROWS * DIM, begin + 8 * ROWS).reshape(ROWS, DIM)
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.set_default_column_family(handle)
        for key, row in zip(raw_keys(keys), raw_rows(rows), strict=True):
            batch[key] = row
        self.database.write(batch)

    def close(self):
        for family in self.families.values():
            with suppress(Exception):
                family.close()
        self.database.close()


def check(server, peer, model):
    """Compare the answers of both sides."""
    keys = np.random.default_rng(0).integers(0, 1_000_000, 5000)
    rows, found = server.lookup(f"{model}.t", keys)
    for key, row, is_found in zip(keys, rows, found, strict=True):
        raw = peer.families[model].get(key.tobytes())
        if is_found and key >= 1000 and raw != row.tobytes():
            raise SystemExit(f"the sides differ at key {key}")


if __name__ == "__main__":
    main()
