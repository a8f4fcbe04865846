"""The cost of a table's size: lookup time, start-up time and memory; and a table four times the RAM tier.

- ``scale.lookup``: ns per key of 26,624 uniform keys on one thread, against the smallest table of that dim. Target:
  ratio <= 1.5 for every number of rows.
- ``scale.gather``: the same for a C loop that copies rows with known numbers and the table's prefetch distance
  (benchmarks/host_gather.c). It shows the cost of memory itself. All four sides take turns.
- ``scale.slope``: the first ratio against the second, round by round: the cost that the table adds.
- ``scale.huge_pages``: the share of the table's anonymous memory in huge pages.
- ``scale.start``: from a HugeCTR folder to a table that answers, against reading its two files once.
- ``scale.memory``: anonymous memory per row of a loaded table, against `hotrow plan`'s figure.
- ``scale.beyond_ram``: a table with four times the rows of the RAM tier, the others in RocksDB. ns per key with
  some keys in RAM, against all keys in RAM; and the process's anonymous memory against the RAM tier's figure.

A case that needs more memory or disk than there is gets skipped, with a message.
"""

import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.gather import aligned, compile_gather, gather
from benchmarks.one_table import table_model, tiers_file, write_table
from benchmarks.report import Record, parse_arguments, publish
from kernels.host import HostTable, set_lookup_threads
from serving.model.capacity import rows_with_headroom
from serving.parameter_server import ParameterServer
from serving.planner import table_sizes

BATCH_KEYS = 26_624
CALLS = 4  # per side and turn
MEMORY_RESERVE_BYTES = 2**30
MOST_FILE_BYTES = 7 * 2**30  # more takes minutes to write
HIT_RATES = (0.99, 0.9, 0.5, 0.0)


def main():
    arguments = parse_arguments(__doc__, folder={"help": "where tables are written, some 16 GB (default: TMPDIR)"})
    quick = arguments.quick
    sizes = (20_000, 60_000) if quick else (1_000_000, 10_000_000, 30_000_000)
    rounds = 3 if quick else 11
    records = []
    set_lookup_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for dim in (16,) if quick else (16, 32, 128):
            records += growing(Path(folder), dim, sizes, rounds)
        capacity_rows = 20_000 if quick else 1_000_000
        records += beyond_ram(Path(folder), capacity_rows, 32, rounds)
    publish(records, arguments.json)


class Size:
    """One table in RAM, and as many rows in an array."""

    def __init__(self, server, rows, dim, library):
        self.server, self.rows, self.library = server, rows, library
        self.array = aligned(rows, dim)
        self.array.fill(1.0)

    def look_up(self, keys, out):
        return self.server.stores[0].tables["m.t"].fetch(keys, out)

    def gather(self, numbers, out):
        gather(self.library, "l2", self.array, numbers, out)
        return True

    def sides(self, rounds):
        """Both sides as pairs (call, batches)."""
        numbers = numbers_at_random(self.rows, rounds)
        return [(self.look_up, keys_of_numbers(numbers)), (self.gather, numbers)]


def growing(folder, dim, sizes, rounds):
    """One dim's tables, each against the smallest."""
    records = []
    library = compile_gather()
    smallest = None
    for rows in sizes:
        reason = why_not(folder, dim, rows)
        if reason:
            print(f"skipped: {rows:,} rows of dim {dim}: {reason}")
            continue
        case = {"rows": rows, "dim": dim}
        server, more = started(folder, dim, rows, case)
        size = Size(server, rows, dim, library)
        smallest = smallest or size
        took = take_turns([*size.sides(rounds), *smallest.sides(rounds)], dim)
        records += [*more, *slopes(took, case)]
        if size is not smallest:
            server.close()
    if smallest is not None:
        smallest.server.close()
    return records


def slopes(took, case):
    """Records from tuples (lookup, gather, the smallest table's lookup, the smallest table's gather) in ns per key."""
    lookups, gathers, of_both = [], [], []
    for lookup, gathered, least_lookup, least_gathered in took:
        lookups.append((lookup, least_lookup))
        gathers.append((gathered, least_gathered))
        of_both.append((lookup / least_lookup, gathered / least_gathered))
    return [
        Record.of("scale.lookup", case, "ns/key", lookups),
        Record.of("scale.gather", case, "ns/key", gathers),
        Record.of("scale.slope", case, "times", of_both),
    ]


def started(folder, dim, rows, case):
    """A server of one such table in RAM, and the records of its start."""
    with written(folder, dim, rows) as config:
        read_s = seconds(lambda: read_once(config.tables[0].file))
        server = ParameterServer.from_config(tiers_file(folder))
        before, huge_before = anonymous_bytes(), huge_page_bytes()
        start_s = seconds(lambda: server.load_model(config))
        took_bytes, huge_bytes = anonymous_bytes() - before, huge_page_bytes() - huge_before
        (planned,) = table_sizes([config])
    check(server, rows, dim)
    return server, [
        Record.of("scale.start", case, "s", [(start_s, read_s)]),
        Record.of("scale.memory", case, "B/row", [(took_bytes / rows, planned.ram_bytes / rows)]),
        Record.of("scale.huge_pages", case, "MiB", [(huge_bytes / 2**20, took_bytes / 2**20)]),
    ]


