"""The host table against the limits of memory and its usual peers; one thread, except for big lookups.

    python -m benchmarks.host_table [--quick] [--json FILE]

- lookup: against a C loop that copies rows whose numbers are known, with prefetch (benchmarks/host_gather.c)
- call: 26 keys from Python, against numpy.take with known row numbers
- pooled: against torch.nn.functional.embedding_bag with known row numbers
- row_dtype: lookups of narrow rows, one by one and in bags of 20, against the same table of float32 rows
- shared: the same lookups in a table of memory that processes share, against the process's own
- over_cores: one lookup of 26,624 and of 212,992 keys on all cores, against the same lookup on one
- wake_up: the time until a second core works on a lookup (benchmarks/core_pool_wake_up.cpp), after a long pause and
  soon after another lookup, against a condition variable
- beside_writer: a reader's rate and p99 while another thread replaces rows at full rate, against the same reader alone
"""

import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.gather import aligned, compile_gather, gather
from benchmarks.report import Record, parse_arguments, publish
from kernels.host import HostTable, lookup_threads, set_lookup_threads
from kernels.shared import SharedTable
from kernels.system_memory import huge_page_advice

BATCH_KEYS = 26 * 1024
LOAD_ROWS = 1 << 18


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rows: dict  # by dim
    batches: int
    rounds: int
    calls: int


FULL = Scale(rows={32: 10_000_000, 128: 4_000_000}, batches=48, rounds=15, calls=20_000)
QUICK = Scale(rows={32: 20_000, 128: 10_000}, batches=1, rounds=1, calls=50)


def row_values(keys, dim, version):
    """Rows whose even columns follow from the key and whose odd columns hold the version."""
    values = np.empty((keys.size, dim), dtype=np.float32)
    values[:, 0::2] = (keys % (1 << 22))[:, None]
    values[:, 1::2] = version
    return values


class Subject:
    """A filled table, the same rows in an array, and batches of keys with their row numbers."""

    def __init__(self, dim, scale):
        self.dim, self.rows = dim, scale.rows[dim]
        self.rng = np.random.default_rng(dim)
        self.keys = self.rng.permutation(self.rows).astype(np.int64) * 1_000_003 + 12_345
        self.table = HostTable(dim, self.rows)
        self.direct = aligned(self.rows, dim)
        for start in range(0, self.rows, LOAD_ROWS):
            block = slice(start, min(start + LOAD_ROWS, self.rows))
            self.direct[block] = row_values(self.keys[block], dim, 0)
            self.table.insert(self.keys[block], self.direct[block])
        self.out = aligned(BATCH_KEYS, dim)

    def batches(self, distribution, count):
        """``count`` pairs (keys, row numbers)."""
        numbers = [self._draw(distribution) for _ in range(count)]
        return [(self.keys[batch], batch) for batch in numbers]

    def _draw(self, distribution):
        if distribution == "uniform":
            return self.rng.integers(0, self.rows, BATCH_KEYS)
        # Zipf, exponent 1.05, by the inverse of its continuous form; keys were shuffled, so rank is row number.
        exponent = 1.05
        top = self.rows ** (1 - exponent)
        ranks = (1 + self.rng.random(BATCH_KEYS) * (top - 1)) ** (1 / (1 - exponent))
        return (ranks.astype(np.int64) - 1) * 7919 % self.rows


def seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def take_turns(ours, peer, rounds, work):
    """Pairs of work per second, one per round, after a warm-up round."""
    pairs = [(work / seconds(ours), work / seconds(peer)) for _ in range(rounds + 1)]
    return pairs[1:]


def lookup(subject, scale, library):
    """Records of table lookup against the gather loops."""
    for distribution in ("uniform", "zipf"):
        batches = subject.batches(distribution, scale.batches)
        for keys, numbers in batches:
            assert subject.table.fetch(keys, subject.out).all()
            assert np.array_equal(subject.out, subject.direct[numbers])

        def ours(batches=batches):
            for keys, _ in batches:
                subject.table.fetch(keys, subject.out)

        for level in ("l1", "l2"):

            def peer(batches=batches, level=level):
                for _, numbers in batches:
                    gather(library, level, subject.direct, numbers, subject.out)

            peer()
            assert np.array_equal(subject.out, subject.direct[batches[-1][1]])
            pairs = take_turns(ours, peer, scale.rounds, scale.batches * BATCH_KEYS / 1e6)
            params = {"rows": subject.rows, "dim": subject.dim, "keys": distribution, "limit": f"gather_{level}"}
            yield Record.of("host_table.lookup", params, "Mrow/s", pairs)


