"""Errors of the lowest layer, and the base of every error that Hotrow raises on purpose."""


class HotrowError(Exception):
    """Base of every error that Hotrow raises on purpose. Anything else that escapes is a bug.

    Attributes:
        model: the name of the model that the error is about; empty if no model was named (``serving.errors.about``).
    """

    model = ""


class DeviceUnavailableError(HotrowError):
    """The requested device cannot be used here: no CuPy, no driver, or no GPU with that index."""


class KernelError(HotrowError):
    """A kernel cannot be compiled, or cannot be launched with these arguments; nothing was launched."""


class DeviceFaultError(HotrowError):
    """A kernel that was launched earlier failed, and its output is undefined.

    It is raised when the host waits for the kernel's stream, or for a stream that waited for this stream. Work that was
    queued after the kernel has not run.
    """


class ReservedKeyError(HotrowError, ValueError):
    """A key is one of the four int64 values that mark empty and deleted slots.

    The two smallest and the two largest int64 values can never be embedding keys.
    """

    def __init__(self, key: int, position: int) -> None:
        """Name the first reserved key and its position among the keys of the call."""
        super().__init__(f"key {key} at position {position} is reserved: keys must lie between -2^63 + 2 and 2^63 - 3")
        self.key = key
        self.position = position

    def __reduce__(self) -> tuple[type["ReservedKeyError"], tuple[int, int]]:
        """Make the error picklable."""
        return type(self), (self.key, self.position)


class RowValueError(HotrowError, ValueError):
    """A row has a value that its row dtype cannot hold.

    The value would become infinite, such as 65,520 in fp16, or it is NaN or infinite in int8 or uint8 rows.
    """

    def __init__(self, row_dtype: str, value: float, position: int, column: int, key: int | None = None) -> None:
        """Name the first such value, its position among the rows of the call, and its key if it has one."""
        row = f"row {position}" if key is None else f"row {position}, of key {key}"
        super().__init__(f"{row}: column {column} is {value:.9g}, which {row_dtype} rows cannot hold")
        self.row_dtype = row_dtype
        self.value = value
        self.position = position
        self.column = column
        self.key = key

    def __reduce__(self) -> tuple[type["RowValueError"], tuple[str, float, int, int, int | None]]:
        """Make the error picklable."""
        return type(self), (self.row_dtype, self.value, self.position, self.column, self.key)


class TableFullError(HotrowError):
    """A host table has no room for the rows to be inserted; nothing of the call was written."""

    def __init__(self, capacity_rows: int, rows: int, new_rows: int) -> None:
        """Give the capacity, the rows held, and the number of new rows of the call."""
        super().__init__(
            f"table is full: it holds {rows} of {capacity_rows} rows, and the call adds {new_rows} new keys"
        )
        self.capacity_rows = capacity_rows
        self.rows = rows
        self.new_rows = new_rows

    def __reduce__(self) -> tuple[type["TableFullError"], tuple[int, int, int]]:
        """Make the error picklable."""
        return type(self), (self.capacity_rows, self.rows, self.new_rows)


class SnapshotError(HotrowError):
    """A snapshot cannot be read: no such file, no snapshot, damaged, cut short, or changed while it was open."""

    def __init__(self, file: str, reason: str) -> None:
        """Name the file and what is wrong with it."""
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[type["SnapshotError"], tuple[str, str]]:
        """Make the error picklable."""
        return type(self), (self.file, self.reason)


class SharedMemoryError(HotrowError):
    """A table in shared memory cannot be created, opened or used: no room, no such file, another form."""

    def __init__(self, file: str, reason: str) -> None:
        """Name the file and what is wrong with it."""
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[type["SharedMemoryError"], tuple[str, str]]:
        """Make the error picklable."""
        return type(self), (self.file, self.reason)
