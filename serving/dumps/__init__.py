"""Whole tables between storage tiers and files: HPS's ``.bin``, RocksDB's ``.sst``, HugeCTR's folders."""

from serving.dumps.formats import SUFFIXES
from serving.dumps.transfer import dump_table, load_table
from serving.parameter_server.table_files import Progress

__all__ = ["SUFFIXES", "Progress", "dump_table", "load_table"]
