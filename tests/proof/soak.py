"""A server under traffic, swaps and faults for hours: its memory, descriptors and threads stay as they are.

RAM and Redis are in front of RocksDB. Clients ask over HTTP and gRPC, an attacker sends hostile requests, and new files
are swapped in, under a new number or under the same number. Redis hangs and dies in turn. No request fails, and every
answer is checked.
"""

import contextlib
import http.client
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median

from tests.proof.decoders import REQUESTS, corpus_of
from tests.proof.hostile import MIB, resident_bytes
from tests.proof.kills import CLOSED, DEADLINE_S, NAME, Releases, Server, Traffic
from tests.tools.redis_servers import RedisServer

#: What may grow from the second quarter of the time to the last quarter.
MOST_GROWTH = {"bytes": 16 * MIB, "descriptors": 8, "threads": 4}
SAMPLE_S = 1.0
#: How many seconds are between two swaps, and how long Redis works between two faults.
SWAP_S, FAULT_S = 15.0, 20.0


def tiers_of(redis):
    """RAM with room for a quarter of the rows, Redis, and RocksDB."""
    return {
        "supportlonglong": True,
        "models": [],
        "volatile_db": [
            {"type": "hash_map", "capacity_rows": 1000},
            {"type": "redis_cluster", "address": f"127.0.0.1:{redis.port}", "num_partitions": 8, "timeout_ms": 200},
        ],
        "persistent_db": {"type": "rocks_db", "path": "rows"},
    }


class Gauges:
    """Memory, descriptors and threads of a server's processes, sample by sample.

    Attributes:
        samples: by name, one number per sample.
        open: what the descriptors of the sample with most of them refer to, and how many refer to each.
    """

    def __init__(self, server):
        """Measure all processes of ``server``."""
        self._server = server
        self.samples = {name: [] for name in MOST_GROWTH}
        self.open = Counter()

    def measure(self):
        """Take one sample."""
        processes = self._server.processes()
        status = [Path(f"/proc/{pid}/status").read_text(encoding="utf-8") for pid in processes]
        self.samples["bytes"].append(sum(map(resident_bytes, processes)))
        now_open = Counter(kind for pid in processes for kind in open_kinds(pid))
        self.samples["descriptors"].append(now_open.total())
        self.open = max(self.open, now_open, key=Counter.total)
        self.samples["threads"].append(
            sum(int(re.search(r"^Threads:\s+(\d+)", text, re.MULTILINE)[1]) for text in status)
        )

    def growth(self):
        """How much the median of the last quarter is above the median of the second quarter.

        Not the highest sample: a swap opens files, and closes as many.
        """
        quarter = max(1, len(self.samples["bytes"]) // 4)
        return {
            name: median(of[-quarter:]) - median(of[quarter : 2 * quarter] or of) for name, of in self.samples.items()
        }


def open_kinds(pid):
    """What each descriptor of a process refers to: a file's name without numbers, or "socket"."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed a moment ago
            yield re.sub(r"\d+", "N", Path(descriptor.readlink()).name.partition(":")[0])


def attack(server, rng, codes, stop):
    """Send hostile requests, one at a time."""
    corpora = {name: corpus_of(name) for name in ("samples", "infer-json")}
    while not stop.wait(0.05):
        form = rng.choice(list(corpora))
        body = REQUESTS[form].change(rng.choice(corpora[form]), rng).removeprefix(b"\n")
        path = f"/predict/{NAME}" if form == "samples" else f"/v2/models/{NAME}/infer"
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
        try:
            connection.request("POST", path, body)
            codes[connection.getresponse().status] += 1
        except CLOSED:
            codes["closed"] += 1
        finally:
            connection.close()


def swap(releases, stop):
    """Swap new files in, again and again."""
    while not stop.wait(SWAP_S):
        releases.write_next()
        releases.finish()


def fail(redis, stop):
    """Let Redis hang and die in turn."""
    turn = 0
    while not stop.wait(FAULT_S):
        turn += 1
        broken, mended = (redis.freeze, redis.thaw) if turn % 2 else (redis.kill, redis.start)
        broken()
        stop.wait(FAULT_S / 4)
        mended()


def run(seconds, seed, folder, redis_folder):
    """Serve for ``seconds``; return the figures, whose ``faults`` must be empty."""
    rng, stop, codes, errors = random.Random(seed), threading.Event(), Counter(), []
    redis = RedisServer(redis_folder)
    with contextlib.ExitStack() as running:
        running.callback(redis.kill)
        server = Server(folder, tiers_of(redis))
        running.callback(server.kill)
        releases = Releases(server, rng)
        server.start()

        def guarded(work, *arguments):
            try:
                work(*arguments, stop)
            except BaseException as err:  # noqa: BLE001  # the top of a thread
                errors.append(repr(err))

        works = [(swap, releases), (fail, redis), (attack, server, random.Random(seed), codes)]
        threads = [threading.Thread(target=guarded, args=work) for work in works]
        gauges, end_s = Gauges(server), time.monotonic() + seconds
        with Traffic(server, releases) as traffic:
            for thread in threads:
                thread.start()
            while time.monotonic() < end_s and not traffic.faults and not errors:
                gauges.measure()
                time.sleep(SAMPLE_S)
            stop.set()
            for thread in threads:
                thread.join(DEADLINE_S)
        growth = gauges.growth()
        code = server.stop()
    grown = [f"{name} grew by {growth[name]}" for name, most in MOST_GROWTH.items() if growth[name] > most]
    return {
        "seed": seed,
        "seconds": seconds,
        "answered": {kind.__name__: count for kind, count in traffic.answered.items()},
        "swaps": releases.count,
        "hostile": {str(status): count for status, count in codes.most_common()},
        "highest": {name: max(of) for name, of in gauges.samples.items()},
        "growth": growth,
        "most_open": dict(gauges.open.most_common()),
        "exit_code": code,
        "faults": [*traffic.faults, *errors, *grown, *(["a hostile request got 500"] if codes[500] else [])],
    }
