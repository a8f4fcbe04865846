"""A server that is a plain dict: it applies the messages of a log in order, and each sequence number once."""

import numpy as np

from serving.model.sparse_file import open_sparse
from serving.stream import decode, decode_hps, open_source


def messages(log, run=None, after="0"):
    """The messages of a run after a position, in the log's order."""
    source = open_source(str(log))
    source.start({"folder": after})
    while records := source.poll(0.0):
        for record in records:
            message = decode(record.payload)
            if run is None or message.run == run:
                yield message


class Follower:
    """Tables as dicts: key -> float32 row as bytes."""

    def __init__(self):
        self.tables = {}
        self.sequences = {}

    def follow(self, log, run=None, after="0"):
        """Apply the messages of a folder."""
        for message in messages(log, run, after):
            self.take("", message)
        return self

    def take(self, partition, message):
        """Apply a message of a partition, unless it was applied before."""
        publisher = partition, message.run, message.publisher
        if message.sequence > self.sequences.get(publisher, 0):
            self.sequences[publisher] = message.sequence
            self.apply(message)

    def apply(self, message):
        table = self.tables.setdefault(message.table, {})
        if message.kind == "delete":
            for key in message.keys.tolist():
                table.pop(key, None)
        else:
            assert message.kind == "upsert"
            for key, row in zip(message.keys.tolist(), message.rows, strict=True):
                table[key] = row.tobytes()


def rows_of(table):
    """The rows of a trainer's table, as a follower has them."""
    return {
        key: np.ascontiguousarray(row).tobytes()
        for keys, rows in table.served_rows()
        for key, row in zip(keys.tolist(), rows, strict=True)
    }


def rows_in(version):
    """The rows of each table of a version, as a follower has them."""
    tables = {}
    for path in sorted(version.glob("*/emb_vector")):
        dim = 2 * path.stat().st_size // (path.parent / "key").stat().st_size
        batches = list(open_sparse(path.parent, dim).batches(1000))
        tables[path.parent.name] = {
            key: np.ascontiguousarray(row).tobytes()
            for keys, rows in batches
            for key, row in zip(keys.tolist(), rows, strict=True)
        }
    return tables


__all__ = ["Follower", "decode_hps", "messages", "rows_in", "rows_of"]
