"""A parameter server whose tables lie in snapshots, from its ps.json on; and the commands around them."""

import json
import logging
import os
import re

import numpy as np
import pytest

from kernels.host import round_rows
from serving.cli.main import main
from serving.config import read_ps_config, read_repository
from serving.errors import ConfigError, ModelFileError, StoreError
from serving.model.snapshot_model import write_snapshot_file
from serving.model.sparse_file import open_sparse, write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.storage import MemoryStore, RocksDbStore, SnapshotStore, open_snapshot
from tests.serving.cli.refusals import why_serving_refuses
from tests.serving.ordinary_rights import ordinary_rights
from tests.serving.ps_files import write_ps
from tests.serving.table_names import with_digests
from tests.tools.tiny_model import TinyModel

MODEL = TinyModel(rows=500)


@pytest.fixture
def repository(tmp_path):
    """Write a model and a ps.json with this volatile_db; the repository's folder."""
    folder = tmp_path / "models"
    MODEL.write(folder, "a")

    def write(**tier):
        tiers = {"volatile_db": {"type": "snapshot", **tier}}
        write_ps(folder, **tiers)
        return folder

    return write


def serve(folder):
    return ParameterServer.from_config(read_repository(folder))


def assert_served(server, row_dtype="fp32"):
    for table in MODEL.tables:
        expected = MODEL.vectors(table)
        round_rows(expected, row_dtype, expected)
        rows, found = server.lookup(f"a@1.{table}", np.arange(MODEL.rows + 1))
        assert found.tolist() == [True] * MODEL.rows + [False]
        assert (rows[:-1] == expected).all()


def files_in(folder):
    return sorted(folder.rglob("*.snapshot"))


@pytest.mark.parametrize("row_dtype", ["fp32", "int8"])
def test_tables_are_served_from_files_that_the_next_start_finds(repository, tmp_path, row_dtype, caplog):
    caplog.set_level(logging.INFO)
    folder = repository(path=str(tmp_path / "snapshots"), row_dtype=row_dtype)

    with serve(folder) as server:
        assert_served(server, row_dtype)
        assert server.counters()[with_digests("a@1.user", tmp_path / "models")].hits == {"snapshot": MODEL.rows}
    written = caplog.text.count("writing ")
    with serve(folder) as server:
        assert_served(server, row_dtype)

    assert written == caplog.text.count("writing ") == len(files_in(tmp_path / "snapshots")) == 2


def test_answers_are_bit_for_bit_those_of_ram_before_and_after_changes(repository, tmp_path):
    config = read_repository(repository(path=str(tmp_path / "snapshots")))
    rng = np.random.default_rng(0)
    keys = rng.integers(0, MODEL.rows + 50, 400)
    row_ptrs = np.sort(np.concatenate(([0, 400], rng.integers(0, 400, 99))))
    weights = rng.random(400, dtype=np.float32)
    changed = rng.integers(0, MODEL.rows + 20, 25)
    with ParameterServer.from_config(config) as ours, ParameterServer([MemoryStore()]) as theirs:
        theirs.load_model(config.models[0])
        for change in (
            lambda server: None,
            lambda server: server.insert("a@1.item", changed, np.outer(changed, [1, 2, 3, 4]).astype(np.float32)),
            lambda server: server.evict("a@1.item", keys[:60:4].copy()),
        ):
            change(ours)
            change(theirs)
            for combiner in ("sum", "mean", "sqrtn"):
                for given in (None, weights):
                    mine, found = ours.lookup_pooled("a@1.item", keys, row_ptrs, combiner, given)
                    other, also_found = theirs.lookup_pooled("a@1.item", keys, row_ptrs, combiner, given)
                    assert (mine == other).all()
                    assert (found == also_found).all()


