"""Tables in Redis or a Redis Cluster, in HPS's layout. Source of the layout: HPS's Redis back-end, HugeCTR v24.06.

A table has ``num_partitions`` partitions. HPS's hash of a key says which partition holds it. For partition n of the
table ``<model>.<table>``, with the stem ``hps_et{hps_et.<model>.<table>/p<n>}``, Redis holds these keys. The braces
keep them on one node::

    <stem>v                         HPS's rows: a hash from a key's raw bytes to the row's float32 bytes
    <stem>t                         HPS's hash for its overflow policies
    <stem>.hotrow                   Hotrow's marker of the partition (``PartitionMarker``), a hash
    <stem>.hotrow.lease             the lease of the process that fills the partition
    <stem>.hotrow.removed           the keys that were removed while it was filled, a set
    <stem>.hotrow.evicting          the mark of the process that evicts rows of an overflowing partition
    <stem>v.hotrow.loading.<lease>  rows that will replace the partition; likewise for t

**As the source of truth**, what Redis holds is true. A partition without its marker has lost rows, so it is an error
and never an answer of defaults. Changes name the marker's generation, and Redis refuses them if it differs. The marker
of a partition also keeps how far it has come in each update log: see ``logs``.

**As a cache**, a partition answers only while it is valid:

- Every read of rows also reads the marker's generation. A generation that the process does not know is verified.
- Every reply comes with the ``run_id`` of its node. A node that is restarted, or a replica that takes over, has another
  ``run_id`` than the marker. Then the partition stays valid if its former node is still a master of the cluster: the
  slot was moved. It also stays valid if the table never changed and the partition has all rows of its load. Otherwise
  the node may have lost writes, and the partition is invalid. A process that has written to the table also compares
  the node with the node that has its writes. If another node takes a write and the slot was not moved, the partition is
  invalid: an old master may believe for a moment that it is still the master. A write while the slot moves makes the
  partition invalid too, because it is not known which node took the write.
- A partition that missed a write of this process is invalid. So is a partition that another process filled after this
  process had written to the table: that process may not have had the write.

An invalid partition is bypassed and refilled from the truth. A process that has written to the table refills the
partition itself. Other processes may use another process's refill. The lease lets one process refill at a time, and a
thread renews the lease. The process drops the old rows, adds rows whose keys are absent, and writes the marker. Writers
continue during the refill. Their rows are newer than the truth's, and adding never overwrites them. A key that is
removed during the refill is noted and not added again. While a partition is being filled, its marker has only
``filling``. Rows under such a marker are Hotrow's: the next start drops them.
"""

from serving.storage.redis.store import RedisStore

__all__ = ["RedisStore"]
