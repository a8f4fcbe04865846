"""A server that follows a folder of update messages."""

import time
from contextlib import contextmanager

import numpy as np

from serving.parameter_server import ParameterServer
from serving.parameter_server.updates import UpdateStream
from serving.stream.folder import FolderSource
from serving.stream.message import UpdateMessage, encode
from tests.serving.small_server import held_by

RUN = "run-1"


@contextmanager
def serving(model, log_folder, *stores, **options):
    stream = UpdateStream(lambda _: FolderSource(log_folder), poll_s=0.02, **options)
    with ParameterServer(stores, updates=stream) as server:
        server.load_model(model)
        yield server


def until(condition, limit_s=5.0):
    """Return whether the condition holds within a time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True


def message(kind, keys, rows=None, **other):
    keys = np.array(keys, dtype=np.int64)
    rows = None if rows is None else np.array(rows, dtype=np.float32).reshape(keys.size, -1)
    return UpdateMessage(kind, "m", "t", keys, rows, **{"run": RUN, **other})


def send(log, *messages):
    for each in messages:
        log.send(each if isinstance(each, bytes) else encode(each), 0)
    log.flush()


def samples_of(server, model, name):
    return {
        dict(sample.labels).get("reason", dict(sample.labels).get("kind", "")): sample.value
        for sample in server.updates(model).samples()
        if sample.name == name
    }


def after(server, model, log_folder):
    """Wait until every message has been applied or refused, then return the rows of the last tier."""
    last = max(int(file.stem) for file in log_folder.iterdir())
    assert until(lambda: server.updates(model).positions == {"folder": str(last)})
    return held_by(server.stores[-1])
