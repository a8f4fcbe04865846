"""`hotrow serve` of a repository that is not on this machine; here it is a folder that fsspec reads by URL."""

import json
import time
from argparse import Namespace

import pytest

from serving.cli.bucket import local_repository
from serving.cli.main import main
from tests.tools.tiny_model import TinyModel

pytest.importorskip("fsspec", reason="the extra s3 is not installed")


def wait_for_version(served, number):
    deadline_s = time.monotonic() + 60
    while json.loads(served.ask("/v2/models/tiny")[2])["versions"] != [number]:
        assert time.monotonic() < deadline_s, served.log.read_text()
        time.sleep(0.05)


def test_workers_follow_a_bucket_and_serve_their_copy_while_it_is_away(start, tmp_path):
    bucket, copy = tmp_path / "bucket", tmp_path / "copy"
    TinyModel(seed=1).write(bucket, "tiny", 1)
    follows = ("--copy-to", copy, "--model-control-mode", "poll", "--repository-poll-secs", "1")
    served = start(bucket.as_uri(), *map(str, follows), "--workers", "2")
    wait_for_version(served, "1")

    TinyModel(seed=2).write(bucket, "tiny", 2)
    wait_for_version(served, "2")
    bucket.rename(tmp_path / "away")
    while f"the copy of {bucket.as_uri()} failed" not in served.log.read_text():
        time.sleep(0.05)
    wait_for_version(served, "2")


def test_a_start_without_the_bucket_takes_the_earlier_copy(tmp_path, caplog):
    bucket, copy = tmp_path / "bucket", tmp_path / "copy"
    TinyModel().write(bucket, "tiny", 1)
    options = {"repository": bucket.as_uri(), "copy_to": copy, "copy_max_bytes": None, "model_control_mode": "none"}
    with local_repository(Namespace(**options), None):
        bucket.rename(tmp_path / "away")

    with local_repository(again := Namespace(**options), None):
        assert again.repository == copy
        assert (copy / "tiny" / "1").is_dir()
    assert f"the copy of {bucket.as_uri()} failed: {bucket.as_uri()}: no version with a manifest.json" in caplog.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["file:///absent/models"], "--copy-to: a repository in a bucket is served from a local copy"),
        (["file:///absent/models", "--copy-to", "{folder}"], "file:///absent/models: no version with a manifest.json"),
        (["{folder}", "--copy-to", "{folder}"], "--copy-to: needs the URL of a bucket as REPO"),
        (["{folder}", "--copy-max-bytes", "1MiB"], "--copy-max-bytes: needs the URL of a bucket as REPO"),
        (["s3://key:secret@bucket/models", "--copy-to", "{folder}"], "credentials come from the environment"),
    ],
)
def test_a_bucket_that_cannot_be_served_ends_the_start(tmp_path, capfd, options, expected):
    assert main(["serve", *(option.format(folder=tmp_path) for option in options), "--http-port", "0"]) in (1, 2)

    error = capfd.readouterr().err
    assert expected in error
    assert "secret" not in error
