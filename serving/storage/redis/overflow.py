"""What HPS's overflow policies mean in Redis: a partition that has grown beyond its margin loses rows.

Source of keys and forms: HPS's Redis back-end, HugeCTR v24.06. Next to a partition's rows is the hash
``hps_et{<tag>/p<n>}t``; a field is a key's raw bytes, its value how often the row was used, as decimal text
(``evict_least_used``), or when it was written, as the 8 bytes of a ``time_t`` (``evict_oldest``). ``evict_random``
writes none. HPS chooses random victims from that hash anyway, so it never evicts any; Hotrow does evict rows.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serving.config import RedisOverflow
from serving.storage.redis.commands import Command, Partition, packed_words, plain
from serving.storage.redis.nodes import RedisNodes

# A value that another policy wrote is reset to 1.
TOUCH = """
for i = 1, #ARGV do
  local reply = redis.pcall('HINCRBY', KEYS[1], ARGV[i], 1)
  if type(reply) == 'table' then redis.call('HSET', KEYS[1], ARGV[i], 1) end
end
return #ARGV
"""
MOST_FIELDS = 1000  # Redis does nothing else while it works on one command
SCAN_FIELDS = 1000
# One process at a time evicts rows of a partition; the mark of one that was killed is forgotten after this time.
MARK_TTL_MS = 60_000


class Overflow:
    """Keeps the partitions of one table within their margin. Every method may be called from any thread."""

    def __init__(self, nodes: RedisNodes, rule: RedisOverflow) -> None:
        """Store the policy."""
        self.rule = rule
        self._nodes = nodes
        self._target = round(rule.margin_rows * rule.target_ratio)

    @property
    def is_touched_by_fetches(self) -> bool:
        """Whether a fetch changes which rows go first."""
        return self.rule.policy == "least_used" or (self.rule.policy == "oldest" and self.rule.refreshes)

    def touches(self, times: bytes, fields: NDArray[np.uint8]) -> list[Command]:
        """Commands that record that rows were written or read.

        Args:
            times: the hash in which it is kept.
            fields: uint8[N, ...], the keys as words of a command.
        """
        if self.rule.policy == "random":
            return []
        now = packed_words(int(time.time()).to_bytes(8, "little", signed=True))
        commands = []
        for start in range(0, len(fields), MOST_FIELDS):
            part = fields[start : start + MOST_FIELDS]
            if self.rule.policy == "least_used":
                name, head, words = "EVAL", packed_words("EVAL", TOUCH, 1, times), part
            else:
                stamps = np.broadcast_to(np.frombuffer(now, dtype=np.uint8), (len(part), len(now)))
                name, head, words = "HSET", packed_words("HSET", times), np.concatenate([part, stamps], axis=1)
            count = 4 + len(part) if name == "EVAL" else 2 + 2 * len(part)
            commands.append(Command(name, times, b"*%d\r\n" % count + head + words.tobytes()))
        return commands

    def trim(self, partitions: Sequence[Partition], inserted: Sequence[set[bytes]]) -> int:
        """Evict rows of those ``partitions`` that have too many; returns how many rows.

        The keys just ``inserted`` into each go last.
        """
        sizes = self._nodes.run([plain("HLEN", partition.values) for partition in partitions])
        return sum(
            self._trim(partition, spared)
            for partition, size, spared in zip(partitions, sizes, inserted, strict=True)
            if size > self.rule.margin_rows
        )

    def _trim(self, partition: Partition, spared: set[bytes]) -> int:
        mark = plain("SET", partition.evicting, "1", "NX", "PX", MARK_TTL_MS)
        is_ours, size = self._nodes.run([mark, plain("HLEN", partition.values)])
        if not is_ours:
            return 0
        try:
            surplus = size - self._target
            if size <= self.rule.margin_rows:  # another process has just evicted rows
                return 0
            if self.rule.policy == "random":
                return self._evict(partition, self._random(partition, surplus, spared))
            return self._evict_ranked(partition, surplus, spared)
        finally:
            self._nodes.run([plain("UNLINK", partition.evicting)])

    def _evict(self, partition: Partition, victims: Sequence[bytes]) -> int:
        evicted = self._remove(partition.values, victims)
        self._remove(partition.times, victims)
        return evicted

    def _remove(self, name: bytes, fields: Sequence[bytes]) -> int:
        parts = [fields[start : start + MOST_FIELDS] for start in range(0, len(fields), MOST_FIELDS)]
        return sum(self._nodes.run([plain("HDEL", name, *part)])[0] for part in parts)

    def _random(self, partition: Partition, surplus: int, spared: set[bytes]) -> list[bytes]:
        (drawn,) = self._nodes.run([plain("HRANDFIELD", partition.values, surplus + len(spared))])
        return sorted(drawn, key=spared.__contains__)[:surplus]

    def _evict_ranked(self, partition: Partition, surplus: int, spared: set[bytes]) -> int:
        """Evict the least used, or the oldest, first."""
        ranks = self._ranks(partition)
        order = sorted(ranks, key=lambda key: (key in spared, ranks[key]))
        evicted = self._evict(partition, order[:surplus])
        if self.rule.policy == "least_used":
            self._age(partition, {key: ranks[key] for key in order[surplus:]})
        return evicted

    def _ranks(self, partition: Partition) -> dict[bytes, int]:
        """Uses, or time, of every key that has a row; a key without a record goes first.

        Records of keys without a row are dropped: such a read was recorded after the row was evicted.
        """
        known: dict[bytes, int] = {}
        cursor = -1
        while cursor:
            ((cursor, page),) = self._nodes.run([plain("HSCAN", partition.times, max(cursor, 0), "COUNT", SCAN_FIELDS)])
            known |= {key: self._rank(value) for key, value in page.items()}
        (keys,) = self._nodes.run([plain("HKEYS", partition.values)])  # after the others: inserts write the row first
        ranks = {key: known.pop(key, -1) for key in keys}
        self._remove(partition.times, list(known))
        return ranks

    def _rank(self, value: bytes) -> int:
        if self.rule.policy == "oldest":
            return int.from_bytes(value, "little", signed=True)
        return int(value) if value.isdigit() else -1

    def _age(self, partition: Partition, uses: dict[bytes, int]) -> None:
        """Halve the counts of those that stay, otherwise a row with many old uses would stay forever."""
        halved = [word for key, count in uses.items() if count > 1 for word in (key, count // 2)]
        for start in range(0, len(halved), 2 * MOST_FIELDS):
            self._nodes.run([plain("HSET", partition.times, *halved[start : start + 2 * MOST_FIELDS])])
