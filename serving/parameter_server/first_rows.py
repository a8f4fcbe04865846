"""Which rows of a table a cache gets first, if it does not have room for all of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from os.path import isdir  # False without the right to look; Path.is_dir raises
from pathlib import Path

import numpy as np

from kernels.errors import ReservedKeyError
from kernels.host import KeyIndex
from serving.errors import ConfigError
from serving.model.names import without_version
from serving.model.numpy_faults import UNREADABLE, unreadable
from serving.model.regular_file import open_regular
from serving.model.sparse_model import SparseModel
from serving.storage.store import Keys, Mask

KEY_BATCH_ROWS = 65536


@dataclass(frozen=True, slots=True)
class FirstRows:
    """How a tier that may hold a part of a table is filled.

    Attributes:
        cache_rate: the share of each table's rows that the tier gets, if there is room: 0 to 1. HPS calls it
            ``initial_cache_rate``.
        hot_keys: a folder with a file ``<model>.<table>.npy`` for some tables: int64[K], hottest first. The tier gets
            these rows first, in this order. All other rows follow in the order of the model file.
    """

    cache_rate: float = 1.0
    hot_keys: Path | None = None

    def check(self, tables: Iterable[str]) -> None:
        """Check that the hot keys of ``tables`` (full names) can be read; without tables, check the folder only.

        Raises:
            ConfigError: see ``choose``.
        """
        self._check_folder()
        for table in tables:
            self.hottest(table)

    def choose(self, table: str, model: SparseModel, room: int | None) -> "RowChoice":
        """Start to choose rows of ``model`` for a tier.

        Args:
            table: full name.
            model: the table's rows; their keys are checked.
            room: how many rows the tier can take; None: all.

        Raises:
            ConfigError: the folder or the table's file cannot be read, or the file is no list of keys.
        """
        rows = self.most_rows(model.rows, room)
        hottest = self.hottest(table)
        return RowChoice(rows, hottest, model.key_batches(KEY_BATCH_ROWS) if hottest.size else ())

    def most_rows(self, rows: int, room: int | None) -> int:
        """How many of a table's ``rows`` a tier with this room gets."""
        wanted = round(self.cache_rate * rows)
        return wanted if room is None else min(wanted, room)

    def _check_folder(self) -> None:
        if self.hot_keys is not None and not isdir(self.hot_keys):
            raise ConfigError(str(self.hot_keys), "", "no such folder; volatile_db.hot_keys names it")

    def hottest(self, table: str) -> Keys:
        """The hot keys of a table as its file has them: int64[K], hottest first; empty without a file.

        Raises:
            ConfigError: see ``choose``.
        """
        if self.hot_keys is None:
            return np.empty(0, dtype=np.int64)
        self._check_folder()
        file = self.hot_keys / f"{without_version(table)}.npy"
        try:
            with open_regular(file) as opened:
                keys = np.load(opened, allow_pickle=False)
        except FileNotFoundError:
            return np.empty(0, dtype=np.int64)
        except OSError as err:
            raise ConfigError(str(file), "", f"cannot be read: {err.strerror or err}") from err
        except (MemoryError, *UNREADABLE) as err:
            raise ConfigError(str(file), "", unreadable(file, "a NumPy file of int64 keys", err)) from err
        if not isinstance(keys, np.ndarray) or keys.ndim != 1 or keys.dtype != np.int64:
            came = f"{keys.dtype}{list(keys.shape)}" if isinstance(keys, np.ndarray) else type(keys).__name__
            raise ConfigError(str(file), "", f"expected int64[K], keys with the hottest first, got {came}")
        return np.ascontiguousarray(keys)


class RowChoice:
    """Chooses the rows that a tier gets, batch by batch of a model file."""

    def __init__(self, rows: int, hottest: Keys, file_keys: Iterable[Keys]) -> None:
        """Choose ``rows`` keys: the first of ``hottest``, then other keys if there is room.

        A hot key that the file does not have, for example of an older trace, takes no other key's place.

        Args:
            rows: how many rows to choose.
            hottest: int64[K]; duplicates are allowed.
            file_keys: batches of int64[n], all keys of the file.

        Raises:
            ConfigError: a hot key is reserved.
        """
        self._ranks = KeyIndex(max(hottest.size, 1))
        try:
            self._ranks.find_or_insert(hottest)
        except ReservedKeyError as err:
            raise ConfigError("volatile_db.hot_keys", "", str(err)) from err
        is_met = np.zeros(len(self._ranks), dtype=np.bool_)
        for keys in file_keys:
            ranks = self._ranks.find(keys)
            is_met[ranks[ranks >= 0]] = True
        self._is_given = is_met & (np.cumsum(is_met) <= rows)  # by rank
        self._hot_left = int(np.count_nonzero(self._is_given))
        self._others_left = rows - self._hot_left

    @property
    def is_full(self) -> bool:
        """Whether every chosen row has come."""
        return not self._hot_left and not self._others_left

    def take(self, keys: Keys) -> Mask:
        """Return which of int64[N] ``keys`` are chosen: bool[N]; no key may come twice."""
        ranks = self._ranks.find(keys)
        taken: Mask = ranks >= 0
        taken[taken] = self._is_given[ranks[taken]]
        self._hot_left -= int(np.count_nonzero(taken))
        others = np.flatnonzero(ranks < 0)[: self._others_left]
        self._others_left -= others.size
        taken[others] = True
        return taken
