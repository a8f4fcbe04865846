"""Make a model for the server from a checkpoint of train.py, and ask it about the first samples of train.txt.

Run: python examples/persia_dlrm/serve.py CHECKPOINTS REPOSITORY
"""

import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from model import DIM, DLRM, NUM_DENSE, NUM_SPARSE
from torch import nn

import hotrow
from training.persia.checkpoint import CheckpointFacts, checkpoints_in, write_tables
from training.persia.signs import request_keys


class Served(nn.Module):
    """The network with one input for each feature group, as the importer wants it."""

    def __init__(self, dlrm):
        super().__init__()
        self.dlrm = dlrm

    def forward(self, dense, *sparse):
        return self.dlrm([dense], list(sparse))[0]


checkpoint = checkpoints_in(sys.argv[1]).newest()
facts = CheckpointFacts.read(checkpoint)
config = facts.config
model = DLRM()
model.load_state_dict(torch.load(checkpoint / "dense.pt", weights_only=True)["model"])

with TemporaryDirectory() as name:
    folder = Path(name)
    write_tables(checkpoint, folder / "tables")
    inputs = (torch.zeros(2, NUM_DENSE), *(torch.zeros(2, DIM) for _ in range(NUM_SPARSE)))
    with warnings.catch_warnings(action="ignore"):  # the exporter warns of its own libraries
        torch.onnx.export(
            Served(model).eval(),
            inputs,
            folder / "net.onnx",
            input_names=["dense", *config.groups],
            dynamic_shapes={"dense": {0: "B"}, "sparse": tuple({0: "B"} for _ in range(NUM_SPARSE))},
            verbose=False,
        )
    plan = hotrow.plan_import(folder / "net.onnx", "sum", checkpoint=folder / "tables")
    version = hotrow.write_model(plan, sys.argv[2], "dlrm", run=facts.run, positions=facts.positions)

lines = [line.rstrip("\n").split("\t") for line in Path("train.txt").read_text(encoding="utf-8").splitlines()[:3]]
dense = np.array([[x or 0 for x in line[1:14]] for line in lines], np.float32)
signs = np.array([[int(x or "0", 16) for x in line[14:]] for line in lines], np.uint64)
keys = [request_keys(feature, signs[:, slot]) for slot, feature in enumerate(config.features.values())]
with hotrow.load_model(version) as session:
    answer = session.predict(dense, np.stack(keys, axis=1).reshape(-1), np.arange(signs.size + 1))
print(f"{version} answers", *(f"{chance:.3f}" for chance in answer[:, 0]))
