"""Write snapshots for tests, and read them byte by byte with code that shares nothing with the extension."""

import os
import struct
import zlib

import numpy as np

from kernels.snapshot import write_snapshot

PAGE = 4096
SOURCE = bytes(range(32))
# name: (offset, struct code)
HEADER = {
    "magic": (0, "8s"),
    "format": (8, "I"),
    "header_checksum": (12, "I"),
    "dim": (16, "I"),
    "row_type": (20, "I"),
    "key_bytes": (24, "I"),
    "index_checksum": (28, "I"),
    "content_checksum": (32, "I"),
    "unused": (36, "I"),
    "rows": (40, "Q"),
    "capacity_rows": (48, "Q"),
    "bucket_count": (56, "Q"),
    "source": (64, "32s"),
    "seed": (96, "Q"),
}
HEADER_BYTES = 104


def random_rows(n, dim, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.choice(2**40, size=n, replace=False) - 2**39
    return keys, rng.standard_normal((n, dim), dtype=np.float32)


def write(path, keys, rows, row_dtype="fp32", capacity_rows=None, batch_rows=100):
    """A snapshot of these rows, in batches."""
    keys = np.asarray(keys, dtype=np.int64)
    batches = [(keys[at : at + batch_rows], rows[at : at + batch_rows]) for at in range(0, keys.size, batch_rows)]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        return write_snapshot(descriptor, rows.shape[1], capacity_rows or keys.size, row_dtype, batches, SOURCE)
    finally:
        os.close(descriptor)


def header_of(data):
    return {name: struct.unpack_from(f"<{code}", data, at)[0] for name, (at, code) in HEADER.items()}


def set_field(data, name, value):
    at, code = HEADER[name]
    struct.pack_into(f"<{code}", data, at, value)


def whole_pages(size_bytes):
    return -(-size_bytes // PAGE) * PAGE


def sections(header, stride_bytes):
    """Offset of each section, and the file's size under "end"."""
    keys = PAGE + whole_pages(64 * header["bucket_count"])
    rows = keys + whole_pages(8 * header["capacity_rows"])
    checksums = rows + whole_pages((header["capacity_rows"] + 1) * stride_bytes)
    return {
        "index": PAGE,
        "keys": keys,
        "rows": rows,
        "checksums": checksums,
        "end": checksums + (checksums - PAGE) // PAGE * 4,
    }


def seal(data, stride_bytes):
    """Recompute every checksum of ``data``, a bytearray."""
    where = sections(header_of(data), stride_bytes)
    pages = range(PAGE, where["checksums"], PAGE)
    sums = struct.pack(f"<{len(pages)}I", *(zlib.crc32(data[at : at + PAGE]) for at in pages))
    data[where["checksums"] :] = sums
    of_index = (where["keys"] - PAGE) // PAGE * 4
    set_field(data, "index_checksum", zlib.crc32(sums[:of_index]))
    set_field(data, "content_checksum", zlib.crc32(sums[of_index:]))
    seal_header(data)


def seal_header(data):
    set_field(data, "header_checksum", 0)
    set_field(data, "header_checksum", zlib.crc32(data[:HEADER_BYTES]))


def splitmix64(word):
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def home(key, header):
    """The bucket where the search for a key begins (kernels/host/table/key_hash.hpp)."""
    seed = header["seed"]
    hash_ = key % 2**64
    hash_ ^= hash_ >> 32
    hash_ = hash_ * (splitmix64(seed) | 1) % 2**64
    hash_ ^= hash_ >> 29
    hash_ = hash_ * (splitmix64(seed ^ (2**64 - 1)) | 1) % 2**64
    return hash_ * header["bucket_count"] >> 64


def bucket_at(data, number):
    """One bucket's keys, rows and count of passing keys."""
    at = PAGE + 64 * number
    return struct.unpack_from("<5q", data, at), struct.unpack_from("<5I", data, at + 40), data[at + 60]


def find(data, key):
    """The row number of a key, or None if it is absent."""
    header = header_of(data)
    count = header["bucket_count"]
    number = home(key, header)
    for _ in range(count):
        keys, rows, passed = bucket_at(data, number)
        if key in keys:
            return rows[keys.index(key)]
        if not passed:
            return None
        number = (number + 1) % count
    return None
