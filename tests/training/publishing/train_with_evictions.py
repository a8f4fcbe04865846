"""Run by a test, which kills it: a training with evictions that goes on from its checkpoint.

Arguments: a folder, and the number of steps. Every process draws other samples, so a training that goes on takes
another way than the one that was killed. At the end, ``rows.npz`` has the rows.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from serving.model.atomic import atomic_write
from tests.training.publishing.conftest import Learner
from training.publishing import Publisher

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
learner, begin, state_file = Learner(seed=os.getpid()), 0, folder / "state.pt"
if state_file.exists():
    begin, state = torch.load(state_file)
    learner.collection.load_state_dict(state)
with Publisher(str(folder / "log"), "dcn", learner.collection, folder / "outbox") as publisher:
    if begin:
        publisher.resume(begin)
    for step in range(begin + 1, steps + 1):
        learner.learn()
        if step % 2 == 0:
            publisher.publish()
        if step % 5 == 0:
            publisher.flush()
        if step % 15 == 0:
            with publisher.checkpoint(step), atomic_write(state_file) as file:
                torch.save((step, learner.collection.state_dict()), file)
    publisher.publish()
rows = {name: table.rows() for name, table in learner.tables.items()}
with atomic_write(folder / "rows.npz") as file:
    np.savez(file, **{f"{name} {part}": array for name, both in rows.items() for part, array in enumerate(both)})
