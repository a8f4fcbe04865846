"""Numbers of changes: they tell a partition that came back as it was before some of them from one that has them all.

The record of a partition's load (``redis_records``) has a number. A change makes it the microseconds since 1970, or one
more where that is not more than it was, once its rows are written. Both lie on one node, which comes back as it was at
one moment: where the number is there, so are the rows. The load of a process that has changed rows counts as a change
too, any other makes the number 0: who has changed rows does not trust it, for it may lack these.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from serving.storage.redis.commands import Command, Partition, packed
from serving.storage.redis.records import RECORD_OF
from serving.storage.redis.sources import files_and_form

if TYPE_CHECKING:
    from serving.storage.redis.nodes import RedisNodes

NOTE = f"""{RECORD_OF}
local load, number, state = string.match(record_of(KEYS[1]) or '', '^(.* %w+):?(%d*):?(%a*)$')
if not load then return 0 end
number = tonumber(number) or 0
if number < tonumber(ARGV[1]) then return -1 end
number = math.max(number + 1, tonumber(ARGV[2]))
redis.call('SET', KEYS[1], load .. string.format(':%.0f', number) .. (state ~= '' and ':' .. state or ''))
return number
"""

# A partition that is behind is forgotten, so that other processes, who cannot know, do not serve its rows either.
FORGET = f"""{RECORD_OF}
local values, record = unpack(KEYS)
local load, number = string.match(record_of(record) or '', '^(.* %w+):?(%d*)')
if not load or (tonumber(number) or 0) >= tonumber(ARGV[1]) then return 0 end
return redis.call('UNLINK', values, record)
"""


logger = logging.getLogger(__name__)


class ChangeNumbers:
    """The numbers that a table's partitions have, as far as this process knows. Any thread may call any method.

    Only partitions that it has changed are watched: of others it has been promised nothing.

    Attributes:
        known: by partition that it has changed, the least number with which all of these changes are there. Replaced as
            a whole: what was in it when a read began must be there when it ends.
    """

    def __init__(self) -> None:
        """Know none."""
        self.known: Mapping[int, int] = {}
        self._files = ""  # those of the table that was changed, as ``files_and_form`` has it
        self._seen: dict[int, int] = {}  # by partition, the largest number that it was seen to have
        self._lock = threading.Lock()  # guards changes of both

    def note(self, nodes: "RedisNodes", partitions: Sequence[Partition], changed: Sequence[int], files: str) -> None:
        """Number a change of the ``changed`` ones of a table's ``partitions``, of rows that come from ``files``."""
        with self._lock:
            if files != self._files:  # the table was loaded from others: nothing that was changed before is left
                self._files, self.known = files, {}
        known, now_us = self.known, time.time_ns() // 1000
        numbers = nodes.run([_note(partitions[at], known.get(at, 0), now_us) for at in changed])
        self.forget(nodes, partitions, [at for at, number in zip(changed, numbers, strict=True) if number < 0])
        with self._lock:
            # Where there is no record, none that there was so far counts from now on.
            promised = {
                at: number if number > 0 else max(now_us, self._seen.get(at, 0) + 1)
                for at, number in zip(changed, numbers, strict=True)
            }
            self._see(promised)
            self.known = {**self.known, **promised}

    def promised(self, files: str) -> Mapping[int, int]:
        """As ``known``, of changes of rows that come from ``files``."""
        return self.known if files == self._files else {}

    def of_loads(self, files: str) -> Mapping[int, int]:
        """Numbers for rows from ``files`` that are loaded now, of the partitions whose are not 0."""
        now_us = time.time_ns() // 1000
        return {at: max(now_us, self._seen.get(at, 0) + 1) for at in self.promised(files)}

    def were_loaded(self, numbers: Mapping[int, int]) -> None:
        """This process has loaded partitions, whose records have ``numbers`` now."""
        with self._lock:
            self._see(numbers)
            self.known = {at: numbers.get(at, number) for at, number in self.known.items()}

    def were_seen(self, numbers: Mapping[int, int]) -> None:
        """Records have ``numbers`` now, by partition."""
        with self._lock:
            self._see(numbers)

    def forget(self, nodes: "RedisNodes", partitions: Sequence[Partition], behind: Sequence[int]) -> None:
        """Forget the rows of those that are ``behind``, unless they have been loaded anew by now."""
        known = self.known
        replies = nodes.run([_forget(partitions[at], known[at]) for at in behind])
        for at, reply in zip(behind, replies, strict=True):
            if reply:
                logger.warning("%s came back older: its rows are removed", partitions[at].values.decode())

    def behind(self, records: Iterable[tuple[int, bytes | None]], known: Mapping[int, int]) -> list[int]:
        """The partitions whose ``records`` lack changes that were ``known`` before they were read."""
        return [at for at, record in records if at in known and self._lacks(record, known[at])]

    def _lacks(self, record: bytes | None, known: int) -> bool:
        """Whether a record tells of less than the changes up to ``known``; one of other files tells nothing of them."""
        return record is None or (number_of(record) < known and files_and_form(record) == self._files)

    def _see(self, numbers: Mapping[int, int]) -> None:
        self._seen |= {at: max(one, self._seen.get(at, 0)) for at, one in numbers.items()}


def _note(one: Partition, least: int, now_us: int) -> Command:
    """Raise a partition's number; the reply is the number, 0: there is no record, -1: it was below ``least``."""
    return Command("EVAL", one.record, packed("EVAL", NOTE, 1, one.record, least, now_us))


def _forget(one: Partition, least: int) -> Command:
    """Forget a partition's rows if its number is below ``least``, a slower tier having what it lacks."""
    return Command("EVAL", one.values, packed("EVAL", FORGET, 2, one.values, one.record, least))


def number_of(record: bytes) -> int:
    """The number in a record; 0 where an older version wrote it."""
    words = record.rpartition(b" ")[2].split(b":")
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
