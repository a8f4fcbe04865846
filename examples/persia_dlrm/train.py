"""The NN worker of Persia's get-started document. docs/persia.md lists what was repaired."""

import logging
import os
import sys

import torch
from model import DLRM
from torch.optim import SGD

from training.persia.ctx import TrainCtx
from training.persia.sparse.optim import Adagrad

logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
logger = logging.getLogger(__name__)

model = DLRM()
loss_fn = torch.nn.BCELoss()

# DENSE parameters optimizer
dense_optimizer = SGD(model.parameters(), lr=0.1)
# Sparse embedding optimizer
sparse_optimizer = Adagrad(lr=1e-3)

scaler = torch.cuda.amp.GradScaler()  # for half training

with TrainCtx(
    grad_scaler=scaler,
    sparse_optimizer=sparse_optimizer,
    port=int(os.environ["TRAINER_PORT"]),
    data_queue_size=int(os.environ["FORWARD_QUEUE_SIZE"]),
) as ctx:
    for batch_idx, data in enumerate(ctx.data_loader()):
        (dense, sparse), target = ctx.prepare_features(data)
        output, aux_loss = model(dense, sparse)
        bce_loss = loss_fn(output, target)
        loss = aux_loss + bce_loss

        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        finite = ctx.on_after_backward(scale, batch_idx)
        scaler.step(dense_optimizer)
        dense_optimizer.zero_grad()
        if finite:
            scaler.update()
        else:
            scaler.update(scale / 4.0)
        logger.info(f"current idx: {batch_idx} loss: {loss}")
    if ctx.checkpoint_folder is not None:  # not in the document: serve.py reads the checkpoint
        ctx.dump_checkpoint(model)
