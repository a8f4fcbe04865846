"""Bytes of memory that a lookup cannot do without where the L2 cache holds nothing of it: its limit.

Memory is read in sectors of 32 bytes. Rows are written as float32, whatever form they are kept in.
"""

KEY_BYTES = 8
NUMBER_BYTES = 8  # of a row, where it is known
MISS_BYTES = 8 + 4  # a key and its position
SECTOR_BYTES = 32


def row_bytes(layout):
    """Bytes read of a row: whole sectors. Where the stride is no whole number of them, half a sector more."""
    stride = layout.row_stride_bytes
    return stride if stride % SECTOR_BYTES == 0 else stride + SECTOR_BYTES // 2


def query_bytes(layout, hit_rate=1.0):
    """Per key of a query: the key, its line, its row in and out; of a miss, its listing in place of the row in."""
    miss = (1.0 - hit_rate) * MISS_BYTES
    return KEY_BYTES + layout.line_bytes + hit_rate * row_bytes(layout) + 4 * layout.dim + miss


def gather_bytes(layout):
    """Per row of a gather with known slots."""
    return NUMBER_BYTES + row_bytes(layout) + 4 * layout.dim


def pool_bytes(layout, bag_keys, hit_rate=1.0):
    """Per key of a pooled lookup: as a query, but one row out for each bag. Offsets of bags are left out."""
    return query_bytes(layout, hit_rate) - 4 * layout.dim * (1 - 1 / bag_keys)
