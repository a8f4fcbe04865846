"""Write the files of an earlier release that later releases must open.

The files in ``files`` are of revision 12666de. They change only if a release may no longer open what it opened so far.
"""

import base64
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from serving.config.model_directory import read_model_directory
from serving.model.snapshot_model import write_snapshot_file
from serving.model.sparse_file import open_sparse
from serving.parameter_server import ParameterServer
from tests.tools.redis_servers import RedisServer
from tests.tools.tiny_model import TinyModel

NEW_KEY = 1000
NOT_KEPT = ("LOG*", "LOCK", "OPTIONS-*")


def ps_document(redis_port):
    """Redis as a cache in front of RocksDB."""
    redis = {"type": "redis_cluster", "address": f"127.0.0.1:{redis_port}", "num_partitions": 5}
    rocks = {"type": "rocks_db", "path": "rows"}
    return {"supportlonglong": True, "models": [], "volatile_db": redis, "persistent_db": rocks}


def write(folder):
    """Write a model, a snapshot, a RocksDB database, the keys of Redis, and the rows that all of them have."""
    small = TinyModel(rows=40)
    version = small.write(folder / "models", "tiny")
    table = open_sparse(version / "user", small.dim, "I64", "distributed")
    write_snapshot_file(folder / "user.snapshot", table, "fp16", table.digest())
    ps_json = folder / "models" / "ps.json"
    with TemporaryDirectory() as place:
        redis = RedisServer(Path(place))
        try:
            ps_json.write_text(json.dumps(ps_document(redis.port)), encoding="utf-8")
            with ParameterServer.from_config(ps_json) as server:
                model = server.load_model(read_model_directory(version))
                user = model.full_name(model.tables[0])
                server.insert(user, np.array([NEW_KEY]), np.ones((1, small.dim), np.float32))
            with redis.client() as client:
                kept = {key: client.hgetall(key) for key in sorted(client.keys())}
        finally:
            redis.kill()
    ps_json.unlink()
    (folder / "models" / "rows").rename(folder / "rows")
    for pattern in NOT_KEPT:
        for file in (folder / "rows").glob(pattern):
            file.unlink()
    text = {_text(key): {_text(name): _text(value) for name, value in of.items()} for key, of in kept.items()}
    (folder / "redis.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    rows = {name: small.vectors(name).tolist() for name in small.tables}
    (folder / "rows.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")


def _text(raw):
    return base64.b64encode(raw).decode()


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "files")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    write(target)
