"""A ``ps.json`` of one model with two tables, and changes of its keys."""

import json

import pytest

from serving.config import read_ps_config
from tests.serving.conftest import TableSketch, WrittenModel

MODEL = {
    "model": "dcn",
    "sparse_files": ["model/0_sparse_10.model", "model/1_sparse_10.model"],
    "dense_file": "model/_dense_10.model",
    "network_file": "model/model.json",
    "embedding_table_names": ["user", "ad"],
}
PS = {
    "supportlonglong": True,
    "models": MODEL,  # written as a list
    "volatile_db": {"type": "hash_map"},
    "persistent_db": {"type": "rocks_db", "path": "db"},
    "update_source": {"type": "null"},
}


@pytest.fixture(scope="session")
def ps_folder(tmp_path_factory):
    """The folder of the ps.json and of its model."""
    folder = tmp_path_factory.mktemp("ps")
    sketches = [TableSketch(slots=3, dim=4), TableSketch(slots=2, dim=6)]
    WrittenModel(folder / "model", sketches, features=5, key_type="I64", seed=0, declare_key_type=True)
    for name, other in (("_dense_10.model", "other.model"), ("model.json", "other.json")):
        (folder / "model" / other).write_bytes((folder / "model" / name).read_bytes())
    return folder


@pytest.fixture
def write(ps_folder):
    """Return a function that writes the ps.json with other values: of the file's keys, or of an object's keys.

    A key whose value is ``...`` is left out.
    """

    def write(changes):
        document = dict(PS)
        for clause, change in changes.items():
            document[clause] = changed(PS[clause], change) if isinstance(change, dict) else change
        if isinstance(document["models"], dict):
            document["models"] = [document["models"]]
        file = ps_folder / "ps.json"
        file.write_text(json.dumps(changed(document, {})))
        return file

    return write


@pytest.fixture
def read(write):
    """Return a function that reads the ps.json with the changes of ``write``."""
    return lambda changes=None: read_ps_config(write(changes or {}))


def changed(values, change):
    return {key: value for key, value in (values | change).items() if value is not ...}


def in_model(**keys):
    return {"models": keys}


def in_ram(**keys):
    return {"volatile_db": keys}


def in_redis(**keys):
    return {"volatile_db": {"type": "redis_cluster", **keys}}


def in_shared_ram(**keys):
    return {"volatile_db": {"type": "multi_process_hash_map", **keys}}


def on_disk(**keys):
    return {"persistent_db": keys}
