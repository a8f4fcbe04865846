"""Persia's training of sparse models: embeddings in a sharded parameter server. docs/persia.md lists the differences.

The roles are processes, and each has a module:

- ``run`` starts all roles, and ends or restarts them when one fails.
- A data loader is the user's script. It sends the signs of each batch to an embedding worker, and the rest of the batch
  to the NN worker (``ctx.Backend``).
- An embedding worker (``embedding_worker``) turns signs into keys, gets their rows from the servers, and pools them. On
  the way back it splits gradients into those of rows.
- An embedding server (``embedding_server``) has a shard of the rows, and their optimizer.
- The NN worker is the user's script with the dense network (``nn_worker.TrainCtx``).
"""

from importlib.util import find_spec

from serving.errors import MissingExtraError

for _package in ("grpc", "tritonclient", "yaml", "torch"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "persia", "training.persia")
