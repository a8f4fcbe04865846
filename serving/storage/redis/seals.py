"""Seals (``WitnessStore``) in the records of loads: which state of which RocksDB the rows in Redis go with.

They end the name of the load, each behind an ``x``, which no other part of it has: ``<load>x<seal>x<seal>``. A load has
none at first. Older versions take a record with them for one of another load from the same files, which it might be.
"""

import re

from serving.storage.store import SEAL_CHARS

MOST_SEALS = 16  # those of databases that were heard of longest ago go: a folder that is made anew again and again

SEALED = f"""
local function sealed(load, seal, former)
  local name, rest = string.match(load, '^(%w*)(.*)$')
  local bare, seals = string.match(name, '^([^x]*)(.*)$')
  local held = string.match(seals, 'x(' .. string.sub(seal, 1, {SEAL_CHARS // 2}) .. '%x*)')
  if held and held ~= former then return load end
  seals = string.gsub(seals, 'x' .. (held or ' '), '') .. 'x' .. seal
  return bare .. string.sub(seals, -{MOST_SEALS * (SEAL_CHARS + 1)}) .. rest
end
"""
_SEAL = re.compile(rb"x([0-9a-f]{%d})" % SEAL_CHARS)


def seals_of(record: bytes | None) -> set[str]:
    """The seals in a record."""
    return set() if record is None else {seal.decode() for seal in _SEAL.findall(record.rpartition(b" ")[2])}


def without_seals(record: bytes) -> bytes:
    """A record as the load wrote it, but for what changed since."""
    said, space, load = record.rpartition(b" ")
    return said + space + _SEAL.sub(b"", load)
