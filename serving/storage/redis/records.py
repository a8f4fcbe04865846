"""The record of a load that lies beside a partition's rows in Redis, and the scripts that keep it true of them.

A record is ``<digest> <load>:<number>:filled``, or ``:empty`` where a partition rightly has no rows: a hash without
fields does not exist in Redis, and one that was lost does not either. The number is that of ``redis_changes``. Of a
record without the last word, which older versions wrote, only the presence tells. The load's name may have
seals (``redis_seals``). Redis runs a script as one act, between whose commands it evicts nothing.

Where rows are lost, ``claimed <load>`` takes the record's place while a process brings them back: to all others there
is no record, and a change of the rows by another process removes it, by which that one knows.

Of loads that go on at once, names tell which began last (``redis_load``): in each partition, whichever of them comes to
it first, the rows of one and the same load are left.

While a slot of a cluster moves, Redis refuses a script of which a key is nowhere, or that comes back to one which it
has removed. So what changes rows names the rows and the record alone, which are there unless rows were lost.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.storage.redis.commands import Command, Partition, packed, packed_words, plain
from serving.storage.redis.seals import SEALED
from serving.storage.redis.sources import FAULT_OF, Writer, files_and_form
from serving.storage.store import CHANGED

# Fields of one call inside a script: Lua has room for some 8,000 words.
FIELDS_PER_CALL = 2000

WRITER_WORDS = 4  # words of a script that tell of the writer, before the rows
LOST = " has lost the rows it was loaded with: a reload of the model fills it again"

CLAIMED = "claimed "
RECORD_OF = f"""
local function record_of(name)
  local held = redis.call('GET', name)
  return held and string.sub(held, 1, {len(CLAIMED)}) ~= '{CLAIMED}' and held
end
"""

# Carried out twice, because its answer was lost on the way, it changes nothing more. The reply is the record. Where
# another load has kept its rows from being replaced, it takes the later name of the two, as if it had brought them.
SWAP = f"""{RECORD_OF}{FAULT_OF}
local loading, values, times, record, loading_times = unpack(KEYS)
local mark, load, has_rows, files, seen = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[5], ARGV[6]
local is_claimed = string.sub(seen, 1, {len(CLAIMED)}) == '{CLAIMED}'
local held = record_of(record)
local held_mark, held_load, rest = string.match(held or '', '^(.*) ([^%sx:]+)(%S*)$')  -- seals in the rest
if held_load == load then return held end
if is_claimed and redis.call('GET', record) ~= seen then return false end
if held_load and held ~= seen and not is_claimed then
  local fault = fault_of(held, files, string.match(load, 'of(%d+)$'))
  local has_all = not fault and (held_mark == mark or files == mark)
  if has_all and ARGV[7] == '1' then
    redis.call('UNLINK', loading, loading_times)
    if held_load < load then
      held = held_mark .. ' ' .. load .. rest
      redis.call('SET', record, held)
    end
    return held
  end
  local is_later = held_load > load and not string.find(seen, ' ' .. held_load, 1, true)
  if is_later and not has_all and (fault or held_mark ~= files) then
    return redis.error_reply('ERR another process, which began later, has loaded it meanwhile: ' .. held)
  end
end
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
held = mark .. ' ' .. load .. ':' .. ARGV[4] .. (has_rows and ':filled' or ':empty')
redis.call('SET', record, held)
return held
"""

# Who may bring back the rows of a partition: 1 the caller, 0 nobody, for none are lost, -1 another process. Who has
# changed rows of it goes first: what another brings may lack these changes, and would not be trusted.
CLAIM = f"""{RECORD_OF}
local values, record = unpack(KEYS)
local claim, least = ARGV[1], tonumber(ARGV[2])
local held = record_of(record)
if held then
  local number, state = string.match(held, '^.* %w+:?(%d*):?(%a*)$')
  local has_lost = state == 'filled' and redis.call('EXISTS', values) == 0
  if not has_lost and (tonumber(number) or 0) >= least then return 0 end
