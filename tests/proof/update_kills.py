"""A trainer, the workers of a server and Redis are killed while rows arrive by stream.

A trainer writes messages to a folder: upserts, deletes and additions, and some of them twice. A server of two workers
follows the folder. Its two tables are in RAM, Redis and RocksDB, or in RAM and a Redis that may come back as it was a
while ago, or in shared RAM. After each kill the trainer pauses. Then every worker must answer with exactly the rows of
a dict that has applied every message of the folder once.
"""

import http.client
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np

from serving.model.sparse_file import write_sparse_directory
from serving.storage.shared.folder import SHARED_MEMORY
from serving.stream import Kind, UpdateMessage, decode, encode, open_sink
from tests.proof.kills import CLOSED, DEADLINE_S, ROOT, Server
from tests.tools.redis_servers import LastingRedis, RedisServer

KEYS, DIM, DEFAULT = 300, 4, 0.5
MODEL, TABLES = "live", ("items", "users")
#: The last tiers.
TRUTHS = ("RocksDB", "Redis", "shared RAM")
#: Each new connection goes to any of the workers, so this many have met both.
CONNECTIONS = 12


def first_rows():
    """The rows of each table's file: those of even keys."""
    keys = np.arange(0, KEYS, 2)
    return keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)


class Oracle:
    """A dict that applies the messages of a folder."""

    def __init__(self, folder):
        self._folder, self._next, self._newest = folder, 1, -1
        self.tables = {table: dict(zip(*first_rows(), strict=True)) for table in TABLES}
        self.messages = 0

    def catch_up(self):
        """Apply the messages that have come, and return how many the folder has."""
        while (file := self._folder / f"{self._next:010}.update").exists():
            self._apply(decode(file.read_bytes()))
            self._next += 1
        return self._next - 1

    def _apply(self, message):
        if message.sequence <= self._newest:
            return
        self._newest = message.sequence
        self.messages += 1
        rows = self.tables[message.table]
        for place, key in enumerate(message.keys.tolist()):
            if message.kind is Kind.DELETE:
                rows.pop(key, None)
            elif message.kind is Kind.UPSERT:
                rows[key] = message.rows[place]
            else:
                rows[key] = rows.get(key, np.full(DIM, DEFAULT, np.float32)) + message.rows[place]

    def answer(self):
        """The rows of all keys, table after table."""
        default = np.full(DIM, DEFAULT, np.float32)
        return np.concatenate([rows.get(key, default) for rows in self.tables.values() for key in range(KEYS)])


def train(folder, seed):
    """Write messages until the process is killed; it goes on after the last message of the folder."""
    rng, sink = random.Random(seed), open_sink(str(folder))
    numbers = [int(file.stem) for file in folder.glob("*.update")]
    last = decode((folder / f"{max(numbers):010}.update").read_bytes()).sequence if numbers else -1
    sys.stdout.write("open\n")
    sys.stdout.flush()
    for sequence in itertools.count(last + 1):
        kind = rng.choice([Kind.UPSERT, Kind.DELETE, Kind.ACCUMULATE, Kind.ACCUMULATE])
        keys = np.array(rng.sample(range(KEYS), rng.randrange(1, 40)), dtype=np.int64)
        rows = None
        if kind is not Kind.DELETE:
            rows = np.array([[rng.randrange(-99, 99)] * DIM for _ in keys], dtype=np.float32)
        table = rng.choice(TABLES)
        message = encode(UpdateMessage(kind, MODEL, table, keys, rows, publisher="trainer", sequence=sequence))
        for _ in range(2 if rng.random() < 0.1 else 1):
            sink.send(message, 0)
        sink.flush()
        time.sleep(0.002)


class Trainer:
    """The process of ``train``."""

    def __init__(self, folder, seed):
        self._folder, self._seeds = folder, itertools.count(seed)
        self._process = None

    def start(self):
        """Start the process."""
        command = [sys.executable, "-m", "tests.proof.update_kills", str(self._folder), str(next(self._seeds))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout.readline() == "open\n", "the trainer did not start"

    def kill(self):
        """Kill the process."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.communicate()
            self._process = None


class LiveServer(Server):
    """``hotrow serve`` of a model that is only looked up."""

    def __init__(self, folder, log, slower_tiers):
        keys, rows = first_rows()
        tiers = {
            "supportlonglong": True,
            "models": [
                {
                    "model": MODEL,
                    "sparse_files": ["file"] * len(TABLES),
                    "embedding_table_names": TABLES,
                    "embedding_vecsize_per_table": [DIM] * len(TABLES),
                    "maxnum_catfeature_query_per_table_per_sample": [KEYS] * len(TABLES),
                    "default_value_for_each_table": [DEFAULT] * len(TABLES),
                }
            ],
            **slower_tiers,
            "update_source": {
                "type": "folder",
                "path": str(log),
                "poll_timeout_ms": 50,
                "update_headroom_ratio": 1.0,
            },  # every key has room
        }
        super().__init__(folder, tiers)
        write_sparse_directory(self.models / "file", keys, rows)

    def command(self):
        """See ``Server``."""
        command = [sys.executable, "-m", "serving.cli.main", "serve", str(self.models / "ps.json"), "--workers", "2"]
        return [*command, "--http-port", str(self.http_port)]

    def answer(self):
        """The rows of all keys, table after table, from a connection of its own; None if it failed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=DEADLINE_S)
        keys = np.tile(np.arange(KEYS), len(TABLES))
        inputs = [
            {"name": "KEYS", "datatype": "INT64", "shape": [1, keys.size], "data": keys.tolist()},
            {"name": "NUMKEYS", "datatype": "INT32", "shape": [1, len(TABLES)], "data": [KEYS] * len(TABLES)},
        ]
        try:
            connection.request("POST", f"/v2/models/{MODEL}/infer", json.dumps({"inputs": inputs}))
            answer = connection.getresponse()
            text = answer.read()
        except CLOSED:
            return None
        finally:
            connection.close()
        return np.array(json.loads(text)["outputs"][0]["data"], np.float32) if answer.status == 200 else None


