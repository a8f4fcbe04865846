"""The marker and the lease of a partition in Redis, and the scripts that depend on them."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from serving.model.strict_json import log_newer
from serving.storage.marker import MARKER_FORMAT
from serving.storage.redis.commands import Command, Partition, header, packed_words, plain

LEASE_MS = 30_000
_FIELDS = frozenset(
    ("format", "digest", "row_dtype", "partitions", "changed", "run_id", "generation", "rows", "filling")
)
# The field of a log's state; then comes the log's name.
REACHED = b"reached."
# Arguments of one call inside a script: Lua has room for some 8,000.
WORDS_PER_CALL, FLOATS_PER_CALL = 4000, 100

# Put rows into a partition while the lease is held, except rows whose keys were removed since. The reply is 1, or 0
# if the lease is gone.
FILL = f"""
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
local has_removed = redis.call('EXISTS', KEYS[3]) == 1
if has_removed or ARGV[2] == 'absent' then
  local put = ARGV[2] == 'absent' and 'HSETNX' or 'HSET'
  for i = 3, #ARGV, 2 do
    if not has_removed or redis.call('SISMEMBER', KEYS[3], ARGV[i]) == 0 then
      redis.call(put, KEYS[1], ARGV[i], ARGV[i + 1])
    end
  end