end
if least == 0 and not held and (redis.call('GET', record) or claim) ~= claim then return -1 end
redis.call('UNLINK', values)
redis.call('SET', record, claim, 'EX', ARGV[3])
return 1
"""

RENEW = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('EXPIRE', KEYS[1], ARGV[2]) or 0"
RELEASE = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('UNLINK', KEYS[1]) or 0"

MARK = f"""{RECORD_OF}{FAULT_OF}{SEALED}
local record, mark, seal, former = record_of(KEYS[1]), ARGV[1], ARGV[4], ARGV[5]
if not record then return 0 end
local fault = fault_of(record, ARGV[2], ARGV[3])
if fault then return redis.error_reply(fault) end
local digest, load = string.match(record, '^(.*) (%S*)$')
if not digest then return 1 end
if string.sub(digest, -#mark) ~= mark then digest = digest .. mark end
local marked = digest .. ' ' .. (seal == '' and load or sealed(load, seal, former))
if marked ~= record then redis.call('SET', KEYS[1], marked) end
return 1
"""

# Rows that come into a partition that was lost must not pass for all that it had: it loses its record, too.
INSERT = f"""{RECORD_OF}{FAULT_OF}
local values, record = unpack(KEYS)
local files, partitions, claim, is_slowest = unpack(ARGV, 1, {WRITER_WORDS})
local held = record_of(record) or ''
local fault = fault_of(held, files, partitions)
if fault then return redis.error_reply(fault) end
local load, state = string.match(held, '^(.*):(%a+)$')
local is_lost = held == '' and redis.call('GET', record) ~= claim
if is_lost or (state == 'filled' and redis.call('EXISTS', values) == 0) then
  if is_slowest == '1' then return redis.error_reply('ERR ' .. values .. '{LOST}') end
  redis.call('UNLINK', record)
end
for i = {WRITER_WORDS + 1}, #ARGV, {FIELDS_PER_CALL} do
  redis.call('HSET', values, unpack(ARGV, i, math.min(i + {FIELDS_PER_CALL - 1}, #ARGV)))
end
if state == 'empty' then redis.call('SET', record, load .. ':filled') end
return 1
"""

EVICT = f"""{RECORD_OF}{FAULT_OF}
local values, record = unpack(KEYS)
local files, partitions, claim, is_slowest = unpack(ARGV, 1, {WRITER_WORDS})
local held, size, evicted = record_of(record), redis.call('HLEN', values), 0
local fault = fault_of(held, files, partitions)
if fault then return redis.error_reply(fault) end
local is_lost = not held and redis.call('GET', record) ~= claim
if is_slowest == '1' and (is_lost or (size == 0 and string.find(held or '', ':filled$'))) then
  return redis.error_reply('ERR ' .. values .. '{LOST}')
end
if is_lost then redis.call('UNLINK', record) end
for i = {WRITER_WORDS + 1}, #ARGV, {FIELDS_PER_CALL} do
  if evicted == size then break end
  evicted = evicted + redis.call('HDEL', values, unpack(ARGV, i, math.min(i + {FIELDS_PER_CALL - 1}, #ARGV)))
end
local load = evicted == size and string.match(held or '', '^(.*):filled$')
if evicted > 0 and load then redis.call('SET', record, load .. ':empty') end
return evicted
"""

STATE = RECORD_OF + "return {record_of(KEYS[1]), redis.call('EXISTS', KEYS[2])}"


class Gathered(NamedTuple):
    """What a load has gathered for a partition.

    Attributes:
        load: its name.
        mark: what the record is to say of the rows: ``RedisRows.with_form``.
        has_rows: whether there are any.
        number: what the number becomes.
    """

    load: str
    mark: str
    has_rows: bool
    number: int


def swap(one: Partition, gathered: Gathered, seen: bytes | None, unless_loaded: bool) -> Command:
    """Put rows that were ``gathered`` in the place of a partition's; the reply is the record that it then has.

    What another load has put there since the record was ``seen`` stays and what was gathered goes, ``unless_loaded``
    being set, where those rows are of the same files and form, with the same changes or, where ``gathered`` has none,
    with any. Where they are others, those of the load that began later stay: an error if it is not this one.
    """
    files = files_and_form(f"{gathered.mark} {gathered.load}".encode())
    return _swap(one, gathered, files, seen or b"", int(unless_loaded))


def swap_claimed(one: Partition, gathered: Gathered) -> Command:
    """The same of a partition that the load has claimed; where the claim is gone nothing is done, the reply is None."""
    return _swap(one, gathered, "", f"{CLAIMED}{gathered.load}".encode(), 0)


def _swap(one: Partition, gathered: Gathered, files: str, seen: bytes, unless_loaded: int) -> Command:
    loading, loading_times = one.loading(gathered.load)
    keys = (loading, one.values, one.times, one.record, loading_times)
    words = gathered.mark, gathered.load, int(gathered.has_rows), gathered.number, files, seen, unless_loaded
    return Command("EVAL", one.values, packed("EVAL", SWAP, len(keys), *keys, *words))


def claim(one: Partition, load: str, least: int, seconds: int) -> Command:
    """Claim a partition for ``load``, for so many seconds, if its rows are lost or its number is below ``least``.

    The reply is 1 where it is claimed, 0 where nothing is lost, -1 where another load has claimed it; with ``least``
    above 0 that one loses its claim.
    """
    words = f"{CLAIMED}{load}", least, seconds
    return Command("EVAL", one.values, packed("EVAL", CLAIM, 2, one.values, one.record, *words))


def renew(one: Partition, load: str, seconds: int) -> Command:
    """Claim a partition for so many seconds more, if ``load`` still has it."""
    return Command("EVAL", one.record, packed("EVAL", RENEW, 1, one.record, f"{CLAIMED}{load}", seconds))


def release(one: Partition, load: str) -> Command:
    """Give a claim of ``load`` back, if it still has it."""
    return Command("EVAL", one.record, packed("EVAL", RELEASE, 1, one.record, f"{CLAIMED}{load}"))


def read_record(reply: bytes | None) -> bytes | None:
    """The record, of what lies in its place."""
    return None if reply is None or reply.startswith(CLAIMED.encode()) else reply


def unlink(one: Partition) -> Command:
    """Remove a partition's rows, and what is known of them."""
    return plain("UNLINK", one.values, one.times, one.record)


def mark_record(record: bytes, writer: Writer, has_changed: bool, seal: str, former: str) -> Command:
    """Note in a record of a load that rows come to those that were loaded, or a seal; the reply is 0 if there is none.

    Where it has a seal of the same database that is neither this one nor the ``former``, that stays.
    An error where the record says that they were loaded from another source than the ``writer`` goes by.
    """
    words = CHANGED if has_changed else "", writer.files, writer.partitions, seal, former
    return Command("EVAL", record, packed("EVAL", MARK, 1, record, *words))


def insert(one: Partition, writer: Writer, words: NDArray[np.uint8]) -> Command:
    """Insert or overwrite rows of a partition, uint8[N, ...], each key and its row as two words of a command.

    An error where its record says that it was loaded from another source than the ``writer`` goes by.
    """
    return _change(INSERT, one, writer, words, 2 * len(words))


def evict(one: Partition, writer: Writer, fields: NDArray[np.uint8]) -> Command:
    """Remove rows, uint8[N, ...], each key as one word of a command; the reply is how many there were.

    See ``insert`` for the error.
    """
    return _change(EVICT, one, writer, fields, len(fields))


def _change(script: str, one: Partition, writer: Writer, words: NDArray[np.uint8], count: int) -> Command:
    said = writer.files, writer.partitions, f"{CLAIMED}{writer.refilling}", int(writer.is_slowest)
    head = packed_words("EVAL", script, 2, one.values, one.record, *said)
    return Command("EVAL", one.values, b"*%d\r\n" % (5 + len(said) + count) + head + words.tobytes())


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
    return record.rpartition(b" ")[2].partition(b":")[0].partition(b"x")[0]
