"""Rows that arrive while a model is served: from a log of update messages into its tables, each message exactly once.

One thread per model reads the log, from the position that the tables have reached. A truth that outlives the process
keeps the position with the rows, for each table. After a crash the position is there only if all rows before it are.
Rows that came without it come again, which changes nothing: additions always come with their position. A truth in the
memory of this process starts at the position that the model's files include.

Some processes read a database that another process writes. Such a process reads the log, too. It shows each change to
its own readers until its view of the database has the change.

The reader never skips what it cannot take: while the log cannot be read, or the truth is full or away, the rows that
are there go on answering, and the model is degraded. Messages that no server could take are rejected and counted.
"""

from serving.parameter_server.updates.reader import ModelUpdates, UpdateStream

__all__ = ["ModelUpdates", "UpdateStream"]