else
  for i = 3, #ARGV, {WORDS_PER_CALL} do
    redis.call('HSET', KEYS[1], unpack(ARGV, i, math.min(i + {WORDS_PER_CALL - 1}, #ARGV)))
  end
end
return 1
"""
# Write the marker and give the lease back. With loading names, the rows gathered there take the partition's place.
# Without, a ``changed`` that another process has set since stays. Sent twice, it does the same as once.
FINISH = """
local values, times, marker, lease, removed, loading_values, loading_times = unpack(KEYS)
if redis.call('HGET', marker, 'generation') == ARGV[1] then return 1 end
if redis.call('GET', lease) ~= ARGV[1] then return 0 end
if loading_values then
  if redis.call('HLEN', loading_values) < tonumber(ARGV[2]) then
    return redis.error_reply('the rows gathered so far are gone')
  end
  redis.call('UNLINK', values, times, marker)
  for loading, name in pairs({[loading_values] = values, [loading_times] = times}) do
    if redis.call('EXISTS', loading) == 1 then
      redis.call('RENAME', loading, name)
      redis.call('PERSIST', name)
    end
  end
end
redis.call('UNLINK', lease, removed)
redis.call('HDEL', marker, 'filling')
redis.call('HSET', marker, 'rows', redis.call('HLEN', values), unpack(ARGV, 3))
return 1
"""
# Take the lease if no process holds it. Sent twice, it does the same as once.
TAKE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
return redis.call('GET', KEYS[1]) == ARGV[1] and 1 or 0
"""
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
RELEASE = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('UNLINK', KEYS[1]) or 0"
# Change rows of a source of truth. The reply is 1, or 0 if the marker does not have the generation any more.
#
# If a log brought the change, the marker gets the new state of the log, but only if it has the expected state now.
# Otherwise nothing changes, and the reply is the state that it has. ``ADD`` adds to rows as float32 does: a sum of two
# float32 is exact enough in Lua's float64 to be rounded once. A key that is absent starts at ARGV[6]. If a sum is
# not finite, the state changes, the rows do not, and the reply is a list of its key.
CHANGE = f"""
if (redis.call('HGET', KEYS[2], 'generation') or '') ~= ARGV[1] then return 0 end
if ARGV[3] ~= '' then
  local state = redis.call('HGET', KEYS[2], ARGV[3]) or ''
  if state ~= ARGV[4] then return state end
  if state ~= ARGV[5] then redis.call('HSET', KEYS[2], ARGV[3], ARGV[5]) end
end
if ARGV[2] ~= 'ADD' then
  for i = 7, #ARGV, {WORDS_PER_CALL} do
    redis.call(ARGV[2], KEYS[1], unpack(ARGV, i, math.min(i + {WORDS_PER_CALL - 1}, #ARGV)))
  end
  return 1
end
local sums, limit = {{}}, 2^128 - 2^103
for i = 7, #ARGV, 2 do
  local key, deltas, parts = ARGV[i], ARGV[i + 1], {{}}
  local row = sums[key] or redis.call('HGET', KEYS[1], key) or ARGV[6]
  if #row ~= #deltas then return redis.error_reply('a row has ' .. #row .. ' bytes, expected ' .. #deltas) end
  for at = 1, #row, {4 * FLOATS_PER_CALL} do
    local count = math.min({FLOATS_PER_CALL}, (#row - at + 1) / 4)
    local format = '<' .. string.rep('f', count)
    local floats, added = {{struct.unpack(format, row, at)}}, {{struct.unpack(format, deltas, at)}}
    for j = 1, count do
      floats[j] = floats[j] + added[j]
      if not (math.abs(floats[j]) < limit) then return {{key}} end
    end
    parts[#parts + 1] = struct.pack(format, unpack(floats, 1, count))
  end
  sums[key] = table.concat(parts)
end
for key, row in pairs(sums) do redis.call('HSET', KEYS[1], key, row) end
return 1
"""
# Add rows whose keys are absent, and were not removed a moment ago; the reply counts them.
ADD = """
local count, has_removed = 0, redis.call('EXISTS', KEYS[2]) == 1
for i = 1, #ARGV, 2 do
  if not has_removed or redis.call('SISMEMBER', KEYS[2], ARGV[i]) == 0 then
    count = count + redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return count
"""
SET_CHANGED = "return redis.call('EXISTS', KEYS[1]) == 1 and redis.call('HSET', KEYS[1], 'changed', 1) or 0"
BEGIN = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
redis.call('HSET', KEYS[2], 'filling', 1)
return 1
"""


@dataclass(frozen=True, slots=True)
class PartitionMarker:
    """What Redis remembers of the last load of a partition.

    Attributes:
        digest: names the model's files.
        row_dtype: the row type of the values.
        partitions: how many partitions the table has.
        changed: see ``storage.marker.Marker``.
        run_id: the node's identity when the partition was filled, or last found valid.
        generation: a random name of this filling.
        rows: rows at the end of the filling; ``FINISH`` counts them.
        reached: the states of logs that the partition keeps, by the logs' names.
    """

    digest: str
    row_dtype: str
    partitions: int
    changed: bool
    run_id: str
    generation: str
    rows: int = 0
    reached: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, reply: Mapping[bytes, bytes]) -> Self | None:
        """Read the reply of HGETALL; None if there is no whole marker.

        Raises:
            ValueError: the marker has another format.
        """
        fields = {name.decode(): value.decode() for name, value in reply.items()}
        if "digest" not in fields:  # a filling that has not ended, or a flag that was set after the marker was lost
            return None
        if fields.get("format") != str(MARKER_FORMAT):
            raise ValueError(f"has a marker of format {fields.get('format')!r}, expected {MARKER_FORMAT}")
        unknown = [name for name in fields.keys() - _FIELDS if not name.startswith(REACHED.decode())]
        log_newer("the marker of a table in Redis", frozenset(unknown))
        return cls(
            fields["digest"],
            fields["row_dtype"],
            int(fields["partitions"]),
            fields.get("changed") == "1",
            fields["run_id"],
            fields["generation"],
            int(fields["rows"]),
            reached_in(reply),
        )

    def words(self) -> list[str | int]:
        """Names and values of the hash, without ``rows``."""
        return [
            *("format", MARKER_FORMAT, "digest", self.digest, "row_dtype", self.row_dtype),
            *("partitions", self.partitions, "run_id", self.run_id, "generation", self.generation),
            *(("changed", 1) if self.changed else ()),
        ]


def reached_in(reply: Mapping[bytes, bytes]) -> Mapping[str, str]:
    """The states of logs in the reply of HGETALL, also if there is no whole marker."""
    found = {name.removeprefix(REACHED): state for name, state in reply.items() if name.startswith(REACHED)}
    return {name.decode(): state.decode() for name, state in found.items()}


def new_token() -> str:
    """A random name of a lease and of the generation that it fills."""
    return secrets.token_hex(8)


def set_changed(partition: Partition) -> Command:
    """Note that rows of the partition have changed, if it has a marker."""
    return _script(SET_CHANGED, [partition.marker], [])


def begin(partition: Partition, token: str) -> Command:
    """Drop a partition's rows, if the lease is held, and note that Hotrow fills it; the reply is 0 if it is not."""
    return _script(BEGIN, [partition.lease, partition.marker, partition.values, partition.times], [token])


def take_lease(partition: Partition, token: str) -> Command:
    """Take the lease; the reply is 0 if another process has it."""
    return _script(TAKE, [partition.lease], [token, LEASE_MS])


def renew_lease(partition: Partition, token: str) -> Command:
    """Keep the lease for its full time; the reply is 0 if it is gone."""
    return _script(RENEW, [partition.lease, partition.removed], [token, LEASE_MS])


def release_lease(partition: Partition, token: str) -> Command:
    """Give the lease back, if it is still held."""
    return _script(RELEASE, [partition.lease], [token])


def fill(partition: Partition, token: str, words: NDArray[np.uint8], *, over: bool) -> Command:
    """Put rows, each uint8[...] a key and a row as two words, into a partition; ``over`` overwrites rows."""
    head = [token, "over" if over else "absent"]
    return _script(FILL, [partition.values, partition.lease, partition.removed], head, words, 2 * len(words))


def finish(partition: Partition, token: str, marker: PartitionMarker, *, swap: bool, gathered: int) -> Command:
    """Write the marker and give the lease back.

    ``swap`` puts the rows that were gathered, at least ``gathered`` of them, in the place of the partition's.
    """
    keys = [
        partition.values,
        partition.times,
        partition.marker,
        partition.lease,
        partition.removed,
        *(partition.loading(token) if swap else ()),
    ]
    return _script(FINISH, keys, [token, gathered, *marker.words()])


class Fence(NamedTuple):
    """What the marker has of a log before a change, and after it.

    Attributes:
        log: the log's name.
        expected: the state that the marker has; empty: none.
        state: the state that it gets.
        default_row: the bytes of a row to which nothing was added.
    """

    log: str
    expected: str
    state: str
    default_row: bytes


def change(
    partition: Partition,
    generation: str,
    name: str,
    rows: NDArray[np.uint8],
    words_per_row: int,
    fence: Fence | None = None,
) -> Command:
    """``HSET``, ``HDEL`` or ``ADD`` on a source of truth; see ``CHANGE`` for the reply."""
    states: list[str | bytes] = ["", "", "", ""]
    if fence is not None:
        states = [REACHED + fence.log.encode(), fence.expected, fence.state, fence.default_row]
    head = [generation, name, *states]
    return _script(CHANGE, [partition.values, partition.marker], head, rows, words_per_row * len(rows))


def note_removed(partition: Partition, fields: NDArray[np.uint8]) -> list[Command]:
    """Note keys before they are removed from a cache: a process that fills the partition must not add them again."""
    head = header(b"SADD", partition.removed, 2 + len(fields))
    return [Command("SADD", partition.removed, head + fields.tobytes()), plain("PEXPIRE", partition.removed, LEASE_MS)]


def add(partition: Partition, words: NDArray[np.uint8]) -> Command:
    """Add rows whose keys are absent."""
    return _script(ADD, [partition.values, partition.removed], [], words, 2 * len(words))


def _script(
    script: str,
    keys: list[bytes],
    head: Sequence[str | bytes | int],
    words: NDArray[np.uint8] | None = None,
    count: int = 0,
) -> Command:
    prefix = packed_words("EVAL", script, len(keys), *keys, *head)
    total = 3 + len(keys) + len(head) + count
    body = b"" if words is None else words.tobytes()
    return Command("EVAL", keys[0], b"*%d\r\n" % total + prefix + body)