def shared_name(port):
    """The folder of tables in shared RAM."""
    return f"kills-{port}"


def tiers(truth, port):
    """The tiers of a server, and who may be killed."""
    ram = {"type": "hash_map", "capacity_rows": 60, "cache_missed_embeddings": True}
    redis = {"type": "redis_cluster", "address": f"127.0.0.1:{port}", "cache_missed_embeddings": True}
    slowest = {"type": "rocks_db", "path": "rows"} if truth == "RocksDB" else {"type": "disabled"}
    victims = ["trainer", "worker 0", "worker 0", "worker 1", "supervisor", "Redis"]
    victims += ["Redis, taken back"] if truth == "Redis" else []
    if truth == "shared RAM":
        shared = {
            "type": "multi_process_hash_map",
            "shared_memory_name": shared_name(port),
            "shared_memory_size": 2**24,
            "shared_memory_auto_remove": False,
        }
        return {"volatile_db": shared, "persistent_db": slowest}, victims[:-1]
    return {"volatile_db": [ram, redis], "persistent_db": slowest}, victims


def run(count, seed, folder, redis_folder, truth="RocksDB"):
    """Kill ``count`` processes; return the figures and the faults."""
    rng, log = random.Random(seed), folder / "updates"
    log.mkdir()
    redis = LastingRedis(redis_folder) if truth == "Redis" else RedisServer(redis_folder)
    slower_tiers, victims = tiers(truth, redis.port)
    oracle, trainer = Oracle(log), Trainer(log, seed)
    server, kills, faults, slowest_s = LiveServer(folder, log, slower_tiers), Counter(), [], 0.0
    try:
        server.start()
        for _ in range(count):
            if truth == "Redis":
                redis.remember()
            trainer.start()
            time.sleep(rng.uniform(0.05, 0.6))
            what = rng.choice(victims)
            if what.startswith("Redis"):
                redis.kill()
                time.sleep(rng.uniform(0, 0.3))
                if what != "Redis":
                    redis.take_back()
                redis.start()
            elif what == "supervisor":
                server.kill_supervisor()
            elif what != "trainer":
                server.kill_worker(int(what[-1]))
            kills[what] += 1
            time.sleep(rng.uniform(0, 0.2))
            trainer.kill()
            oracle.catch_up()
            began_s = time.monotonic()
            while not (is_right := all(agrees(server, oracle) for _ in range(3))):  # a worker may just have started
                if time.monotonic() > began_s + DEADLINE_S:
                    break
                time.sleep(0.1)  # the server needs the processor
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            if not is_right:
                faults.append(f"after the kill of {what}: {differences(server, oracle)}")
                break
        code = server.stop()
    finally:
        trainer.kill()
        server.kill()
        redis.kill()
        shutil.rmtree(SHARED_MEMORY / shared_name(redis.port), ignore_errors=True)
    return {
        "kills": dict(kills), "messages": oracle.messages, "slowest_s": round(slowest_s, 2), "faults": faults,
        "tracebacks": server.log().count("Traceback"), "exit_code": code,
    }  # fmt: skip


def agrees(server, oracle):
    """Whether all answers are those of the oracle."""
    wanted, answers = oracle.answer(), [server.answer() for _ in range(CONNECTIONS)]
    return all(answer is not None and np.array_equal(answer, wanted) for answer in answers)


def differences(server, oracle):
    """What a worker answers instead."""
    wanted = oracle.answer().reshape(-1, DIM)
    for answer in (server.answer() for _ in range(CONNECTIONS)):
        if answer is None:
            return "no answer"
        rows = answer.reshape(-1, DIM)
        wrong = np.flatnonzero((rows != wanted).any(axis=1))
        if wrong.size:
            found = {int(place): (rows[place, 0], wanted[place, 0]) for place in wrong[:5]}
            return f"{wrong.size} rows differ, such as (answer, expected) {found}"
    return "now they agree"


if __name__ == "__main__":
    from pathlib import Path

    train(Path(sys.argv[1]), int(sys.argv[2]))
