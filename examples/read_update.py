"""Read a message of docs/updates.md without Hotrow.

Run: python examples/read_update.py FILE
"""

import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np


def read(payload):
    """Return a message's header, keys and rows."""
    magic, number, zero, header_bytes, checksum = struct.unpack_from("<4sHHII", payload)
    if (magic, number, zero) != (b"HRUP", 1, 0) or zlib.crc32(payload[16:]) != checksum:
        raise ValueError("not a message, or damaged")
    header = json.loads(payload[16 : 16 + header_bytes])
    count, dim, dtype = header["keys"], header.get("dim", 0), header.get("dtype")
    at = 16 + header_bytes + 8 * count
    keys = np.frombuffer(payload, "<i8", count, 16 + header_bytes)
    if dtype is None:
        return header, keys, None
    if dtype == "int8":
        scales = np.frombuffer(payload, "<f4", count, at)[:, None]
        return header, keys, scales * np.frombuffer(payload, "i1", count * dim, at + 4 * count).reshape(count, dim)
    rows = np.frombuffer(payload, {"float32": "<f4", "float16": "<f2"}[dtype], count * dim, at)
    return header, keys, rows.reshape(count, dim)


if __name__ == "__main__":
    print(*read(Path(sys.argv[1]).read_bytes()), sep="\n")
