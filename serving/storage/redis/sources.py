"""Whose rows a table in Redis has: what a record of a load says of their files, their form and their partitions.

A record begins with ``<digest of the files>[+<replaced>][:<form>][+changed] <load>``. The name of a load of partitions
ends in how many there are, ``of16`` say, for who looks into another number of them finds no key where it lies, and
in seals (``redis_seals``). Loads of older versions have no such end.
"""

import re
from typing import NamedTuple, get_args

from kernels.host import RowDtype
from serving.storage.store import CHANGED, files_of

# What the record of a load says where the rows are narrow.
FORMS = tuple(f":{one}" for one in get_args(RowDtype) if one != "fp32")

# Where a process goes by other files, another form or another number than a record says, the reason to refuse it.
FAULT_OF = """
local function fault_of(held, files, partitions)
  local said, load = string.match(held or '', '^(.*) (%S*)$')
  if not said then return end
  said = string.gsub(said, '%+changed$', '')
  local form = string.match(said, ':%a+%d+$') or ''
  local held_files = string.match(string.sub(said, 1, #said - #form), '^[^+]*') .. form
  if files ~= '' and held_files ~= files then
    return 'ERR its rows come from ' .. held .. ', those to be changed belong to ' .. files
  end
  local number = string.match(load, '^%x+of(%d+)')
  if number and number ~= partitions then
    return 'ERR its rows lie in one of ' .. number .. ' partitions, those to be changed in one of ' .. partitions
  end
end
"""
_PARTITIONS = re.compile(rb"[0-9a-f]+of(\d+)")


class Writer(NamedTuple):
    """Who changes rows of a partition, as far as it counts for whether he may.

    Attributes:
        files: the files that he goes by, as ``files_and_form`` has it; "" where he knows of no record.
        partitions: how many the table has to him; 0 where it has none.
        refilling: the name of his load that brings back lost rows, "" without one; its claims do not keep him out.
        is_slowest: nothing behind Redis has the rows: what is lost is not to be changed.
    """

    files: str
    partitions: int = 0
    refilling: str = ""
    is_slowest: bool = False


def files_and_form(record: bytes) -> str:
    """The files that a record names, whatever changed since, and the form of the rows where that is narrow."""
    said = record.rpartition(b" ")[0].decode().removesuffix(CHANGED)
    form = next((one for one in FORMS if said.endswith(one)), "")
    return files_of(said.removesuffix(form)) + form


def partitions_of(record: bytes) -> int | None:
    """How many partitions a record says that the table has; None where an older version wrote it."""
    match = _PARTITIONS.match(record.rpartition(b" ")[2])
    return None if match is None else int(match[1])