def test_a_table_of_a_model_may_be_a_snapshot_itself(repository, tmp_path):
    folder = repository()
    version = folder / "a" / "1"
    graph = json.loads((version / "graph.json").read_text())
    files = graph["inference"]["sparse_model_file"]
    for index, name in enumerate(files):
        write_snapshot_file(version / f"{name}.snapshot", open_sparse(version / name, MODEL.dim), "fp32", "00" * 32)
        files[index] = f"{name}.snapshot"
    (version / "graph.json").write_text(json.dumps(graph))
    (version / "manifest.json").unlink()

    with serve(folder) as server:
        assert_served(server)
    (folder / "ps.json").unlink()
    with serve(folder) as server:  # and RAM loads from it
        assert_served(server)
        (user,) = [counters for table, counters in server.counters().items() if table.endswith(".user")]
        assert user.hits == {"memory": MODEL.rows}
    assert main(["check", str(folder)]) == 0
    assert main(["plan", str(folder)]) == 0


def test_an_unloaded_model_keeps_its_files_and_an_erased_one_does_not(repository, tmp_path):
    config = read_repository(repository(path=str(tmp_path / "snapshots")))
    with ParameterServer.from_config(config) as server:
        server.unload_model("a")
        assert len(files_in(tmp_path / "snapshots")) == 2
        server.load_model(config.models[0])
        server.erase_model("a")
        assert files_in(tmp_path / "snapshots") == []
        server.load_model(config.models[0])
        assert_served(server)


def test_ram_before_snapshots_may_be_small(repository, tmp_path):
    config = read_repository(repository())
    with ParameterServer([MemoryStore(capacity_rows=100), SnapshotStore(tmp_path / "snapshots")]) as server:
        server.load_model(config.models[0])

        assert_served(server)
        assert server.counters()[with_digests("a@1.user", tmp_path / "models")].hits == {
            "memory": 50,  # two tables share the bound
            "snapshot": 450,
        }


@pytest.mark.parametrize(
    "tiers",
    [
        {"volatile_db": {"type": "hash_map"}},
        {"persistent_db": {"type": "rocks_db", "path": "rows"}},
        {"volatile_db": {"type": "snapshot", "path": "made", "row_dtype": "int8"}},
    ],
    ids=["RAM", "RocksDB", "a narrow snapshot"],
)
def test_a_damaged_row_of_a_snapshot_is_loaded_nowhere(repository, tmp_path, tiers):
    folder = repository()
    version = folder / "a" / "1"
    (version / "manifest.json").unlink()
    file = tmp_path / "item.snapshot"
    write_snapshot_file(file, open_sparse(version / "item", MODEL.dim), "fp32", "00" * 32)
    graph = json.loads((version / "graph.json").read_text())
    graph["inference"]["sparse_model_file"][list(MODEL.tables).index("item")] = str(file)
    (version / "graph.json").write_text(json.dumps(graph))
    write_ps(folder, **tiers)
    data = bytearray(file.read_bytes())
    row = data.index(MODEL.vectors("item")[7].tobytes())
    data[row + 3] ^= 0x20  # an exponent bit: another finite number
    file.write_bytes(data)

    with pytest.raises(ModelFileError, match=r"item\.snapshot: is damaged: the page"):
        serve(folder)
    assert main(["dump", str(folder), "a.item", str(tmp_path / "out")]) == 1
    assert main(["snapshot", str(file), str(tmp_path / "copy.snapshot")]) == 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "copy.snapshot").exists()


@pytest.mark.parametrize("protected", ["made", "made/a@1.user"], ids=["the folder", "a table"])
def test_a_folder_of_snapshots_that_may_not_be_entered_is_an_error_that_names_it(repository, tmp_path, protected):
    folder = repository(path=str(tmp_path / "made"))
    serve(folder).close()
    (tmp_path / with_digests(protected, folder)).chmod(0)
    reason = with_digests(r"made/a@1\.user: cannot be written: Permission denied", folder)

    with ordinary_rights(), pytest.raises(StoreError, match=reason):
        serve(folder)
    (tmp_path / with_digests(protected, folder)).chmod(0o700)


