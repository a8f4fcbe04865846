"""`hotrow pull` from fsspec's file systems: one in memory, and S3 of a local server."""

import json
import os
import shutil
import sys

import pytest

from serving.cli.main import main
from serving.model.manifest import MANIFEST_NAME
from serving.repository import ModelRepository, remote
from tests.tools.tiny_model import TinyModel

fsspec = pytest.importorskip("fsspec", reason="the extra s3 is not installed")
MODEL = TinyModel()
URL = "memory://bucket/models"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Two versions of a model and one of another, on this machine."""
    folder = tmp_path_factory.mktemp("originals")
    for name, number in (("ctr", 1), ("ctr", 2), ("other", 1)):
        MODEL.write(folder, name, number)
    (folder / "ctr" / "config.pbtxt").write_text('name: "ctr"\n')
    return folder


@pytest.fixture
def bucket(originals):
    """The same versions in memory."""
    files = fsspec.filesystem("memory")
    files.put(str(originals), "/bucket/models", recursive=True)
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def contents(folder):
    """Every file of the versions in a folder, without hidden files."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = ((path, path.relative_to(folder).as_posix()) for path in files)
    return {name: path.read_bytes() for path, name in names if not name.startswith(".")}


def pulled(folder, *options, url=URL):
    return main(["pull", url, str(folder), *options])


def test_the_folder_has_every_file_of_the_bucket_and_can_be_served(bucket, originals, tmp_path, capsys):
    assert pulled(tmp_path / "models") == 0

    assert contents(tmp_path / "models") == contents(originals)
    with ModelRepository(tmp_path / "models") as repository:
        repository.load()
        assert sorted(repository.models()) == ["ctr", "other"]
    assert sorted(line.partition(":")[0] for line in capsys.readouterr().out.splitlines()) == [
        "ctr/1",
        "ctr/2",
        "other/1",
    ]


def test_what_is_there_is_not_copied_again(bucket, tmp_path, capsys, monkeypatch):
    pulled(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(remote.RemoteRepository, "copy", None)

    assert pulled(tmp_path) == 0
    assert capsys.readouterr().out == ""


def test_a_replaced_version_is_replaced_and_a_removed_version_is_removed(bucket, tmp_path, capsys):
    MODEL.write(tmp_path / "own", "mine", 7)
    folder = tmp_path / "own"
    pulled(folder)
    TinyModel(seed=9).write(tmp_path / "new", "ctr", 2)
    bucket.rm("/bucket/models/ctr", recursive=True)
    bucket.put(str(tmp_path / "new" / "ctr"), "/bucket/models/ctr", recursive=True)
    capsys.readouterr()

    assert pulled(folder) == 0

    assert "ctr/1: removed, because memory://bucket/models has it no more" in capsys.readouterr().out
    assert not (folder / "ctr" / "1").exists()
    assert contents(folder / "ctr" / "2") == contents(tmp_path / "new" / "ctr" / "2")
    assert (folder / "mine" / "7" / MANIFEST_NAME).is_file()  # it was never a copy


def test_a_version_without_a_manifest_and_odd_names_are_left_out(bucket, tmp_path):
    bucket.rm(f"/bucket/models/ctr/2/{MANIFEST_NAME}")
    for odd in ("ctr/x", "ctr/02", "ctr/-1", ".hidden/1", "st ats/1"):
        bucket.pipe(f"/bucket/models/{odd}/{MANIFEST_NAME}", b"{}")

    assert pulled(tmp_path) == 0

    assert sorted(name.rsplit("/", 1)[0] for name in contents(tmp_path) if name.endswith(MANIFEST_NAME)) == [
        "ctr/1",
        "other/1",
    ]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(lambda file: file[:-1], "expected 64 bytes, found 63", id="short"),
        pytest.param(lambda file: file + b"x", "more than the 64 bytes of the manifest", id="long"),
        pytest.param(lambda file: b"x" + file[1:], "expected SHA-256", id="other bytes"),
    ],
)
def test_a_damaged_file_keeps_its_version_out_and_the_others_come(bucket, tmp_path, capsys, spoil, expected):
    path = "/bucket/models/ctr/2/dense.model"
    bucket.pipe(path, spoil(bucket.cat(path)))

    assert pulled(tmp_path) == 1

    assert expected in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "ctr")) == ["1", "config.pbtxt"]
    assert (tmp_path / "other" / "1").is_dir()


def test_a_missing_file_keeps_its_version_out(bucket, tmp_path, capsys):
    bucket.rm("/bucket/models/ctr/2/dense.model")

    assert pulled(tmp_path) == 1
    assert "ctr/2/dense.model: named by the manifest, but missing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../../outside", "/etc/outside", "a/../../outside"])
