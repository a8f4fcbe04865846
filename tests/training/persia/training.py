"""A small training that tests share: batches, a network, a step."""

import os
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from tests.training.persia.cluster import Plain, put, start
from training.persia.ctx import TrainCtx
from training.persia.sparse.optim import SGD


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 + 3 + 2 + 10 * 4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, dense, sparse):
        return self.layers(torch.cat([*dense, *(one.flatten(1) for one in sparse)], dim=1))


def a_net():
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), 0.1)


def step(context, data, net, dense_optimizer, number=0):
    """Train on a batch, and return the loss."""
    (dense, sparse), target = context.prepare_features(data)
    loss = nn.functional.binary_cross_entropy_with_logits(net(dense, sparse), target)
    dense_optimizer.zero_grad()
    loss.backward()
    assert context.on_after_backward(1.0, number)
    dense_optimizer.step()
    return loss.item()


@contextmanager
def enter(staleness=1, queue=2, optimizer=None, scaler=None):
    """Enter a ``TrainCtx``. Its server, which lives as long as its process, ends too."""
    port = int(os.environ["TRAINER_PORT"])
    optimizer = SGD(0.5) if optimizer is None else optimizer
    with TrainCtx(scaler, optimizer, port, queue, embedding_staleness=staleness) as context:
        yield context
    context._server.stop()


def plain_losses(drawn, config):
    """Return the losses of the same training in plain PyTorch, in float64. Adagrad's rate is 0.1."""
    net = a_net()[0].double()
    dense_optimizer = torch.optim.SGD(net.parameters(), 0.1)
    servers, worker = start(1, config)
    for number, (_, bags, _) in enumerate(drawn):  # makes rows, which depend on their keys only
        put(worker, number, bags)
        worker.call("look_up", number=number)
    plain, sums, losses = Plain(servers), {}, []
    for dense, bags, target in drawn:
        sparse = [plain.vectors(one, bags[name]) for name, one in config.features.items()]
        output = net([torch.tensor(dense.astype(np.float32)).double()], sparse)
        loss = nn.functional.binary_cross_entropy_with_logits(output, torch.tensor(target).double())
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        for name, row in plain.rows.items():
            if row.grad is not None:
                sums[name] = sums.get(name, 0.01) + row.grad**2
                row.data -= 0.1 * row.grad / (sums[name].sqrt() + 1e-10)
                row.grad = None
        losses.append(loss.item())
    return losses
