"""The capacity of a table in memory."""

HEADROOM_RATIO = 1 / 16
MOST_ROWS = 3_500_000_000  # what one host table can hold


def rows_with_headroom(rows: int, ratio: float = HEADROOM_RATIO) -> int:
    """Return the rows of a model plus headroom for new keys, at most MOST_ROWS.

    Args:
        rows: of the model.
        ratio: the headroom as a share of the rows; it is at least 64 rows.
    """
    return min(rows + max(int(rows * ratio), 64), MOST_ROWS)
