"""Embedding servers and a worker in this process, and the sums that a plain network would do with their rows."""

import json
import os
import queue
import socket
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from training.persia.config import EmbeddingConfig, Feature, read_embedding_config
from training.persia.ctx import Backend
from training.persia.embedding_server import METHODS, EmbeddingServer
from training.persia.embedding_worker import EmbeddingWorker
from training.persia.signs import farmhash64
from training.persia.wire import Cluster, Message, RoleError, Server, decode, encode, peers

SGD = {"rule": "sgd", "initial_states": [], "parameters": [0.0, 0.0, 0.0], "learning_rate": 0.5, "weight_decay": 0.0}


class Direct:
    """A peer in this process. Messages become bytes and messages again."""

    def __init__(self, role):
        self.role = role

    def start(self, method, arrays=None, **facts):
        message = decode(encode(Message(arrays or {}, facts)))[0]
        answer = decode(encode(getattr(self.role, method)(message)))[0]
        return type("Answer", (), {"result": staticmethod(lambda: answer)})

    def call(self, method, arrays=None, **facts):
        return self.start(method, arrays, **facts).result()


def feature(name, group, dim=3, bits=8, **changes):
    """A feature in a group, which is a number from 1."""
    settings = {
        "is_summed": True,
        "sample_fixed_size": 3,
        "has_sqrt_scaling": False,
        "hash_stack_rounds": 0,
        "hash_stack_size": 0,
    }
    settings.update(changes)
    return Feature(name, f"group{group}", dim, **settings, prefix=group << 64 - bits, spacing=(1 << 64 - bits) - 1)


FEATURES = (
    feature("plain", 1),
    feature("root", 2, has_sqrt_scaling=True),
    feature("same rows", 1, has_sqrt_scaling=True),
    feature("stacked", 3, dim=2, hash_stack_rounds=2, hash_stack_size=5, has_sqrt_scaling=True),
    feature("raw", 4, dim=2, is_summed=False),
    feature("raw stacked", 5, dim=2, is_summed=False, hash_stack_rounds=2, hash_stack_size=3, has_sqrt_scaling=True),
)
CONFIG = EmbeddingConfig({one.name: one for one in FEATURES})


def start(servers, config=CONFIG, capacity=10**6, **settings):
    """Return embedding servers, and a worker that knows them."""
    facts = {"optimizer": SGD, "initialization": [-0.01, 0.01], "admit_probability": 1.0, "weight_bound": 10.0}
    facts.update(settings)
    roles = [EmbeddingServer(config, capacity, number, servers) for number in range(servers)]
    peers = [Direct(role) for role in roles]
    for peer in peers:
        peer.call("configure", **json.loads(json.dumps(facts)))
    return peers, Direct(EmbeddingWorker(config, peers))


def put(worker, number, bags):
    """Send the signs of a batch, ``bags`` by feature."""
    arrays = {}
    for name, of_feature in bags.items():
        arrays[f"signs {name}"] = np.array([sign for bag in of_feature for sign in bag], np.uint64)
        arrays[f"row_ptrs {name}"] = np.cumsum([0, *map(len, of_feature)])
    worker.call("put", arrays, number=number, features=list(bags))


def names_of_rows(one, sign):
    """The rows that a sign reads, as names of this test: the group and the sign or the bucket."""
    if not one.hash_stack_rounds:
        return [(one.group, sign % one.spacing)]
    names = []
    for number in range(one.hash_stack_rounds):
        sign = int(farmhash64(np.array([sign], np.uint64))[0])
        names.append((one.group, sign % one.hash_stack_size + number * one.hash_stack_size))
    return names


def key_of(one, name):
    """The key of such a row."""
    return ((name[1] + one.prefix) ^ 2**63) - (2**64 if (name[1] + one.prefix) ^ 2**63 >= 2**63 else 0)


