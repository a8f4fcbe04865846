"""The record of a load that lies beside a partition's rows in Redis, and the scripts that keep it true of them.

A record is ``<digest> <load>:filled``, or ``:empty`` where a partition rightly has no rows: a hash without fields does
not exist in Redis, and one that was lost does not either. Of a record without the last word, which older versions
wrote, only the presence tells. Redis runs a script as one act, between whose commands it evicts nothing.
"""

import numpy as np
from numpy.typing import NDArray

from serving.storage.redis_commands import Command, Partition, packed, packed_words
from serving.storage.store import CHANGED

# Fields of one call inside a script: Lua has room for some 8,000 words.
FIELDS_PER_CALL = 2000

# Carried out twice, because its answer was lost on the way, it changes nothing more.
SWAP = """
local loading, values, times, record, loading_times = unpack(KEYS)
local mark, has_rows = ARGV[1], ARGV[2] == '1'
local held = redis.call('GET', record)
if held and string.sub(held, 1, #mark) == mark then return 0 end
if has_rows and redis.call('EXISTS', loading) == 0 then
  return redis.error_reply('ERR the rows gathered so far are gone')
end
redis.call('UNLINK', values, times)
if has_rows then
  redis.call('RENAME', loading, values)
  redis.call('PERSIST', values)
end
if redis.call('EXISTS', loading_times) == 1 then
  redis.call('RENAME', loading_times, times)
  redis.call('PERSIST', times)
end
redis.call('SET', record, mark .. (has_rows and ':filled' or ':empty'))
return 1
"""

MARK_CHANGED = """
local record, mark = redis.call('GET', KEYS[1]), ARGV[1]
if not record then return 0 end
local digest, load = string.match(record, '^(.*) (%S*)$')
if digest and string.sub(digest, -#mark) ~= mark then redis.call('SET', KEYS[1], digest .. mark .. ' ' .. load) end
return 1
"""

# Rows that come into a partition that was lost must not pass for all that it had: it loses its record, too.
INSERT = f"""
local values, record = unpack(KEYS)
local source, held = ARGV[1], redis.call('GET', record) or ''
if held ~= '' and string.sub(held, 1, #source) ~= source then
  return redis.error_reply('ERR its rows come from ' .. held .. ', those to be inserted belong to ' .. source)
end
local load, state = string.match(held, '^(.*):(%a+)$')
if state == 'filled' and redis.call('EXISTS', values) == 0 then redis.call('UNLINK', record) end
for i = 2, #ARGV, {FIELDS_PER_CALL} do
  redis.call('HSET', values, unpack(ARGV, i, math.min(i + {FIELDS_PER_CALL - 1}, #ARGV)))
end
if state == 'empty' then redis.call('SET', record, load .. ':filled') end
return 1
"""

EVICT = f"""
local values, times, record = unpack(KEYS)
local evicted = 0
for i = 1, #ARGV, {FIELDS_PER_CALL} do
  local last = math.min(i + {FIELDS_PER_CALL - 1}, #ARGV)
  evicted = evicted + redis.call('HDEL', values, unpack(ARGV, i, last))
  redis.call('HDEL', times, unpack(ARGV, i, last))
end
if evicted > 0 and redis.call('EXISTS', values) == 0 then
  local load = string.match(redis.call('GET', record) or '', '^(.*):filled$')
  if load then redis.call('SET', record, load .. ':empty') end
end
return evicted
"""

STATE = "return {redis.call('GET', KEYS[1]), redis.call('EXISTS', KEYS[2])}"


def swap(one: Partition, load: str, digest: str, has_rows: bool) -> Command:
    """Put the rows that ``load`` gathered, none where ``has_rows`` is False, in the place of a partition's."""
    loading, loading_times = one.loading(load)
    keys = (loading, one.values, one.times, one.record, loading_times)
    return Command("EVAL", one.values, packed("EVAL", SWAP, len(keys), *keys, f"{digest} {load}", int(has_rows)))


def mark_changed(record: bytes) -> Command:
    """Note in a record of a load, where there is one, that rows come to those that were loaded."""
    return Command("EVAL", record, packed("EVAL", MARK_CHANGED, 1, record, CHANGED))


def insert(one: Partition, source: str, words: NDArray[np.uint8]) -> Command:
    """Insert or overwrite rows of a partition, unless its record says that it was loaded from another source.

    Args:
        one: the partition.
        source: what its record must begin with, if there is one.
        words: uint8[N, ...], each key and its row as two words of a command.
    """
    head = packed_words("EVAL", INSERT, 2, one.values, one.record, source)
    return Command("EVAL", one.values, b"*%d\r\n" % (6 + 2 * len(words)) + head + words.tobytes())


def evict(one: Partition, fields: NDArray[np.uint8]) -> Command:
    """Remove rows, and what HPS's overflow policies know of them; the reply is how many rows there were.

    Args:
        one: the partition.
        fields: uint8[N, ...], each key as one word of a command.
    """
    head = packed_words("EVAL", EVICT, 3, one.values, one.times, one.record)
    return Command("EVAL", one.values, b"*%d\r\n" % (6 + len(fields)) + head + fields.tobytes())


def state(one: Partition) -> Command:
    """Ask for a partition's record, None if it is absent, and whether it has rows."""
    return Command("EVAL", one.values, packed("EVAL", STATE, 2, one.record, one.values))


def is_lost(record: bytes | None, has_rows: bool) -> bool:
    """Whether rows of a partition that was loaded are gone, or the record that tells of them."""
    return record is None or (record.endswith(b":filled") and not has_rows)


def is_same_load(record: bytes | None, other: bytes | None) -> bool:
    """Whether two records are of one load, whatever changed since."""
    return record is not None and other is not None and _load(record) == _load(other)


def _load(record: bytes) -> bytes:
    return record.rpartition(b" ")[2].partition(b":")[0]
