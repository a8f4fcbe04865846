"""The parameter server: one source of truth, and caches in front of it.

The last tier of a table is its source of truth: RocksDB, or Redis alone, or RAM or a snapshot filled from the model's
files. Every other tier is a cache of the truth. A cache may miss rows, but it never invents a row.

A name is looked up once, by ``ParameterServer``. Below, every call gets a ``Table``, which has a ``TierTable`` for each
tier. In a cache this is a ``CacheTable``, whose states are in ``cache_state``. In the truth it is a ``TruthTable``.

- A lookup goes through ``lookup``, which asks the tiers of its tables, fastest first.
- A write goes through ``table.write``: to the truth, then to each cache.
- A cache that missed a write becomes invalid (``CacheTable.missed_write``). A background thread,
  ``LoadedModels._refill``, fills it again (``CacheTable.fill``).

**Loading.** A tier that outlives the process keeps one marker per table (``storage.marker.Marker``). If it names the
model's files, nothing is loaded, and rows written since are kept. If it names other files, the table is replaced as one
act. Without a marker, another program wrote the rows: the files' rows are inserted over them, and every other row is
kept. A cache is filled with the rows of the truth.

**Writing.** A write goes to the truth first. Then each cache takes it, and a cache that does not is invalid for that
table: it is bypassed until a background thread has filled it again. The truth's marker lists the caches that have every
write, ``current_caches``. A process empties the list before its first write. When the process ends, it adds its own
caches that took every write. A start fills each cache again that outlives a process and is not in the list.

**Promise.** Once a write is acknowledged, this process never answers with an older row. Other processes see the write
when they next read the tier that they share. A crash at any point loses no acknowledged write. If several processes
write the same rows of one Redis while it fails over, they may read different versions of such a row until it is next
written.
"""

from serving.parameter_server.counters import TableCounters, TierCounters
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.server import ParameterServer
from serving.parameter_server.tier_table import TierSettings

__all__ = ["FirstRows", "ParameterServer", "TableCounters", "TierCounters", "TierSettings"]
