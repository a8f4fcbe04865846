"""Files that an earlier release wrote are opened as they are, and files of a later one, too; see ``write``."""

import base64
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import serving
from serving.config.model_directory import read_model_directory
from serving.parameter_server import ParameterServer
from serving.storage import Marker, open_snapshot
from serving.stream.log_state import LogState
from tests.serving.storage.earlier.write import NEW_KEY, ps_document
from tests.tools.tiny_model import TinyModel, flatten

FILES = Path(__file__).parent / "files"
ROWS = json.loads((FILES / "rows.json").read_text(encoding="utf-8"))
KEYS = np.arange(len(ROWS["user"]))


@pytest.fixture
def files(tmp_path):
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    return tmp_path


def with_members(raw, **members):
    """A document in JSON with more members."""
    return json.dumps(json.loads(raw) | members).encode()


def test_a_version_answers_as_it_did(files):
    small = TinyModel(rows=len(KEYS))
    dense, bags = small.sample_requests(4, seed=0)

    with serving.load_model(files / "models" / "tiny") as session:
        answers = session.predict(dense, *flatten(bags))

    assert np.allclose(answers, small.probabilities(dense, bags))


def test_a_snapshot_has_its_rows(files):
    with open_snapshot(files / "user.snapshot") as snapshot:
        rows = np.empty((KEYS.size, snapshot.dim), dtype=np.float32)
        assert snapshot.fetch(KEYS, rows).all()
    assert np.array_equal(rows, np.array(ROWS["user"], np.float32).astype(np.float16).astype(np.float32))


def test_tables_of_redis_and_rocksdb_are_served_without_a_load(files, redis_server, caplog):
    caplog.set_level(logging.INFO)
    with redis_server.client() as client:
        run_id = client.info("server")["run_id"]
        for key, values in json.loads((files / "redis.json").read_text(encoding="utf-8")).items():
            values = {base64.b64decode(name): base64.b64decode(value) for name, value in values.items()}
            if b"run_id" in values:
                values |= {b"run_id": run_id, b"of_a_later_release": 1}
            client.hset(base64.b64decode(key), mapping=values)
    (files / "ps.json").write_text(json.dumps(ps_document(redis_server.port)), encoding="utf-8")

    with ParameterServer.from_config(files / "ps.json") as server:
        config = server.load_model(read_model_directory(files / "models" / "tiny" / "1"))
        user, item = map(config.full_name, config.tables)
        assert server.lookup(user, np.append(KEYS, NEW_KEY))[0].tolist() == [*ROWS["user"], [1.0] * 4]
        assert server.lookup(item, KEYS)[0].tolist() == ROWS["item"]
        assert server.counters()[item].tiers[0].hits == KEYS.size

    assert f"loading {user}, 40 rows, into rocksdb" not in caplog.text
    assert "into rocksdb" not in caplog.text
    assert f"loading {item}" not in caplog.text
    ignored = "the marker of a table in Redis: ignored of_a_later_release, which a later release of Hotrow may use"
    assert caplog.messages.count(ignored) == 1


def test_a_marker_of_a_later_release_is_read_and_what_it_has_more_is_logged_once(caplog):
    marker = Marker("digest", 3, "fp16", True, ("redis",))

    assert [Marker.read(with_members(marker.write(), position=[7])) for _ in range(2)] == [marker] * 2
    assert caplog.messages == ["the marker of a table: ignored position, which a later release of Hotrow may use"]


def test_a_position_in_an_update_log_of_a_later_release_is_read(caplog):
    state = LogState("7", {"run/0": 3}, 5)

    assert LogState.read(with_members(state.write(), time_ms=1)) == state
    assert caplog.messages == [
        "the position of a table in an update log: ignored time_ms, which a later release of Hotrow may use"
    ]


def test_a_marker_of_an_earlier_release_may_have_less():
    assert Marker.read(b'{"format": 1, "digest": "digest"}') == Marker("digest")


@pytest.mark.parametrize("raw", [b"[]", b'{"format": 2, "digest": ""}', b'{"format": 1, "rows": 3}'])
def test_a_marker_of_another_format_is_refused(raw):
    with pytest.raises(ValueError, match="expected a marker"):
        Marker.read(raw)