def beyond_ram(folder, capacity_rows, dim, rounds):
    """A table four times the RAM tier; the other rows are in RocksDB."""
    rows = 4 * capacity_rows
    case = {"rows": rows, "dim": dim, "ram_rows": capacity_rows}
    tiers = {
        "volatile_db": {"type": "hash_map", "capacity_rows": capacity_rows},
        "persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 2},
    }
    before = anonymous_bytes()
    server = ParameterServer.from_config(tiers_file(folder, **tiers))
    with written(folder, dim, rows) as config:
        start_s = seconds(lambda: server.load_model(config))
        read_s = seconds(lambda: read_once(config.tables[0].file))
    check(server, rows, dim)
    records = [Record.of("scale.beyond_ram.start", case, "s", [(start_s, read_s)])]

    def fetch(keys, out):
        out[...], found = server.lookup("m.t", keys)
        return found

    for hit_rate in HIT_RATES:
        in_ram = keys_of_numbers(numbers_at_random(capacity_rows, rounds))
        hits = round(hit_rate * BATCH_KEYS)
        misses = keys_of_numbers(numbers_at_random(rows - capacity_rows, rounds, capacity_rows))
        mixed = np.concatenate([in_ram[:, :, :hits], misses[:, :, hits:]], axis=2)
        pairs = take_turns([(fetch, mixed), (fetch, in_ram)], dim)
        records.append(Record.of("scale.beyond_ram.lookup", case | {"hit_rate": hit_rate}, "ns/key", pairs))
    ours = (anonymous_bytes() - before) / 2**20
    of_tier = HostTable.memory_bytes(dim, capacity_rows) / 2**20
    records.append(Record.of("scale.beyond_ram.memory", case, "MiB", [(ours, of_tier)]))
    server.close()
    return records


def keys_of(begin, end):
    """The distinct, unordered keys of a file's rows."""
    return keys_of_numbers(np.arange(begin, end, dtype=np.int64))


def keys_of_numbers(numbers):
    """The keys of the rows with these numbers."""
    return numbers * 0x9E3779B1 % 2**40


def vectors_of(keys, dim):
    """Rows that follow from the key."""
    return (keys[:, None] % 4096 * 0.5 + np.arange(dim)).astype(np.float32)


def numbers_at_random(rows, rounds, begin=0):
    """Batches of the numbers of rows from ``begin`` on, uniformly drawn: int64[rounds, CALLS, BATCH_KEYS]."""
    rng = np.random.default_rng(rows)
    return rng.integers(begin, begin + rows, (rounds, CALLS, BATCH_KEYS))


@contextmanager
def written(folder, dim, rows):
    """A model whose table has ``rows`` rows; its files exist inside the ``with`` block."""
    path = folder / "t"
    write_table(path, keys_of(0, rows), lambda keys: vectors_of(keys, dim))
    model = table_model(path, dim)
    model.dense_file.touch()
    yield model
    shutil.rmtree(path)


def why_not(folder, dim, rows):
    """The reason to skip a case; empty if it can run."""
    needed = HostTable.memory_bytes(dim, rows_with_headroom(rows)) + rows * dim * 4  # and the array for the gather
    available = available_bytes()
    if needed + MEMORY_RESERVE_BYTES > available:
        return f"takes {needed / 2**30:.1f} GiB of RAM, {available / 2**30:.1f} are available"
    files, free = rows * (8 + 4 * dim), shutil.disk_usage(folder).free
    if files > min(MOST_FILE_BYTES, free):
        return f"takes {files / 2**30:.1f} GiB of files, {free / 2**30:.1f} are free, and the limit is 7"
    return ""


def check(server, rows, dim):
    """The answers must be right, absent keys included."""
    keys = np.append(keys_of(rows - min(rows, 1000), rows), 2**41)
    answer, found = server.lookup("m.t", keys)
    if not found[:-1].all() or found[-1] or not (answer[:-1] == vectors_of(keys[:-1], dim)).all():
        raise SystemExit("the answer is wrong")


def take_turns(sides, dim):
    """Tuples of ns per key of the sides (call, batches), one per round.

    Another side goes first each round, and the first round is a warm-up.
    """
    out = np.empty((BATCH_KEYS, dim), dtype=np.float32)
    rounds = []
    for number in range(len(sides[0][1])):
        took = [0.0] * len(sides)
        for turn in range(len(sides)):
            which = (number + turn) % len(sides)
            call, batches = sides[which]
            begin = time.perf_counter()
            found = [call(batch, out) for batch in batches[number]]
            took[which] = (time.perf_counter() - begin) / (CALLS * BATCH_KEYS) * 1e9
            if not np.all(found):
                raise SystemExit("a key that was loaded is not there")
        rounds.append(tuple(took))
    return rounds[1:]


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def read_once(path):
    """Read both files of a folder."""
    buffer = bytearray(2**24)
    for name in ("key", "emb_vector"):
        with (path / name).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def anonymous_bytes():
    """Anonymous memory of this process."""
    return field_bytes("/proc/self/status", "RssAnon")


def huge_page_bytes():
    """Anonymous memory of this process in huge pages."""
    return field_bytes("/proc/self/smaps_rollup", "AnonHugePages")


def available_bytes():
    """Available memory of the system."""
    return field_bytes("/proc/meminfo", "MemAvailable")


def field_bytes(file, name):
    line = next(line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
