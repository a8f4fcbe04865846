"""The capacity of a table in memory."""

HEADROOM_RATIO = 1 / 16
MOST_ROWS = 3_500_000_000  # what one host table can hold


def rows_with_headroom(rows: int) -> int:
    """Return the rows of a model plus headroom for updates, at most MOST_ROWS."""
    return min(rows + max(int(rows * HEADROOM_RATIO), 64), MOST_ROWS)
