"""A trainer, the workers of a server and Redis are killed while rows arrive by stream.

A trainer writes messages to a folder: upserts, deletes and additions, and some of them twice. A server of two workers
follows the folder. Its two tables are in RAM, Redis and RocksDB, or in RAM and a Redis that may come back as it was a
while ago, or in shared RAM. After each kill the trainer pauses. Then every worker must answer with exactly the rows of
a dict that has applied every message of the folder once.

A start of a server takes seconds of processor time. The short form has one process with the same tables, a fork.
"""

import http.client
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter

import numpy as np

from serving.model.sparse_file import write_sparse_directory
from serving.storage.shared.folder import SHARED_MEMORY
from serving.stream import Kind, decode
from tests.proof.kills import CLOSED, DEADLINE_S, ROOT, Server
from tests.proof.update_roles import DEFAULT, DIM, KEYS, MODEL, TABLES
from tests.tools.redis_servers import LastingRedis, RedisServer
from tests.tools.warm import Warm

#: The last tiers.
TRUTHS = ("RocksDB", "Redis", "shared RAM")


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


class Forked:
    """A process of ``update_roles``, which prints a line once it is open."""

    def __init__(self, *arguments, stderr=None):
        self.process = Warm("-m", "tests.proof.update_roles", *arguments, cwd=ROOT, stderr=stderr)
        assert self.process.stdout.readline() == "open\n", f"it did not start: {arguments}"

    def kill(self):
        """Kill the process."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def write_ps(models, log, slower_tiers):
    """Write the ``ps.json`` of the model, and the files of its rows."""
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
    models.mkdir(exist_ok=True)
    write_sparse_directory(models / "file", keys, rows)
    (models / "ps.json").write_text(json.dumps(tiers), encoding="utf-8")
    return tiers


class Consumer:
    """One process that holds the tables."""

    victims = ("consumer", "consumer")
    #: So many answers are of all processes.
    answers = 1

    def __init__(self, folder, log, slower_tiers):
        self.folder = folder
        write_ps(folder / "models", log, slower_tiers)
        self._forked = None

    def start(self):
        """Start the process."""
        with (self.folder / "log").open("a") as log:
            self._forked = Forked("consume", self.folder / "models" / "ps.json", stderr=log)

    def kill_one(self, _victim):
        """Kill the process, and start it again."""
        self._forked.kill()
        self.start()

    def answer(self):
        """The rows of all keys, table after table; None if a lookup failed."""
        self._forked.process.stdin.write("\n")
        self._forked.process.stdin.flush()
        rows = bytes.fromhex(self._forked.process.stdout.readline())
        return np.frombuffer(rows, np.float32) if rows else None

    def log(self):
        """All that the process has logged."""
        return (self.folder / "log").read_text(encoding="utf-8")

    def stop(self):
        """End the process; return its exit code."""
        self._forked.process.communicate(timeout=DEADLINE_S)
        return self._forked.process.returncode

    def kill(self):
        """Kill the process."""
        if self._forked is not None and self._forked.process.poll() is None:
            self._forked.kill()


class LiveServer(Server):
    """``hotrow serve`` of a model that is only looked up."""

    victims = ("worker 0", "worker 0", "worker 1", "supervisor")
    #: Each new connection goes to any of the workers, also to a worker that has just started.
    answers = 36

    def __init__(self, folder, log, slower_tiers):
        super().__init__(folder, {})
        write_ps(self.models, log, slower_tiers)

    def command(self):
        """See ``Server``."""
        command = [sys.executable, "-m", "serving.cli.main", "serve", str(self.models / "ps.json"), "--workers", "2"]
        return [*command, "--http-port", str(self.http_port)]

    def kill_one(self, victim):
        """Kill a process, and wait until another one is in its place."""
        if victim == "supervisor":
            self.kill_supervisor()
        else:
            self.kill_worker(int(victim[-1]))

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
    """The tiers of a server, and who may be killed next to its processes."""
    ram = {"type": "hash_map", "capacity_rows": 60, "cache_missed_embeddings": True}
    redis = {"type": "redis_cluster", "address": f"127.0.0.1:{port}", "cache_missed_embeddings": True}
    slowest = {"type": "rocks_db", "path": "rows"} if truth == "RocksDB" else {"type": "disabled"}
    if truth == "shared RAM":
        shared = {
            "type": "multi_process_hash_map",
            "shared_memory_name": shared_name(port),
            "shared_memory_size": 2**24,
            "shared_memory_auto_remove": False,
        }
        return {"volatile_db": shared, "persistent_db": slowest}, ["trainer"]
    victims = ["trainer", "Redis", "Redis, taken back"] if truth == "Redis" else ["trainer", "Redis"]
    return {"volatile_db": [ram, redis], "persistent_db": slowest}, victims


def run(count, seed, folder, redis_folder, truth="RocksDB", kind=LiveServer, pause_s=0.6):
    """Kill ``count`` processes, each after at most ``pause_s`` of updates; return the figures and the faults."""
    rng, log = random.Random(seed), folder / "updates"
    log.mkdir()
    redis = LastingRedis(redis_folder) if truth == "Redis" else RedisServer(redis_folder)
    slower_tiers, victims = tiers(truth, redis.port)
    oracle, server, trainer, kills, faults, slowest_s = (
        Oracle(log),
        kind(folder, log, slower_tiers),
        None,
        Counter(),
        [],
        0.0,
    )
    try:
        server.start()
        for number in range(count):
            if truth == "Redis":
                redis.remember()
            trainer = Forked("train", log, seed + number)
            time.sleep(rng.uniform(pause_s / 12, pause_s))
            victim = rng.choice([*victims, *kind.victims])
            if victim.startswith("Redis"):
                redis.kill()
                time.sleep(rng.uniform(0, pause_s / 2))
                if victim != "Redis":
                    redis.take_back()
                redis.start()
            elif victim != "trainer":
                server.kill_one(victim)
            kills[victim] += 1
            time.sleep(rng.uniform(0, pause_s / 3))
            trainer.kill()
            oracle.catch_up()
            began_s = time.monotonic()
            while not (is_right := agrees(server, oracle)):
                if time.monotonic() > began_s + DEADLINE_S:
                    break
                time.sleep(pause_s / 6)  # the server needs the processor
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            if not is_right:
                faults.append(f"after the kill of {victim}: {differences(server, oracle)}")
                break
        code = server.stop()
    finally:
        if trainer is not None:
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
    wanted, answers = oracle.answer(), (server.answer() for _ in range(server.answers))
    return all(answer is not None and np.array_equal(answer, wanted) for answer in answers)


def differences(server, oracle):
    """What a worker answers instead."""
    wanted = oracle.answer().reshape(-1, DIM)
    for answer in (server.answer() for _ in range(server.answers)):
        if answer is None:
            return "no answer"
        rows = answer.reshape(-1, DIM)
        wrong = np.flatnonzero((rows != wanted).any(axis=1))
        if wrong.size:
            found = {int(place): (rows[place, 0], wanted[place, 0]) for place in wrong[:5]}
            return f"{wrong.size} rows differ, such as (answer, expected) {found}"
    return "now they agree"