def test_a_store_behind_snapshots_is_refused(tmp_path):
    behind = RocksDbStore(tmp_path / "db", num_threads=1)

    with pytest.raises(ValueError, match="a store that serves model files must be the last"):
        ParameterServer([SnapshotStore(tmp_path / "snapshots"), behind])

    behind.close()


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"initialize_after_startup": False}, "initialize_after_startup: must be true if the type is snapshot"),
        ({"overlay_capacity_rows": -1}, "overlay_capacity_rows: input should be greater than or equal to 0"),
        (
            {"overlay_capacity_rows": 3_500_000_001},
            "overlay_capacity_rows: input should be less than or equal to 35000",
        ),
        ({"path": "a\0b"}, "volatile_db.path: expected text without the character NUL"),
        ({"path": ""}, "path: string should have at least 1 character"),
        ({"capacity_rows": 5}, "capacity_rows: only a hash_map has it, but the type is snapshot"),
        ({"timeout_ms": 5}, "timeout_ms: only a redis_cluster has it, but the type is snapshot"),
        ({"type": "hash_map", "path": "x"}, "path: only a snapshot has it, but the type is hash_map"),
        ({"type": "redis", "row_dtype_per_table": {}}, "row_dtype_per_table: only a hash_map or .* has it"),
    ],
)
def test_keys_that_make_no_sense_are_refused(repository, tier, message):
    with pytest.raises(ConfigError, match=message):
        read_ps_config(repository(**tier) / "ps.json")


def test_a_persistent_db_behind_snapshots_is_refused(repository):
    file = repository() / "ps.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "persistent_db": {"type": "rocks_db", "path": "rows"}}))

    with pytest.raises(ConfigError, match=r"persistent_db\.type: a volatile_db of the type snapshot holds every row"):
        read_ps_config(file)


def test_the_overlay_has_the_configured_size(repository, tmp_path):
    with serve(repository(path=str(tmp_path / "snapshots"), overlay_capacity_rows=3)) as server:
        server.insert("a@1.user", np.array([1, 2, 600]), np.ones((3, MODEL.dim), np.float32))

        reason = with_digests(r"'a@1\.user': the overlay: table is full: it holds 3 of 3 rows", tmp_path / "models")
        with pytest.raises(StoreError, match=reason):
            server.insert("a@1.user", np.array([4]), np.ones((1, MODEL.dim), np.float32))


@pytest.mark.parametrize("path", ["/proc/x", "file", "file/x", None])
def test_check_refuses_what_serving_would_in_the_same_words_and_makes_nothing(repository, tmp_path, capsys, path):
    (tmp_path / "file").touch()
    folder = repository(**({} if path is None else {"path": str(tmp_path / path)}))

    assert main(["check", str(folder)]) == 1

    assert capsys.readouterr().err.splitlines()[0] == f"hotrow check: {why_serving_refuses(folder)}" != "hotrow check: "
    assert sorted(os.listdir(tmp_path)) == ["file", "models"]


def test_check_says_that_snapshots_take_no_ram_and_leaves_no_folder(repository, tmp_path, capsys):
    assert main(["check", str(repository(path=str(tmp_path / "snapshots")))]) == 0

    assert "volatile_db is a snapshot" in capsys.readouterr().out
    assert not (tmp_path / "snapshots").exists()


@pytest.fixture
def table(tmp_path):
    """A folder with key and emb_vector of 1,000 rows of 6 floats."""
    rows = np.random.default_rng(0).standard_normal((1000, 6), dtype=np.float32)
    write_sparse_directory(tmp_path / "table", np.arange(1000), rows)
    return tmp_path / "table"


