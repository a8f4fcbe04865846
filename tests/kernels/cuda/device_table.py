"""A table on a device whose kernels tests launch one by one, and a Python reader of its lines."""

from dataclasses import dataclass

import numpy as np

DIMS = (1, 3, 4, 16, 32, 100, 128)
DEFAULT_VALUE = np.float32(0.25)
COUNTERS = (
    "found",
    "missed",
    "rows",
    "inserted",
    "replaced",
    "first_misses",
    "capped",
    "in_use",
    "no_slot",
    "unfit",
    "updated",
    "erased",
    "absent",
    "absent_answers",
)


@dataclass(frozen=True)
class LineKind:
    """A form of line, as in line.cuh."""

    key: str
    keys: int
    dims: tuple[int, ...]  # that tests compile for it

    @property
    def word(self):
        return np.uint64 if self.key == "i64" else np.uint32

    @property
    def lanes(self):
        return (self.keys + 1) * self.word().itemsize // 16

    @property
    def empty(self):
        return self.word(2**63 - 1 if self.key == "i64" else 2**32 - 1)

    @property
    def locked(self):
        return self.empty - self.word(1)

    @property
    def defines(self):
        return {"HOTROW_KEY": self.key, "HOTROW_LINE_KEYS": self.keys}

    @property
    def forms(self):
        return " ".join(f"FORM({i}, fp32, {dim})" for i, dim in enumerate(self.dims))

    def word_of_slot(self, slot):
        """Lane `slot % lanes` reads 16 bytes; the slot is word `slot / lanes` of these."""
        return slot % self.lanes * (16 // self.word().itemsize) + slot // self.lanes


LINES = {
    "15 x i64": LineKind("i64", 15, DIMS),
    "7 x i64": LineKind("i64", 7, (3, 16)),
    "15 x u32": LineKind("u32", 15, (3, 16)),
}


class DeviceTable:
    """Lines, rows and counters in a device's memory. Every method waits for its own work."""

    def __init__(self, device, kind="15 x i64", dim=16, lines=8, chain_lines=1, seed=0):
        self.device, self.kind, self.dim, self.line_count = device, LINES[kind], dim, lines
        self.stream = device.stream()
        self.stride = -(-4 * dim // 16) * 16
        empty = np.full((lines, self.kind.keys + 1), self.kind.empty)
        empty[:, -1] = 0
        self.lines = self.array(empty)
        self.rows = device.empty((lines * self.kind.keys, self.stride), np.uint8)
        self.counters = device.zeros(len(COUNTERS), np.uint64)
        self.table = device.empty(64, np.uint8)
        self.calls = 0
        self.absent_lines = self.array(empty[:1])
        numbers = (np.uint32(n) for n in (lines, 1, self.kind.dims.index(dim), chain_lines, seed))
        arrays = (self.table, np.uint32(0), self.lines, self.rows, self.counters, self.absent_lines)
        self.launch("describe.cu", "describe", 1, (*arrays, *numbers, DEFAULT_VALUE), threads=1)

    def launch(self, file, name, blocks, arguments, threads=256):
        kernel = self.device.kernel(file, name, **self.kind.defines, HOTROW_FORMS=self.kind.forms)
        kernel((blocks,), (threads,), arguments, self.stream)

    def launch_tiles(self, file, name, tiles, arguments):
        self.launch(file, name, -(-tiles * self.kind.lanes // 256), arguments)

    def array(self, values):
        """A copy on the device, for work that is queued from now on."""
        with self.device.using(self.stream):
            return self.device.xp.asarray(values)

    def to_host(self, array):
        with self.device.using(self.stream):
            return self.device.to_host(array)

    def query(self, keys, guard=4):
        """Rows and the missed positions, ascending; checks that the kernel writes nothing beyond them."""
        keys = np.array(keys, dtype=np.int64)
        n = len(keys)
        rows = self.array(np.full((n + guard, self.dim), np.float32(7)))
        missing_keys, positions = self.array(np.full(n + guard, 7)), self.array(np.full(n + guard, 7, np.int32))
        progress, count = self.device.zeros(1, np.uint64), self.device.pinned(1, np.int32)
        arguments = (rows, missing_keys, positions, progress, self.device.device_view(count))
        given = (self.table, self.array(keys), np.uint32(n))
        self.launch_tiles("query.cu", "query", -(-n // 4), (*given, *arguments))
        self.stream.synchronize()
        m = int(count[0])
        rows, missing_keys, positions = self.to_host(rows), self.to_host(missing_keys), self.to_host(positions)
        for array, used in ((rows, n), (missing_keys, m), (positions, m)):
            assert (array[used:] == 7).all()
        assert not self.to_host(progress).any()
        np.testing.assert_array_equal(missing_keys[:m], keys[positions[:m]])
        return rows[:n], np.sort(positions[:m])

    def claim(self, keys, misses=None, salt=None, limit=1 << 32, kernel="claim"):
        """The row number of each key's locked slot, or -1."""
        n = len(keys)
        self.calls += 1
        device_keys = self.array(np.array(keys, dtype=np.int64))
        numbers = self.array(np.full(n, -7))
        arguments = (self.table, device_keys, np.uint32(n), numbers)
        if kernel == "claim":
            counts = device_keys if misses is None else self.array(np.array(misses, dtype=np.uint32))
            drawn = np.uint64(self.calls * 0x9E3779B97F4A7C15 % 2**64 if salt is None else salt)
            arguments = (*arguments, counts, np.uint32(misses is not None), drawn, np.uint64(limit))
        self.launch_tiles("claim.cu", kernel, n, arguments)
        return self.to_host(numbers)

    def fill(self, keys, rows, numbers):
        n = len(keys)
        arrays = (np.array(keys, dtype=np.int64), np.array(numbers, dtype=np.int64), np.array(rows, dtype=np.float32))
        device_keys, device_numbers, device_rows = (self.array(array) for array in arrays)
        arguments = (self.table, device_keys, np.uint32(n), device_numbers, device_rows)
        self.launch_tiles("fill.cu", "fill", n, arguments)
        self.stream.synchronize()

    def insert(self, keys, rows=None, **options):
        numbers = self.claim(keys, **options)
        self.fill(keys, rows_of(keys, self.dim) if rows is None else rows, numbers)
        return numbers

    def erase(self, keys):
        arguments = (self.table, self.array(np.array(keys, dtype=np.int64)), np.uint32(len(keys)))
        self.launch_tiles("erase.cu", "erase", len(keys), arguments)
        self.stream.synchronize()

    def words(self):
        """Slots [line_count, keys] in slot order, and the meta words [line_count]."""
        lines = self.to_host(self.lines)
        order = [self.kind.word_of_slot(slot) for slot in range(self.kind.keys)]
        return lines[:, order], lines[:, -1]

    def held(self):
        """The held keys, ascending; checks that no slot is locked."""
        words, _ = self.words()
        assert not (words == self.kind.locked).any()
        return np.sort(words[words != self.kind.empty].astype(np.int64))

    def counted(self):
        return dict(zip(COUNTERS, self.to_host(self.counters).tolist(), strict=True))


def rows_of(keys, dim):
    """A row for each key; every value identifies the key and the column."""
    return np.asarray(keys, dtype=np.int64)[:, None].astype(np.float32) * np.float32(0.5) + np.arange(
        dim, dtype=np.float32
    )


def mix(x):
    """MurmurHash3's 64-bit finalizer."""
    x = ((x ^ x >> 33) * 0xFF51AFD7ED558CCD) % 2**64
    x = ((x ^ x >> 33) * 0xC4CEB9FE1A85EC53) % 2**64
    return x ^ x >> 33


def home_line(key, line_count):
    """The only line of a key if the seed is 0."""
    return (mix(key % 2**64) >> 32) * line_count >> 32
