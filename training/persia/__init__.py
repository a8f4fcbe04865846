"""Persia's training of sparse models: embeddings in a sharded parameter server. docs/persia.md lists the differences.

Each role is a process, and has a module:

- ``run`` starts all roles. When a role fails, ``run`` ends or restarts all roles.
- The data loader is the user's script. It sends the signs of each batch to an embedding worker, and the rest of the
  batch to the NN worker (``ctx.Backend``).
- An embedding worker (``embedding_worker``) turns signs into keys, gets the rows of the keys from the servers, and
  pools the rows. On the way back, it turns gradients of vectors into gradients of rows.
- An embedding server (``embedding_server``) holds a shard of the rows, and applies their optimizer.
- The NN worker is the user's script with the dense network (``nn_worker.TrainCtx``).
"""

from importlib.util import find_spec

from serving.errors import MissingExtraError

for _package in ("yaml", "torch"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "persia", "training.persia")
