"""How a table in Redis is replaced, or gets back rows that it has lost, while others read it.

The rows are gathered under other names and then take the place of the old ones; each partition changes in one instant,
together with the record of what it was loaded from.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.storage.redis.changes import ChangeNumbers, number_of
from serving.storage.redis.commands import Command, RedisNodeError, hdel, header, plain
from serving.storage.redis.overflow import Overflow
from serving.storage.redis.partitions import Partitions
from serving.storage.redis.records import Gathered, claim, release, renew, swap, swap_claimed
from serving.storage.redis.rows import RedisRows
from serving.storage.redis.sources import files_and_form
from serving.storage.store import Keys, Vectors

if TYPE_CHECKING:
    from serving.storage.redis.nodes import RedisNodes

# Rows of a load that was killed are forgotten by Redis after this time.
LOADING_TTL_S = 600
# The same of what it has claimed, which every batch of rows claims for as long again.
CLAIM_TTL_S = 60


class TableLoad:
    """One load of a table; see ``RedisTable`` for the errors.

    Attributes:
        name: what Redis knows it by; no other load has this name, and of two that of the later one is greater.
    """

    def __init__(
        self,
        nodes: "RedisNodes",
        partitions: Partitions,
        rows: RedisRows,
        overflow: Overflow | None,
        numbers: ChangeNumbers,
    ) -> None:
        """Name it; nothing is asked yet."""
        self.name = f"{time.time_ns():016x}{secrets.token_hex(4)}of{len(partitions)}"
        self._nodes = nodes
        self._partitions = partitions
        self._rows = rows
        self._overflow = overflow
        self._numbers = numbers

    def replace(
        self, batches: Iterator[tuple[Keys, Vectors]], mark: str, seen: Sequence[bytes | None], unless_loaded: bool
    ) -> list[bytes]:
        """Replace every partition by ``batches``, with ``mark`` in the records; returns these, by partition.

        Args:
            batches: the rows.
            mark: what the records are to say of them.
            seen: the records when it began.
            unless_loaded: whether the rows of another load stay that has brought the same since; see ``swap``.
        """
        everywhere = range(len(self._partitions))
        try:
            filled = self._gather(batches, everywhere)
            numbers = self._numbers.of_loads(_files(mark))
            gathered = [Gathered(self.name, mark, at in filled, numbers.get(at, 0)) for at in everywhere]
            # Another's rows may lack what this process has changed before.
            swaps = [
                swap(one, gathered[at], seen[at], unless_loaded and at not in numbers)
                for at, one in enumerate(self._partitions)
            ]
            records: list[bytes] = self._nodes.run(swaps)
        except BaseException:
            self._forget(everywhere)
            raise
        self._numbers.were_loaded({at: number_of(record) for at, record in enumerate(records)})
        return records

    def refill(self, batches: Iterator[tuple[Keys, Vectors | None]], mark: str) -> list[int]:
        """Give those partitions that have lost rows theirs of ``batches``; returns which these were.

        Their numbers become what this process has been promised, so that another, which has changed rows that these
        batches may lack, still takes them for lost. ``batches`` is not begun before the partitions are claimed, and a
        change by another process ends a claim: so no row that is older than the batches' beginning replaces a newer
        one. What this process changes meanwhile the batches give again.

        Raises:
            StoreError: another process has claimed some, or changed rows meanwhile; all others have their rows.
        """
        least = self._numbers.promised(_files(mark))
        asked = enumerate(self._partitions)
        claims = self._nodes.run([claim(one, self.name, least.get(at, 0), CLAIM_TTL_S) for at, one in asked])
        mine = [at for at, reply in enumerate(claims) if reply > 0]
        replies: list[bytes | None] = []
        try:
            if mine:
                filled = self._gather(self._renewing(batches, mine), mine)
                promised = self._numbers.promised(_files(mark))  # by now more, where this process has changed rows
                gathered = {at: Gathered(self.name, mark, at in filled, promised.get(at, 0)) for at in mine}
                replies = self._nodes.run([swap_claimed(self._partitions[at], gathered[at]) for at in mine])
        finally:
            self._forget(mine)
        if -1 in claims or None in replies:
            raise self._rows.error("another process brings lost rows back, or has changed rows while they were brought")
        return mine

    def _gather(self, batches: Iterator[tuple[Keys, Vectors | None]], wanted: Sequence[int]) -> set[int]:
        """Write the rows of the ``wanted`` partitions under their other names; returns which partitions have some."""
        filled: set[int] = set()
        sizes = np.zeros(len(self._partitions), dtype=np.int64)
        for keys, rows in batches:
            if len(wanted) < len(self._partitions):
                is_wanted = np.isin(self._partitions.places(keys), wanted)
                keys, rows = keys[is_wanted], None if rows is None else rows[is_wanted]
            if rows is None:
                filled -= self._removed(keys)
                continue
            if self._overflow is not None:
                fits = self._partitions.fitting(keys, sizes, self._overflow.rule.margin_rows)
                keys, rows = keys[fits], rows[fits]
            for part in self._rows.rounds(keys.size, self._rows.codec.value_bytes):
                groups = self._rows.words(self._partitions, keys[part], rows[part])
                self._nodes.run([command for at, words in groups for command in self._writes(at, words)])
                filled.update(at for at, _ in groups)
        return filled

    def _writes(self, at: int, words: NDArray[np.uint8]) -> list[Command]:
        values, times = self._partitions[at].loading(self.name)
        commands = [Command("HSET", values, header(b"HSET", values, 2 * len(words) + 2) + words.tobytes())]
        if self._overflow is not None:
            commands += self._overflow.touches(times, words[:, : self._rows.field_bytes])
        return [*commands, *(plain("EXPIRE", name, LOADING_TTL_S) for name in (values, times))]

    def _removed(self, keys: Keys) -> set[int]:
        """Remove rows that were gathered; returns the partitions that have none left."""
        left: dict[int, int] = {}
        for part in self._rows.rounds(keys.size, self._rows.spec.key_bytes):
            groups = self._rows.fields(self._partitions, keys[part])
            names = [(self._partitions[at].loading(self.name), fields) for at, fields in groups]
            removals = [hdel(name, fields) for both, fields in names for name in both]
            replies = self._nodes.run([*removals, *(plain("EXISTS", values) for (values, _), _ in names)])
            left |= zip((at for at, _ in groups), replies[len(removals) :], strict=True)
        return {at for at, is_there in left.items() if not is_there}

    def _renewing(
        self, batches: Iterator[tuple[Keys, Vectors | None]], mine: Sequence[int]
    ) -> Iterator[tuple[Keys, Vectors | None]]:
        for batch in batches:
            yield batch
            self._nodes.run([renew(self._partitions[at], self.name, CLAIM_TTL_S) for at in mine])

    def _forget(self, places: Sequence[int]) -> None:
        """Remove what was gathered and not taken over, and the claims that are still held."""
        with suppress(RedisNodeError):
            ones = [self._partitions[at] for at in places]
            gathered = [plain("UNLINK", *one.loading(self.name)) for one in ones]
            self._nodes.run([*gathered, *(release(one, self.name) for one in ones)])


def _files(mark: str) -> str:
    return files_and_form(f"{mark} ".encode())
