"""Changes of rows that lie in Redis as plain strings: refused where another process has loaded the table anew.

A script looks at a record of the load and writes the rows as one act. In a cluster it names the record alone, of which
each node has some, and writes whatever slots of that node the rows have, which Redis lets scripts do that say nothing
else of themselves. Rows whose slot moves it leaves out, and tells which these are.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.storage.redis.commands import Command, as_words, packed, packed_words
from serving.storage.redis.records import CLAIMED, LOST
from serving.storage.redis.sources import FAULT_OF, Writer, files_and_form

if TYPE_CHECKING:
    from serving.storage.redis.topology import RedisTopology

# Redis does nothing else while it works on one script.
MOST_ROWS = 2000

# While a load lasts its record lies behind this word: to readers there is none, other writers learn whose turn it is.
SOURCE_OF = """
local function source_of(name)
  local held = redis.call('GET', name)
  if not held then return nil, true end
  local claimed = string.match(held, '^claimed (.*)$')
  return claimed or held, claimed ~= nil
end
"""

CHANGE = f"""{FAULT_OF}{SOURCE_OF}
local held, is_unfinished = source_of(KEYS[1])
local verb, changed, left = ARGV[1], 0, {{}}
local fault = fault_of(held, ARGV[2], '0')
if fault then return redis.error_reply(fault) end
if is_unfinished and ARGV[3] == '1' then return redis.error_reply('ERR it{LOST}') end
local step = verb == 'SET' and 2 or 1
for i = 4, #ARGV, step do
  local reply = redis.pcall(verb, unpack(ARGV, i, i + step - 1))
  if type(reply) == 'number' then
    changed = changed + reply
  elseif reply.err and not string.find(reply.err, 'non local key', 1, true) then
    return reply
  elseif reply.err then
    table.insert(left, (i - 4) / step)
  end
end
return {{changed, left}}
"""

SET_RECORD = f"""{FAULT_OF}{SOURCE_OF}
local held = source_of(KEYS[1])
local fault = fault_of(held, ARGV[2], '0')
if fault then return redis.error_reply(fault) end
if not held and ARGV[3] == '1' then return redis.error_reply('ERR it{LOST}') end
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""


def begin(record: bytes, mark: str, files: str) -> Command:
    """Claim a record for the load that will leave ``mark``: the rows of the table belong to that from then on.

    An error where the record names other than ``files``; "": whichever it names.
    """
    return Command("EVAL", record, packed("EVAL", SET_RECORD, 1, record, f"{CLAIMED}{mark}", files, 0))


def end(record: bytes, mark: str, files: str) -> Command:
    """Leave ``mark`` in a record, unless it is gone by now, or another load has claimed it for other than ``files``."""
    return Command("EVAL", record, packed("EVAL", SET_RECORD, 1, record, mark, files, 1))


def records_by_node(topology: "RedisTopology", records: Iterable[bytes]) -> Mapping[object, bytes]:
    """One of the names of ``records`` that each node holds."""
    return {topology.node(record)[0]: record for record in records}


def change(
    verb: str, record: bytes, writer: Writer, names: NDArray[np.uint8], values: NDArray[np.uint8] | None
) -> Command:
    """Change rows of one node, unless ``record``, on the same one, names another source than the ``writer`` goes by.

    Args:
        verb: ``"SET"``, or ``"UNLINK"``. The reply is how many rows this removed, and the places of those rows of
            ``names`` that are left to commands of their own, which follow slots that move.
        record: its name.
        writer: who changes them.
        names: uint8[N, ...], of the rows.
        values: uint8[N, ...], where they are set.
    """
    words = [as_words(names)] + ([] if values is None else [as_words(values)])
    head = packed_words("EVAL", CHANGE, 1, record, verb, writer.files, int(writer.is_slowest))
    count = 7 + len(names) * len(words)
    return Command("EVAL", record, b"*%d\r\n" % count + head + np.concatenate(words, axis=1).tobytes())


def writer_of(records: Sequence[bytes | None] | None, is_slowest: bool) -> Writer:
    """Who a process is that has seen those ``records``."""
    known = next((record for record in records or () if record is not None), None)
    return Writer("") if known is None else Writer(files_and_form(known), is_slowest=is_slowest)
