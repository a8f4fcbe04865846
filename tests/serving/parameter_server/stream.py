"""A server that follows a folder of update messages, and messages with what they make of the rows."""

import time
from contextlib import contextmanager

import numpy as np
from hypothesis import strategies as st

from serving.config.models import StreamStart
from serving.parameter_server import ParameterServer
from serving.parameter_server.updates import UpdateStream
from serving.stream.folder import FolderSource
from serving.stream.message import Kind, UpdateMessage, encode
from tests.serving.small_server import KEYS, ROWS, held_by, model_of, write_model

RUN = "run-1"
STARTED = dict(zip(KEYS, ROWS.tolist(), strict=True))
MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([Kind.UPSERT, Kind.DELETE, Kind.ACCUMULATE]),
        st.lists(st.sampled_from([1, 2, 77, 78]), min_size=1, max_size=3),
        st.integers(-9, 9),
    ),
    min_size=1,
    max_size=8,
)


def write_streamed_model(folder):
    """Write the model of ``small_server``, and return it with a manifest that names a training run."""
    write_model(folder)
    return model_of(folder).model_copy(update={"stream": StreamStart(run=RUN)})


def messages_of(drawn):
    """Return what one publisher sends, and the rows that are then there by key."""
    expected = {key: np.array(row) for key, row in STARTED.items()}
    sent = []
    for number, (kind, keys, value) in enumerate(drawn):
        rows = None if kind is Kind.DELETE else np.full((len(keys), 3), value, np.float32)
        sent.append(message(kind, keys, rows, publisher="p", sequence=number))
        change_dict(expected, kind, keys, value)
    return sent, {key: row.tolist() for key, row in expected.items()}


def change_dict(expected, kind, keys, value):
    """Change rows as a message does."""
    for key in keys:
        if kind is Kind.DELETE:
            expected.pop(key, None)
        else:
            before = expected.get(key, np.zeros(3)) if kind is Kind.ACCUMULATE else 0
            expected[key] = (np.float32(before) + np.float32(value)) * np.ones(3, np.float32)


@contextmanager
def serving(model, log_folder, *stores, **options):
    stream = UpdateStream(lambda _: FolderSource(log_folder), poll_s=0.02, **options)
    with ParameterServer(stores, updates=stream) as server:
        server.load_model(model)
        yield server


def until(condition, limit_s=5.0):
    """Return whether the condition holds within a time."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            return False
        time.sleep(min(0.002 + waited_s / 8, 0.05))
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
