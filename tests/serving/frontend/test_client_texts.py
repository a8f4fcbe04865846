"""Errors for clients do not show where files are on the server."""

from pathlib import Path

import pytest

from serving.errors import RequestError, StoreError
from serving.frontend.client_texts import folders_of, message_of, without_folders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/srv/my models/ctr/1/graph.json: no such file", "ctr/1/graph.json: no such file"),
        ("model 'ctr': /srv/my models/ctr/config.pbtxt: line 1", "model 'ctr': ctr/config.pbtxt: line 1"),
        ("rocksdb: While open '/var/lib/hotrow/rows/12.sst': I/O error", "rocksdb: While open '12.sst': I/O error"),
        ("[Errno 2] No such file or directory: '/var/rows'", "[Errno 2] No such file or directory: 'rows'"),
        ("redis: 127.0.0.1:7000: timed out", "redis: 127.0.0.1:7000: timed out"),
        ("see http://host:8000/v2/models/ctr", "see http://host:8000/v2/models/ctr"),
        ("float32 and/or int8, 1/2", "float32 and/or int8, 1/2"),
    ],
)
def test_a_path_is_relative_to_the_repository_or_only_a_name(text, expected):
    assert without_folders(text, ("/srv/my models/",)) == expected


def test_every_form_of_a_repositorys_path_is_removed(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "ps.json").touch()
    (tmp_path / "link").symlink_to("models")
    monkeypatch.chdir(tmp_path)

    assert set(folders_of(Path("link"))) == {f"{tmp_path}/models/", f"{tmp_path}/link/", "link/"}
    assert folders_of(Path("link/ps.json")) == folders_of(Path("link"))


def test_an_error_of_a_request_keeps_what_the_client_sent():
    assert message_of(RequestError("tensor '/a/b': unknown")) == "tensor '/a/b': unknown"
    assert message_of(StoreError("rocksdb", "m.t", "/data/rows/LOCK: busy")) == "rocksdb: table 'm.t': LOCK: busy"
