"""Bytes of memory traffic of a lookup whose data is not in the L2 cache: its limit.

Memory is read in sectors of 32 bytes. Rows are written as float32, whatever form they are kept in.
"""

KEY_BYTES = 8
NUMBER_BYTES = 8  # a row number
MISS_BYTES = 8 + 4  # a key and its position
SECTOR_BYTES = 32


def row_bytes(layout):
    """Bytes read for a row: whole sectors, and half a sector more if the stride is not a multiple of a sector."""
    stride = layout.row_stride_bytes
    return stride if stride % SECTOR_BYTES == 0 else stride + SECTOR_BYTES // 2


def query_bytes(layout, hit_rate=1.0):
    """Per key of a query: the key, its line, its row in and out. A miss writes its listing and reads no row."""
    miss = (1.0 - hit_rate) * MISS_BYTES
    return KEY_BYTES + layout.line_bytes + hit_rate * row_bytes(layout) + 4 * layout.dim + miss


def gather_bytes(layout):
    """Per row of a gather with known slots."""
    return NUMBER_BYTES + row_bytes(layout) + 4 * layout.dim


def pool_bytes(layout, bag_keys, hit_rate=1.0):
    """Per key of a pooled lookup: as a query, with one row out for each bag. Offsets of bags are not counted."""
    return query_bytes(layout, hit_rate) - 4 * layout.dim * (1 - 1 / bag_keys)
