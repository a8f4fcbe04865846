"""Which process holds which rows of a variable."""

import re
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from training.processes import Processes

_LOCALIZED = re.compile(r"localized:(\d+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a variable's rows.

    Attributes:
        processes: that train together.
        owner: the process that has all rows; None: process ``key % processes`` has the row of a key.
    """

    processes: Processes
    owner: int | None

    @classmethod
    def read(cls, call: str, mode: str | None, processes: Processes) -> Self:
        """Read SOK's ``mode``: "distributed", the default, or "localized:#".

        Raises:
            ValueError: it is neither, or there is no such process.
        """
        if mode is None or mode == "distributed":
            return cls(processes, None)
        found = _LOCALIZED.fullmatch(mode) if isinstance(mode, str) else None
        if not found or int(found[1]) >= processes.size:
            expected = f"the mode 'distributed' or 'localized:#' with # below {processes.size}, the number of processes"
            raise ValueError(f"{call}: expected {expected}, got {mode!r}")
        return cls(processes, int(found[1]))

    def keys(self, rows: int) -> range:
        """Return which of the keys 0 to ``rows`` - 1 have their row in this process."""
        if self.owner is None:
            return range(self.processes.rank, rows, self.processes.size)
        return range(rows if self.owner == self.processes.rank else 0)

    def owns(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which keys int64[N] have their row in this process, bool[N]."""
        owners = keys % self.processes.size if self.owner is None else np.full(len(keys), self.owner)
        return np.equal(owners, self.processes.rank)
