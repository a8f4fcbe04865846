"""``hotrow checkpoint`` of a small repository's database."""

import json

import pytest

from serving.cli.main import main
from serving.repository import ModelRepository
from serving.storage import RocksDbStore
from tests.tools.tiny_model import TinyModel


@pytest.fixture
def ps(tmp_path):
    """A repository with its rows in a database."""

    TinyModel().write(tmp_path / "models")

    def write(persistent):
        file = tmp_path / "models" / "ps.json"
        volatile = {"type": "hash_map", "capacity_rows": 100}
        file.write_text(json.dumps({"supportlonglong": True, "volatile_db": volatile, "persistent_db": persistent}))
        return file

    return write


def serve_once(file):
    with ModelRepository(file.parent) as repository:
        repository.load()


ROCKSDB = {"type": "rocks_db", "path": "rows", "num_threads": 1}


def test_a_checkpoint_has_the_tables_and_can_be_served(ps, tmp_path, capsys):
    file = ps(ROCKSDB)
    serve_once(file)

    assert main(["checkpoint", str(file), str(tmp_path / "copy")]) == 0

    assert f"{tmp_path / 'copy'}: a copy of the database {tmp_path / 'models' / 'rows'}" in capsys.readouterr().out
    ps({**ROCKSDB, "path": str(tmp_path / "copy"), "read_only": True})
    serve_once(file)  # raises if a table is missing in the copy


def test_a_database_in_use_and_an_absent_database_are_refused(ps, tmp_path, capsys):
    file = ps(ROCKSDB)
    assert main(["checkpoint", str(file), str(tmp_path / "copy")]) == 1
    assert str(tmp_path / "models" / "rows") in (why := capsys.readouterr().err)
    assert "there is no database; loading models creates it" in why
    assert not (tmp_path / "models" / "rows").exists()

    store = RocksDbStore(tmp_path / "models" / "rows", num_threads=1)
    assert main(["checkpoint", str(file), str(tmp_path / "copy")]) == 1
    store.close()

    assert "already open for writing" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_an_existing_folder_is_named_and_stays_unchanged(ps, tmp_path, capsys):
    file = ps(ROCKSDB)
    serve_once(file)
    (tmp_path / "copy").mkdir()

    assert main(["checkpoint", str(file), str(tmp_path / "copy")]) == 1

    assert f"{tmp_path / 'copy'}: exists already" in capsys.readouterr().err
    assert not list((tmp_path / "copy").iterdir())


@pytest.mark.parametrize(("around", "fault"), [("absent", "does not exist"), ("file", "is not a folder")])
def test_a_folder_without_a_parent_is_refused_and_the_parent_is_named(ps, tmp_path, capsys, around, fault):
    file = ps(ROCKSDB)
    serve_once(file)
    (tmp_path / "file").touch()
    copy = tmp_path / around / "copy"

    assert main(["checkpoint", str(file), str(copy)]) == 1

    assert f"{copy}: {tmp_path / around} {fault}; create it first" in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()


def test_tiers_without_a_database_have_no_checkpoint(ps, tmp_path, capsys):
    file = ps({"type": "disabled"})

    assert main(["checkpoint", str(file), str(tmp_path / "copy")]) == 1

    assert f"{file}: persistent_db.type: expected rocks_db" in capsys.readouterr().err
