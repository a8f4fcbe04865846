"""Tables in one RocksDB database.

What lies where, in the database's folder:

- A column family per table, named by HPS's tag ``hps_et.<table>``. Keys and values have HPS's layout
  (``serving.storage.hps_layout``), so Hotrow reads a database that HPS (HugeCTR v24.06) wrote. Values of a store with a
  ``row_dtype`` other than fp32 have a layout of Hotrow's own.
- A marker per table, at the key ``hotrow.table.<table>`` of the default column family, which HPS does not use. The
  marker is one JSON record, see ``serving.storage.marker.Marker``. While a load changes rows, the record has an empty
  digest, and the table counts as one without a marker.
- ``loading/``, the sorted files of a load, until RocksDB ingests them.

Who may do what:

- One process writes. Any number of processes read next to it with ``read_only``. They see the database as it was when
  they opened it, or follow the writer with ``catch_up_interval_ms``.
- A write returns when it is on the disk: write batches of at most ``max_batch_size`` rows, each whole or absent, then
  one fsync of the log. Flags of a marker go into the log without an fsync of their own, before the rows.
- A load either replaces a table or keeps the rows that are there. It first writes sorted files next to the database.
  Then it takes the marker away, ingests the files as one act, and writes the new marker. After a kill in between,
  the table has no marker, and the next load repairs it.
- A load over rows without a marker, such as HPS's, keeps every row that the files do not have. It logs this once.
- A checkpoint is a database. Its markers name no current cache, so a process that serves it refills its caches.
- A damaged marker, log, MANIFEST or block is an error that names the table or the file.
"""

from serving.storage.rocksdb.engine import recover_database
from serving.storage.rocksdb.store import RocksDbStore

__all__ = ["RocksDbStore", "recover_database"]
