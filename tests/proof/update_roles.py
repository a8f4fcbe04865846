"""The trainer and the consumer of ``update_kills``: ``python -m tests.proof.update_roles``, which imports little."""

import itertools
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from serving.errors import StoreError
from serving.parameter_server import ParameterServer
from serving.stream import Kind, UpdateMessage, decode, encode, open_sink

KEYS, DIM, DEFAULT = 300, 4, 0.5
MODEL, TABLES = "live", ("items", "users")


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


def consume(file):
    """Follow the log of a ps.json, and answer each line of the input with the rows of all keys."""
    with ParameterServer.from_config(file) as server:
        sys.stdout.write("open\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            rows = b""
            with suppress(StoreError):  # Redis is away
                rows = b"".join(server.lookup(f"{MODEL}.{table}", np.arange(KEYS))[0].tobytes() for table in TABLES)
            sys.stdout.write(rows.hex() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        consume(sys.argv[2])
