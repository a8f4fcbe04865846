"""Rows that arrive by stream: how fast they are applied, how soon they are seen, and what requests pay.

``kafka_to_rocksdb``: against a bare consumer and rocksdict. Both sides read the same messages of 16,384 rows from
librdkafka's mock cluster and end on the same disk. The peer reads the key and row bytes of a message, writes one
rocksdict `WriteBatch` per message, and syncs the log once a second. Hotrow also checks the check sum, the keys and the
values, and stores the position with the rows.

``visible``: the time from the send of a message until a lookup finds its row, at a tenth of that rate: p99, against
100 ms. ``predict_p99``: of requests next to a stream at a quarter of that rate, against the same server at rest.
``unread_p99``: the same next to the same trainer, whose messages the server does not read: what the machine pays.

``dense_refresh_p99``: of requests to the model of `make demo` next to a load of a version with a network alone each
second, against the same server at rest. ``dense_refresh``: the time of such a load, against 1 s. A request that fails
ends the benchmark.

Targets: at least the peer's rows per second; at most 100 ms; at most 1.2 times the p99 at rest; at most 1 s.
"""

import http.client
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import rocksdict
from confluent_kafka import Consumer, TopicPartition

from benchmarks.http_client import compile_client, port_in_url, request_of, running
from benchmarks.http_client import measure as measure_http
from benchmarks.one_table import raw_keys, raw_rows, table_model, vectors_from, write_table
from benchmarks.report import Record, parse_arguments, publish, take_turns
from benchmarks.rocksdb_peer import peer_options
from benchmarks.swaps import SAMPLES, SHARE_OF_PEAK, Paced
from serving.parameter_server import ParameterServer
from serving.parameter_server.updates import UpdateStream
from serving.storage import RocksDbStore
from serving.stream import Kind, UpdateMessage, encode
from serving.stream.kafka import KafkaSink, KafkaSource
from tests.tools.kafka_cluster import KafkaCluster
from tests.tools.tiny_model import TinyModel, flatten
from training.model import CtrModel, export_dense, export_model, open_document
from training.synthetic.criteo_like import generate

ROWS, DIM, PARTITIONS = 16_384, 8, 4
#: A process of low priority that sends messages of 2,048 rows at a rate.
STREAM = """
import os, sys, time
import numpy as np
from serving.stream import Kind, UpdateMessage, encode, open_sink
os.nice(19)
folder, dim, rows_per_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
sink, rng, due_s = open_sink(folder), np.random.default_rng(0), time.monotonic()
rows = rng.normal(size=(2048, dim)).astype(np.float32)
while True:
    for table in ("user", "item"):
        keys = rng.integers(0, 100_000, 2048)
        sink.send(encode(UpdateMessage(Kind.UPSERT, "small", table, keys, rows)), 0)
        due_s += 2048 / rows_per_s
        time.sleep(max(0.0, due_s - time.monotonic()))
"""
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
            rows_per_s = 1e3 * records[0].ours
            records.append(time_to_visible(cluster.addresses, Path(folder), rows_per_s / 10, rounds))
    finally:
        cluster.kill()
    with tempfile.TemporaryDirectory() as folder:
        records += dense_refresh(Path(folder), rounds)
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            records += beside_requests(Path(folder), workers, rows_per_s / 4, rounds)
    publish(records, arguments.json)


def time_to_visible(brokers, folder, rows_per_s, rounds):
    """p99 of the time until a lookup finds the row of a message, in milliseconds, against 100 ms."""
    model, rows, waits = "visible", 2048, []
    stream = UpdateStream(lambda _: KafkaSource(brokers, [f"hotrow.{model}"]), poll_s=0.5)
    store = RocksDbStore(folder / "visible", num_threads=2)
    keys = np.arange(rows)
    with ParameterServer([store], updates=stream) as server, closing(KafkaSink(brokers, f"hotrow.{model}")) as sink:
        for number in range(50 * rounds + 1):
            row = np.full((rows, DIM), number, np.float32)
            begin_s = time.monotonic()
            sink.send(encode(UpdateMessage(Kind.UPSERT, model, "t", keys, row)), 0)
            if not number:  # it makes the topic
                sink.flush()
                server.load_model(table_model(folder / "t", DIM).model_copy(update={"name": model}))
            while server.lookup(f"{model}.t", keys[-1:])[0][0, 0] != number:
                time.sleep(0.0005)
            waits.append(time.monotonic() - begin_s)
            time.sleep(max(0.0, rows / rows_per_s - waits[-1]))
    parts = np.array_split(1e3 * np.array(waits[1:]), rounds)
    return Record.of(
        "update_stream.visible_p99",
        {"rows": rows, "dim": DIM},
        "ms",
        [(np.quantile(part, 0.99), 100.0) for part in parts],
    )