class Plain:
    """The rows as leaves of PyTorch in float64, and plain sums of them."""

    def __init__(self, servers):
        self.rows = {}
        self._servers = servers

    def row(self, one, name):
        """Return a row. Its first weights are what the servers have."""
        if name not in self.rows:
            key = np.array([key_of(one, name)])
            for server in self._servers:
                table = server.role._tables[one.dim]
                found = table.find(key)
                if found[0] >= 0:
                    weights = table.read(found)[1][0]
                    self.rows[name] = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
        return self.rows[name]

    def bag(self, one, signs):
        """Combine the rows of a bag of signs."""
        rows = [self.row(one, name) for sign in signs for name in names_of_rows(one, sign)]
        total = sum(rows, torch.zeros(one.dim, dtype=torch.float64))
        return total / max(1, len(rows)) ** 0.5 if one.has_sqrt_scaling else total

    def vectors(self, one, bags):
        """Return [B, D] of a summed feature, and [B, sample_fixed_size, D + 1] of a raw feature."""
        if one.is_summed:
            return torch.stack([self.bag(one, bag) for bag in bags])
        missing = torch.zeros(one.dim + 1, dtype=torch.float64)
        samples = []
        for bag in bags:
            rows = [torch.cat([self.bag(one, [sign]), torch.ones(1)]) for sign in bag[: one.sample_fixed_size]]
            samples.append(torch.stack([*rows, *[missing] * (one.sample_fixed_size - len(rows))]))
        return torch.stack(samples)


@contextmanager
def served(folder, slots, workers=1, servers=1, groups=None, capacity=10**6, checkpoint=None):
    """Serve embedding roles from threads of this process, and yield their cluster.

    The environment names it, so ``TrainCtx`` finds it.
    """
    config, settings = folder / "embedding_config.yml", folder / "global_config.yml"
    config.write_text(json.dumps({"slots_config": slots, "feature_groups": groups or {}}))
    settings.write_text(json.dumps({"embedding_parameter_server_config": {"capacity": capacity}}))
    with ExitStack() as held:
        addresses = [held.enter_context(free_address()) for _ in range(workers + servers + 1)]
        at_servers, at_workers = tuple(addresses[:servers]), tuple(addresses[servers:-1])
        place = None if checkpoint is None else str(checkpoint)
        cluster = Cluster(os.getpid(), str(config), str(settings), at_servers, at_workers, addresses[-1], place)
        features = read_embedding_config(config)
        roles = []
        for number, address in enumerate(at_servers):
            roles.append(EmbeddingServer(features, capacity, number, servers))
            methods = {name: getattr(roles[-1], name) for name in METHODS}
            held.callback(Server(address, methods).stop)
        for address in at_workers:
            to_servers = peers("embedding server", at_servers)
            roles.append(EmbeddingWorker(features, to_servers))
            methods = {name: partial(_call, roles[-1], name) for name in ("put", "look_up", "update")}
            for peer in to_servers:
                held.callback(peer.close)
            held.callback(Server(address, methods).stop)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.environment().items():
                patch.setenv(name, value)
            patch.setenv("TRAINER_PORT", addresses[-1].rpartition(":")[2])
            yield Served(cluster, roles[:servers], roles[servers:])


class Served(NamedTuple):
    """Roles that listen."""

    cluster: Cluster
    servers: list
    workers: list

    @contextmanager
    def loading(self, batches):
        """Send batches from a thread, and then the end."""
        errors = queue.SimpleQueue()

        def load():
            try:
                backend = Backend(self.cluster)
                for batch in batches:
                    backend.send_data(batch)
                backend._nn_worker.call("finish")
            except RoleError as err:
                errors.put(err)

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        yield errors
        thread.join(30)
        assert not thread.is_alive()

    def row(self, one, sign):
        """Return the weights of a sign of a feature without a hash stack, or None."""
        key = np.array([key_of(one, (one.group, sign % one.spacing))])
        for server in self.servers:
            found = server._tables[one.dim].find(key)
            if found[0] >= 0:
                return server._tables[one.dim].read(found)[1][0]
        return None


@contextmanager
def free_address():
    """Hold a port on which another socket may listen."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def _call(role, method, message):
    """Call what the role has under this name now, so that a test can replace it."""
    return getattr(role, method)(message)
