"""The rows of tables in files and folders of any training system, as ``hotrow import``, ``load`` and ``publish`` read.

``open_table`` opens the rows of one table, and ``open_checkpoint`` what holds several tables by name.
"""

from serving.sources.checkpoint import Checkpoint
from serving.sources.opening import open_checkpoint, open_table
from serving.sources.rows import BareRows, TableRows

__all__ = ["BareRows", "Checkpoint", "TableRows", "open_checkpoint", "open_table"]