def beside_requests(folder, workers, rows_per_s, rounds):
    """p99 of requests of 64 samples next to a stream that the server reads, and next to one that it does not read."""
    models, log, unread = folder / "models", folder / "log", folder / "unread"
    log.mkdir()
    model = TinyModel(rows=100_000, dim=DIM)
    model.write(models, "small")
    tiers = {"supportlonglong": True, "models": [], "update_source": {"type": "folder", "path": str(log)}}
    tiers |= {"volatile_db": {"type": "hash_map", "capacity_rows": 50_000}}
    tiers |= {"persistent_db": {"type": "rocks_db", "path": str(folder / "rows")}}
    (models / "ps.json").write_text(json.dumps(tiers), encoding="utf-8")
    dense, bags = model.sample_requests(SAMPLES, seed=1)
    request = request_of(dense, *flatten(bags), name="small")
    (folder / "request").write_bytes(request)
    command = ["serving.cli.main", "serve", str(models), "--http-port", "0", "--device", "cpu"]
    pairs, rest_s = {"unread_p99": [], "predict_p99": []}, 1.0 if rounds == 1 else 5.0
    with running([*command, "--workers", str(workers)], port_in_url) as port:
        peak = measure_http(compile_client(folder), port, 1, rest_s, folder / "request")["requests_per_s"]
        with Paced(port, request, 1 / (peak * SHARE_OF_PEAK)) as paced:
            for _ in range(rounds):
                began_s = time.monotonic()
                time.sleep(rest_s)
                rest_us = paced.p99_us(began_s, time.monotonic())
                for name, written in (("unread_p99", unread), ("predict_p99", log)):
                    with publishing(written, rows_per_s):
                        streams_s = time.monotonic()
                        time.sleep(rest_s)
                        pairs[name].append((paced.p99_us(streams_s, time.monotonic()), rest_us))
    params = {"workers": workers, "krows_per_s": round(rows_per_s / 1e3), "requests_per_s": round(peak * SHARE_OF_PEAK)}
    return [Record.of(f"update_stream.{name}", params, "us", rounds_of) for name, rounds_of in pairs.items()]


@contextmanager
def publishing(log, rows_per_s):
    """A trainer writes to a folder while the block runs."""
    with subprocess.Popen([sys.executable, "-c", STREAM, str(log), str(DIM), str(rows_per_s)]) as trainer:
        try:
            time.sleep(0.5)  # it imports NumPy
            yield
        finally:
            trainer.kill()


def dense_refresh(folder, rounds):
    """p99 of requests of 64 samples next to a load of a network alone each second, and the time of such a load."""
    refreshes, batches = (1, 10) if rounds == 1 else (5, 500)
    document = open_document("dcn")
    model = CtrModel(document.graph, seed=0, rule=document.rule, tables=document.tables)
    samples = generate(SAMPLES * batches, seed=0).samples
    for begin in range(0, len(samples), SAMPLES):
        model.train_batch(samples[begin : begin + SAMPLES], 0.001)
    models, numbers = folder / "models", range(2, 2 + rounds * refreshes)
    export_model(model, document.document, models, "dcn")
    for number in numbers:
        export_dense(model, document.document, models, "dcn", base=1, version=number)
    asked, versions = samples[:SAMPLES], iter(numbers)
    request = request_of(asked.dense, asked.bags.keys, asked.bags.row_ptrs.astype(np.int32), name="dcn")
    (folder / "request").write_bytes(request)
    command = ["serving.cli.main", "serve", str(models), "--http-port", "0", "--device", "cpu"]
    pairs, times = [], []
    with running([*command, "--model-control-mode", "explicit"], port_in_url) as port:
        load_version(port, 1)
        peak = measure_http(compile_client(folder), port, 1, refreshes, folder / "request")["requests_per_s"]
        with Paced(port, request, 1 / (peak * SHARE_OF_PEAK)) as paced:
            for _ in range(rounds):
                began_s = time.monotonic()
                time.sleep(refreshes)
                refreshes_s, took_s = time.monotonic(), []
                for number in range(1, refreshes + 1):
                    took_s.append(load_version(port, next(versions)))
                    time.sleep(max(0.0, refreshes_s + number - time.monotonic()))
                pairs.append((paced.p99_us(refreshes_s, time.monotonic()), paced.p99_us(began_s, refreshes_s)))
                times.append((1e3 * float(np.median(took_s)), 1e3))
    params = {"requests_per_s": round(peak * SHARE_OF_PEAK)}
    return [
        Record.of("update_stream.dense_refresh_p99", params, "us", pairs),
        Record.of("update_stream.dense_refresh", params, "ms", times),
    ]


def load_version(port, version):
    """Serve one version of the model; return how long the load took."""
    policy = {"version_policy": {"specific": {"versions": [version]}}}
    body = json.dumps({"parameters": {"config": json.dumps(policy)}})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began_s = time.monotonic()
    connection.request("POST", "/v2/repository/models/dcn/load", body)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"load: {answer.read()!r}")
    connection.close()
    return time.monotonic() - began_s


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
