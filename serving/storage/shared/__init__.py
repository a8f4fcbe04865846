"""Tables in memory that the processes of one machine share: one copy, which one process writes and all read.

What lies where, in /dev/shm/<shared_memory_name>::

    users                        every process holds a shared flock; the last process gets it alone
    writer                       the writer holds an exclusive flock; the file has its process number, for messages
    <table>.table                a table with its marker (kernels.shared), published whole by a rename
    <table>.table.new            a table that is being filled
    <table>.table.redo, .reached  the last change that an update log brought: see ``redo``

Who may do what:

- The first process is the writer. It fills the tables, and it alone changes them.
- Every other process waits for the tables, reads the same copy and sees the writer's changes.
- When the writer ends, the other processes read on. The next process that starts, or that waits for a table, becomes
  the writer. The system releases locks when a process ends, however it ends.
- The tables outlive the writer. They are removed when the last process leaves, unless that process is killed. The next
  process then finds them.
- A table that the writer loads from other files is a new copy. Processes that have the old copy keep it until they load
  the table, too. A cache that missed a write is refilled in place, so its readers see the new rows.
- A process that unloads a model unmaps its tables. Their files stay, and still count as memory of the writer.
- A forked child has left: its calls raise an error.

The marker of a table is the digest of its files and whether rows were changed since.
"""

from serving.storage.shared.store import SharedMemoryStore, least_shared_bytes, shared_capacity

__all__ = ["SharedMemoryStore", "least_shared_bytes", "shared_capacity"]
