"""Errors of the embedding cache."""

from kernels.errors import HotrowError


class CacheFullError(HotrowError):
    """A static cache has no slot for some keys of a call; the other keys were written."""

    def __init__(self, left_out_rows: int, rows: int, capacity_rows: int) -> None:
        """Name the keys left out, the rows held, and the capacity."""
        super().__init__(
            f"{left_out_rows} keys had no slot: the cache holds {rows} rows and was made for {capacity_rows}"
        )
        self.left_out_rows = left_out_rows
        self.rows = rows
        self.capacity_rows = capacity_rows

    def __reduce__(self) -> tuple[type["CacheFullError"], tuple[int, int, int]]:
        """Make the error picklable."""
        return type(self), (self.left_out_rows, self.rows, self.capacity_rows)


class CacheClosedError(HotrowError):
    """The cache was closed, and its memory freed."""
