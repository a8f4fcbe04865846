"""Tables in snapshots: files that open in milliseconds and that the processes of one machine share.

What lies where::

    <model's own file>                            a snapshot that ``hotrow snapshot`` wrote is served as it is
    <folder>/<table>/<source>.snapshot            a snapshot of any other model file; 16 digits of what it was made from
    <folder>/<table>/lock                         held, with flock, by the process that makes a snapshot
    RAM of the process                            each table's overlay: its inserted rows and evicted keys

Who may do what:

- Any process opens a snapshot that is there. It takes no lock, so the folder may be read-only.
- The first process that does not find its snapshot makes it. Other processes wait for it.
- A new snapshot replaces the snapshots of other sources. Processes that have them open keep them.
- Nobody writes to a snapshot. A change of rows stays in the process that made it, until the table is dropped.
"""

from serving.storage.snapshot.reader import SnapshotReader, open_snapshot
from serving.storage.snapshot.store import SnapshotStore

__all__ = ["SnapshotReader", "SnapshotStore", "open_snapshot"]
