import hashlib
import json
import os
import re

import pytest

from serving.errors import ModelFileError
from serving.model.manifest import FileRecord, verify_manifest, write_manifest
from tests.serving.ordinary_rights import ordinary_rights


@pytest.fixture
def version(tmp_path):
    folder = tmp_path / "1"
    (folder / "ad_id").mkdir(parents=True)
    (folder / "graph.json").write_bytes(b"{}")
    (folder / "ad_id" / "key").write_bytes(b"12345678")
    (folder / "ad_id" / "emb_vector").write_bytes(b"abcdefgh")
    (folder / "empty").write_bytes(b"")
    write_manifest(folder, "dcn", 1)
    return folder


def edit_manifest(version, edit):
    document = json.loads((version / "manifest.json").read_text())
    edit(document)
    (version / "manifest.json").write_text(json.dumps(document))


def test_a_manifest_has_the_size_and_hash_of_every_other_file(version):
    manifest = verify_manifest(version)

    assert (manifest.model, manifest.version) == ("dcn", 1)
    assert manifest.files == {
        name: FileRecord(len(content), hashlib.sha256(content).hexdigest())
        for name, content in {
            "ad_id/emb_vector": b"abcdefgh",
            "ad_id/key": b"12345678",
            "empty": b"",
            "graph.json": b"{}",
        }.items()
    }


def test_the_manifest_is_the_documented_json(version):
    document = json.loads((version / "manifest.json").read_text())

    assert document | {"files": None} == {"format": 1, "model": "dcn", "version": 1, "files": None}
    assert document["files"]["empty"] == {"size_bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}


def test_bytecode_left_by_python_is_ignored(version):
    (version / "__pycache__").mkdir()
    (version / "__pycache__" / "model.pyc").write_bytes(b"")

    verify_manifest(version)


def test_a_folder_in_the_place_of_a_file_is_named(version):
    (version / "ad_id" / "key").unlink()
    (version / "ad_id" / "key").mkdir()

    with pytest.raises(ModelFileError, match=r"ad_id/key: named by the manifest, but a folder"):
        verify_manifest(version)


def test_a_missing_file_is_named(version):
    (version / "ad_id" / "key").unlink()

    with pytest.raises(ModelFileError, match=r"ad_id/key: named by the manifest, but missing"):
        verify_manifest(version, full=False)


@pytest.mark.parametrize(("mode", "path"), [(0, "ad_id"), (0o444, "ad_id/.*")], ids=["not listed", "not entered"])
def test_an_unreadable_folder_is_named(version, mode, path):
    (version / "ad_id").chmod(mode)

    with ordinary_rights(), pytest.raises(ModelFileError, match=rf"/{path}: cannot be read: Permission denied"):
        verify_manifest(version, full=False)
    (version / "ad_id").chmod(0o700)


def test_an_additional_file_is_named(version):
    (version / "ad_id" / "slot_id").write_bytes(b"")

    with pytest.raises(ModelFileError, match=r"ad_id/slot_id: not named by the manifest"):
        verify_manifest(version, full=False)


@pytest.mark.parametrize("content", [b"1234567", b"123456789", b""])
def test_a_file_of_another_size_is_named_with_both_sizes(version, content):
    (version / "ad_id" / "key").write_bytes(content)

    with pytest.raises(ModelFileError, match=rf"ad_id/key: expected 8 bytes, found {len(content)}$"):
        verify_manifest(version, full=False)


def test_a_corrupted_byte_is_found_by_the_full_check_only(version):
    (version / "ad_id" / "key").write_bytes(b"12345677")

    verify_manifest(version, full=False)
    with pytest.raises(ModelFileError) as caught:
        verify_manifest(version)

    expected, found = (hashlib.sha256(content).hexdigest() for content in (b"12345678", b"12345677"))
    assert str(caught.value) == f"{version}/ad_id/key: expected SHA-256 {expected}, found {found}"


def test_swapped_files_of_one_size_are_found(version):
    (version / "ad_id" / "key").rename(version / "swap")
    (version / "ad_id" / "emb_vector").rename(version / "ad_id" / "key")
    (version / "swap").rename(version / "ad_id" / "emb_vector")

    with pytest.raises(ModelFileError, match="emb_vector: expected SHA-256"):
        verify_manifest(version)


def test_a_pipe_is_refused_before_it_is_opened(version):
    os.mkfifo(version / "pipe")

    with pytest.raises(ModelFileError, match="pipe: not a regular file"):
        verify_manifest(version)
    with pytest.raises(ModelFileError, match="pipe: not a regular file"):
        write_manifest(version, "dcn", 1)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ModelFileError, match="absent: cannot be read: No such file"):
        write_manifest(tmp_path / "absent", "dcn", 1)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"manifest\.json: no such file"):
        verify_manifest(tmp_path)


def test_a_truncated_manifest_is_refused(version):
    content = (version / "manifest.json").read_bytes()
    (version / "manifest.json").write_bytes(content[: len(content) // 2])

    with pytest.raises(ModelFileError, match=r"manifest\.json: line \d+ column \d+: the text ends too early"):
        verify_manifest(version)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda m: m.update(format=2), "format: expected one of 1, got 2", id="format"),
        pytest.param(lambda m: m.pop("format"), "format: missing", id="no-format"),
        pytest.param(lambda m: m.pop("files"), "files: missing", id="no-files"),
        pytest.param(lambda m: m.update(model=""), 'model: expected a name, got ""', id="model"),
        pytest.param(lambda m: m.update(version=0), "version: expected an integer from 1", id="version"),
        pytest.param(
            lambda m: m["files"]["empty"].update(sha256="E3"), "files.empty.sha256: expected 64 hex", id="sha256"
        ),
        pytest.param(
            lambda m: m["files"]["empty"].update(size_bytes=-1),
            "files.empty.size_bytes: expected an integer from 0",
            id="size",
        ),
        pytest.param(lambda m: m["files"]["empty"].pop("sha256"), "files.empty.sha256: missing", id="no-sha256"),
    ],
)
def test_a_manifest_of_another_form_is_refused(version, edit, message):
    edit_manifest(version, edit)

    with pytest.raises(ModelFileError, match=re.escape(f"manifest.json: {message}")):
        verify_manifest(version)


def test_members_of_a_later_release_are_ignored_and_logged_once(version, caplog):
    edit_manifest(version, lambda m: (m.update(note="", more=[]), m["files"]["empty"].update(crc32c=0)))
    before = verify_manifest(version)

    assert verify_manifest(version) == before
    assert caplog.messages == [
        f"{version / 'manifest.json'}: ignored crc32c, more, note, which a later release of Hotrow may use"
    ]


def test_a_name_that_leads_out_of_the_folder_is_never_opened(version):
    (version.parent / "secret").write_bytes(b"")
    edit_manifest(version, lambda m: m["files"].update({"../secret": m["files"]["empty"]}))

    with pytest.raises(ModelFileError, match=r"\.\./secret: named by the manifest, but missing"):
        verify_manifest(version)