def call(subject, scale):
    """Record of one call of 26 keys from Python against numpy.take, in microseconds."""
    keys, numbers = (array[:26].copy() for array in subject.batches("uniform", 1)[0])
    out = subject.out[:26]

    def ours():
        for _ in range(scale.calls):
            subject.table.fetch(keys, out)

    def peer():
        for _ in range(scale.calls):
            np.take(subject.direct, numbers, axis=0, out=out, mode="clip")

    pairs = [(seconds(ours) / scale.calls * 1e6, seconds(peer) / scale.calls * 1e6) for _ in range(scale.rounds)]
    yield Record.of("host_table.call", {"keys": 26, "dim": subject.dim, "less": "is better"}, "us", pairs)


def pooled(subject, scale):
    """Records of pooled lookup against embedding_bag on known row numbers."""
    weights = torch.from_numpy(subject.direct)
    for hotness, (fewest, most) in {"1-4": (1, 4), "20": (20, 20)}.items():
        sizes = subject.rng.integers(fewest, most + 1, BATCH_KEYS)
        row_ptrs = np.concatenate([[0], np.cumsum(sizes)])
        row_ptrs = row_ptrs[row_ptrs <= BATCH_KEYS]
        count, bags = int(row_ptrs[-1]), row_ptrs.size - 1
        batches = [
            (k[:count].copy(), torch.from_numpy(n[:count])) for k, n in subject.batches("uniform", scale.batches)
        ]
        offsets, out = torch.from_numpy(row_ptrs[:-1].copy()), subject.out[:bags]

        def ours(batches=batches, row_ptrs=row_ptrs, out=out):
            for keys, _ in batches:
                subject.table.fetch_pooled(keys, row_ptrs, out, "sum")

        def peer(batches=batches, offsets=offsets):
            answer = None
            with torch.inference_mode():
                for _, numbers in batches:
                    answer = torch.nn.functional.embedding_bag(numbers, weights, offsets, mode="sum")
            return answer

        ours()
        # Sums of up to twenty float32 values in another order.
        assert np.allclose(out, peer().numpy(), rtol=1e-5)
        pairs = take_turns(ours, peer, scale.rounds, scale.batches * count / 1e6)
        yield Record.of("host_table.pooled", {"dim": subject.dim, "hotness": hotness, "peer": "torch"}, "Mrow/s", pairs)


def row_dtypes(subject, scale):
    """Records of lookups by row type against the float32 table; their memory against the float32 table's."""
    row_ptrs = np.arange(0, BATCH_KEYS + 1, 20)
    count, bags = int(row_ptrs[-1]), row_ptrs.size - 1
    batches = [keys[:count].copy() for keys, _ in subject.batches("uniform", scale.batches)]
    calls = {
        "fetch": lambda table, keys: table.fetch(keys, subject.out[:count]),
        "pooled": lambda table, keys: table.fetch_pooled(keys, row_ptrs, subject.out[:bags], "sum"),
    }

    def run(call, table):
        for keys in batches:
            call(table, keys)

    for row_dtype in ("fp16", "bf16", "int8", "uint8"):
        table = HostTable(subject.dim, subject.rows, row_dtype)
        for start in range(0, subject.rows, LOAD_ROWS):
            block = slice(start, start + LOAD_ROWS)
            table.insert(subject.keys[block], subject.direct[block] % 127)  # values that every type holds
        params = {"dim": subject.dim, "row_dtype": row_dtype, "peer": "fp32"}
        for measure, call in calls.items():
            ours, peer = partial(run, call, table), partial(run, call, subject.table)
            pairs = take_turns(ours, peer, scale.rounds, scale.batches * count / 1e6)
            yield Record.of("host_table.row_dtype", {**params, "measure": measure}, "Mrow/s", pairs)
        sizes = (table.stats().memory_bytes / 2**20, subject.table.stats().memory_bytes / 2**20)
        yield Record.of("host_table.row_dtype_memory", {**params, "less": "is better"}, "MiB", [sizes])


def shared(subject, scale):
    """Records of lookups in shared memory, which may have no huge pages."""
    batches = subject.batches("uniform", scale.batches)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        table = SharedTable.create(Path(folder) / "table", subject.dim, subject.rows)
        for start in range(0, subject.rows, LOAD_ROWS):
            block = slice(start, start + LOAD_ROWS)
            table.insert(subject.keys[block], subject.direct[block])

        def run(table):
            for keys, _ in batches:
                table.fetch(keys, subject.out)

        pairs = take_turns(
            partial(run, table), partial(run, subject.table), scale.rounds, len(batches) * BATCH_KEYS / 1e6
        )
    is_huge = not huge_page_advice(Path("/dev/shm"))
    params = {"rows": subject.rows, "dim": subject.dim, "keys": "uniform", "peer": "own memory", "huge_pages": is_huge}
    yield Record.of("host_table.shared", params, "Mrow/s", pairs)