def test_the_command_writes_a_table_and_says_what_it_holds(table, tmp_path, capsys):
    file = tmp_path / "t.snapshot"

    assert main(["snapshot", str(table), str(file), "--row-dtype", "int8"]) == 0

    said = capsys.readouterr().out
    assert said.startswith("1,000 rows of 6 floats as int8, 0.0")
    [(_, rows)] = open_sparse(table, 6).batches(1000)
    rounded = np.empty_like(rows)
    round_rows(rows, "int8", rounded)
    difference = np.abs(rounded - rows)
    assert f"off by {difference.mean(dtype=np.float64):.2g} on average and {difference.max():.2g} at most" in said
    with open_snapshot(file) as snapshot:
        assert snapshot.source == open_sparse(table, 6).digest()
        assert (np.concatenate([part for _, part in snapshot.items()]) == rounded).all()


def test_the_command_takes_a_single_file_a_snapshot_and_a_models_table(table, repository, tmp_path, capsys):
    hps_file = tmp_path / "one"
    hps_file.write_bytes(np.array([(5, [1, 2])], dtype=[("key", "<u4"), ("vector", "<f4", (2,))]).tobytes())
    out = tmp_path / "t.snapshot"

    assert main(["snapshot", str(hps_file), str(out), "--dim", "2", "--key-type", "I32"]) == 0
    assert main(["snapshot", str(out), str(tmp_path / "again.snapshot"), "--row-dtype", "fp16"]) == 0
    for name in ("item", "a.item"):
        assert main(["snapshot", str(repository()), str(tmp_path / name), "--table", name]) == 0

    assert "1 rows of 2 floats as fp16" in capsys.readouterr().out
    [(keys, rows)] = open_sparse(tmp_path / "again.snapshot", 2).batches(10)
    assert (keys.tolist(), rows.tolist()) == ([5], [[1.0, 2.0]])
    for name in ("item", "a.item"):
        [(_, rows)] = open_sparse(tmp_path / name, MODEL.dim).batches(1000)
        assert (rows == MODEL.vectors("item")).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("absent out", "absent: expected a folder with key and emb_vector .*; for a file, give --dim"),
        ("table out --dim 5", "emb_vector: expected 20,000 bytes"),
        ("table absent/out", "absent/out: cannot be written: No such file or directory"),
        ("models/ps.json out", "for a ps.json, a repository or a model, give --table"),
        ("models out --table fly", "no table 'fly': expected one of a.user, a.item"),
        ("table out --row-dtype int4", "invalid choice: 'int4'"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(table, repository, tmp_path, monkeypatch, capsys, arguments, message):
    repository()
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["snapshot", *arguments.split()])
    except SystemExit as stopped:
        code = stopped.code

    assert code in (1, 2)
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_sizes_fit_no_dim_is_refused(tmp_path, capsys):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "key").write_bytes(bytes(24))
    (tmp_path / "t" / "emb_vector").write_bytes(bytes(40))

    assert main(["snapshot", str(tmp_path / "t"), str(tmp_path / "out")]) == 1

    assert "40 bytes of vectors do not fit 3 keys" in capsys.readouterr().err


def test_check_reads_the_index_of_a_snapshot_and_with_full_every_byte(table, tmp_path, capsys):
    file = tmp_path / "t.snapshot"
    assert main(["snapshot", str(table), str(file)]) == 0
    assert main(["check", str(file)]) == 0
    assert main(["check", str(file), "--full"]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    data = bytearray(file.read_bytes())
    data[-4096] ^= 1  # of a row
    file.write_bytes(data)

    assert main(["check", str(file)]) == 0
    assert main(["check", str(file), "--full"]) == 1
    assert "t.snapshot: is damaged: the page of 4,096 bytes at offset" in capsys.readouterr().err

    data[4096] ^= 1  # of the index
    file.write_bytes(data)
    assert main(["check", str(file)]) == 1
    file.write_bytes(data[:-1])
    assert main(["check", str(file)]) == 1
    assert "bytes by its header" in capsys.readouterr().err