def test_a_manifest_cannot_name_a_file_outside_of_its_version(bucket, tmp_path, capsys, name):
    manifest = json.loads(bucket.cat(f"/bucket/models/ctr/2/{MANIFEST_NAME}"))
    manifest["files"] = {name: {"size_bytes": 1, "sha256": "0" * 64}}
    bucket.pipe(f"/bucket/models/ctr/2/{MANIFEST_NAME}", json.dumps(manifest).encode())

    assert pulled(tmp_path / "models") == 1

    assert "is outside of the version" in capsys.readouterr().err
    assert not list(tmp_path.rglob("outside"))


def test_a_version_that_is_replaced_during_the_copy_is_not_taken(bucket, tmp_path, capsys, monkeypatch):
    copy = remote.RemoteRepository.copy

    def replaced(self, name, path, size_bytes):
        copy(self, name, path, size_bytes)
        if name == "ctr/2/dense.model":
            bucket.pipe(f"/bucket/models/ctr/2/{MANIFEST_NAME}", b"{}")

    monkeypatch.setattr(remote.RemoteRepository, "copy", replaced)

    assert pulled(tmp_path) == 1
    assert "its manifest has changed during the copy" in capsys.readouterr().err
    assert not (tmp_path / "ctr" / "2").exists()


def test_a_bucket_that_is_away_leaves_what_is_there(bucket, tmp_path, capsys, monkeypatch):
    pulled(tmp_path)
    before = contents(tmp_path)

    def away(*_, **__):
        raise RuntimeError("Could not connect to the endpoint")

    bucket.pipe(f"/bucket/models/ctr/3/{MANIFEST_NAME}", b"{}")
    for call in ("glob", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(type(bucket), call, away)
            assert pulled(tmp_path) == 1
        assert "cannot be read: RuntimeError: Could not connect to the endpoint" in capsys.readouterr().err
    bucket.rm("/bucket/models", recursive=True)
    assert pulled(tmp_path) == 1  # an empty bucket removes nothing
    assert f"{URL}: no version with a manifest.json" in capsys.readouterr().err

    assert contents(tmp_path) == before


def test_a_version_that_is_too_large_is_not_copied(bucket, tmp_path, capsys, monkeypatch):
    assert pulled(tmp_path, "--max-bytes", "1000") == 1
    assert "the copies would take" in capsys.readouterr().err

    free = shutil.disk_usage(tmp_path)._replace(free=remote._SPARE_BYTES + 10)
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: free)
    assert pulled(tmp_path) == 1
    assert "bytes, and 10 are free" in capsys.readouterr().err
    assert not contents(tmp_path)


def test_a_version_of_somebody_else_is_not_replaced(bucket, tmp_path, capsys):
    TinyModel(seed=3).write(tmp_path, "ctr", 2)
    before = contents(tmp_path)

    assert pulled(tmp_path) == 1

    assert f"{tmp_path}/ctr/2: is no copy of {URL}/ctr/2, so it stays" in capsys.readouterr().err
    assert contents(tmp_path).items() >= before.items()


def test_two_copies_at_a_time_are_refused(bucket, tmp_path, capsys):
    with remote._locked(tmp_path):
        assert pulled(tmp_path) == 1

    assert f"{tmp_path}: another process copies into it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("models", "expected a URL such as s3://bucket/models"),
        ("s3://", "expected a URL such as s3://bucket/models"),
        ("s3://key:secret@bucket/models", "the URL has a user or a password; credentials come from the environment"),
        ("nonsense://bucket/models", "cannot be read: ValueError: Protocol not known: nonsense"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(tmp_path, capsys, url, expected):
    assert pulled(tmp_path, url=url) == 1

    error = capsys.readouterr().err
    assert expected in error
    assert "secret" not in error


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)

    assert pulled(tmp_path, url="s3://bucket/models") == 1
    assert "hotrow[s3]" in capsys.readouterr().err


@pytest.mark.slow
def test_versions_are_copied_from_s3(originals, tmp_path, monkeypatch, capsys):
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed").ThreadedMotoServer(
        port=0, verbose=False
    )
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            monkeypatch.setenv(name, value)
        files = fsspec.filesystem("s3")
        files.mkdir("bucket")
        files.put(str(originals) + "/", "bucket/models/", recursive=True)

        assert pulled(tmp_path / "models", url="s3://bucket/models") == 0
        assert contents(tmp_path / "models") == contents(originals)
        files.rm("bucket/models/ctr/1", recursive=True)
        assert pulled(tmp_path / "models", url="s3://bucket/models") == 0
        assert not (tmp_path / "models" / "ctr" / "1").exists()
    finally:
        server.stop()
    before = contents(tmp_path / "models")

    assert pulled(tmp_path / "models", url="s3://bucket/models") == 1
    assert "s3://bucket/models: cannot be read: " in capsys.readouterr().err
    assert contents(tmp_path / "models") == before