def over_cores(subject, scale, threads):
    """Records of one big lookup on ``threads`` threads against one thread."""
    for count in (BATCH_KEYS, 8 * BATCH_KEYS):
        batches = [subject.keys[subject.rng.integers(0, subject.rows, count)] for _ in range(scale.batches // 4 or 1)]
        row_ptrs = np.append(np.arange(0, count, 20), count)
        out = aligned(count, subject.dim)
        calls = {
            "fetch": lambda keys, out=out: subject.table.fetch(keys, out),
            "pooled": lambda keys, out=out, ptrs=row_ptrs: subject.table.fetch_pooled(
                keys, ptrs, out[: ptrs.size - 1], "sum"
            ),
        }
        for measure, call in calls.items():

            def run(most_threads, call=call, batches=batches):
                set_lookup_threads(most_threads)
                call(batches[0])  # starts the threads
                return sum(seconds(partial(call, keys)) for keys in batches)

            work = len(batches) * count / 1e6
            pairs = [(work / run(threads), work / run(1)) for _ in range(scale.rounds)]
            params = {"dim": subject.dim, "keys": count, "measure": measure, "threads": threads, "peer": "1 thread"}
            yield Record.of("host_table.over_cores", params, "Mrow/s", pairs)


def wake_up(scale):
    """Records of the time until a second thread works, in microseconds."""
    folder = Path(tempfile.mkdtemp(prefix="core_pool_wake_up"))
    source, host = Path(__file__).with_name("core_pool_wake_up.cpp"), Path(__file__).parents[1] / "kernels" / "host"
    command = ["c++", "-std=c++17", "-O2", "-pthread", f"-I{host}", source, host / "lookup" / "core_pool.cpp"]
    subprocess.run([*command, "-o", folder / "wake_up"], check=True)
    pairs = {}
    for _ in range(scale.rounds):
        ran = subprocess.run([folder / "wake_up", "500"], capture_output=True, text=True)
        if ran.returncode == 3:  # there is no second core
            return
        ran.check_returncode()
        for line in ran.stdout.splitlines():
            pause_us, pool, variable = line.split()
            pairs.setdefault(int(pause_us), []).append((float(pool), float(variable)))
    for pause_us, both in pairs.items():
        params = {"pause_us": pause_us, "peer": "condition_variable", "less": "is better"}
        yield Record.of("host_table.wake_up", params, "us", both)


class Writer:
    """A thread that replaces random rows of the table at full rate inside a ``with`` block."""

    def __init__(self, subject):
        keys = [subject.keys[subject.rng.integers(0, subject.rows, 4096)] for _ in range(16)]
        self._writes = [(k, row_values(k, subject.dim, version)) for version, k in enumerate(keys, 1)]
        self._table = subject.table
        self._running = threading.Event()
        self.rows = 0

    def __enter__(self):
        self._running.set()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._running.clear()
        self._thread.join()

    def _write(self):
        while self._running.is_set():
            for keys, rows in self._writes:
                self._table.insert(keys, rows)
                self.rows += keys.size


def beside_writer(subject, scale):
    """Records of a reader's rate and p99 during writes against the same reader alone; checks for torn rows."""
    batches, writer = subject.batches("uniform", scale.batches), Writer(subject)
    with writer:
        for keys, _ in batches:
            assert subject.table.fetch(keys, subject.out).all()
            assert (subject.out[:, 0::2] == (keys % (1 << 22))[:, None]).all(), "a row of another key"
            assert (subject.out[:, 1::2] == subject.out[:, 1:2]).all(), "a torn row"

    def read():
        return np.array([seconds(lambda k=k: subject.table.fetch(k, subject.out)) for k, _ in batches * 4])

    rates, tails = [], []
    for _ in range(scale.rounds):
        alone = read()
        with writer:
            busy = read()
        rates.append((BATCH_KEYS / busy.mean() / 1e6, BATCH_KEYS / alone.mean() / 1e6))
        tails.append((np.percentile(busy, 99) * 1e3, np.percentile(alone, 99) * 1e3))
    params = {"dim": subject.dim, "peer": "reader alone"}
    yield Record.of("host_table.beside_writer", params, "Mrow/s", rates)
    yield Record.of("host_table.beside_writer_p99", {**params, "less": "is better"}, "ms", tails)


def main():
    arguments = parse_arguments(__doc__)
    scale = QUICK if arguments.quick else FULL
    torch.set_num_threads(1)
    library, records = compile_gather(), []
    threads = lookup_threads()
    set_lookup_threads(1)
    for dim in scale.rows:
        subject = Subject(dim, scale)
        records += [*lookup(subject, scale, library), *call(subject, scale), *pooled(subject, scale)]
        records += row_dtypes(subject, scale)
        if Path("/dev/shm").is_dir():
            records += shared(subject, scale)
        records += over_cores(subject, scale, threads)
        set_lookup_threads(1)
        if dim == 32:
            records += beside_writer(subject, scale)
        del subject
    records += wake_up(scale)
    publish(records, arguments.json)


if __name__ == "__main__":
    main()
