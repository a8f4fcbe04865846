"""`hotrow check` refuses the tiers that `hotrow serve` refuses, in the same words, and leaves no file."""

import os
import re
import sys

import numpy as np
import pytest

from kernels.host import HostTable
from serving.cli.main import main
from tests.serving.cli.refusals import why_serving_refuses
from tests.serving.ps_files import write_ps
from tests.serving.table_names import with_digests
from tests.tools.redis_servers import RedisServer, free_port
from tests.tools.tiny_model import TinyModel, flatten


@pytest.fixture
def repository(tmp_path):
    """Write two models with two tables of 1,000 rows each and a ps.json of these tiers. Return the repository."""
    folder = tmp_path / "models"
    for name in ("a", "b"):
        TinyModel().write(folder, name)

    def write(**tiers):
        write_ps(folder, **tiers)
        return folder

    return write


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        ({"capacity_rows": 3999}, "'a@1.user': the model file has 1,000 rows, but there is room for 999"),
        ({"capacity_rows": 1000}, "'a@1.user': the model file has 1,000 rows, but there is room for 250"),
        ({"capacity_bytes": 2000}, "'a@1.user': the model file has 1,000 rows, but there is room for "),
        (
            {"capacity_rows_per_table": {"b.user": 10}},
            "'b@1.user': the model file has 1,000 rows, but there is room for 10 ",
        ),
        ({"capacity_rows": 4000}, ""),
        ({"capacity_bytes": 4 * HostTable.memory_bytes(4, 1000)}, ""),
        ({"capacity_rows_per_table": {"b.user": 1000}}, ""),
        ({"overflow_margin": 62}, "'a@1.user': the model file has 1,000 rows, but there is room for 992 "),
        ({"overflow_margin": 63}, ""),
        (
            {"capacity_rows": 3999, "overflow_policy": "oldest"},
            "'a@1.user': the model file has 1,000 rows, but there is room",
        ),
    ],
    ids=str,
)
def test_memory_without_a_database_must_have_room_for_every_row(repository, capsys, capacity, expected):
    folder = repository(volatile_db={"type": "hash_map", **capacity})

    refused = main(["check", str(folder)])

    error = capsys.readouterr().err
    assert with_digests(expected, folder) in error
    assert refused == bool(expected)
    assert error.partition("\n")[0] == (f"hotrow check: {why_serving_refuses(folder)}" if expected else "")


def test_memory_in_front_of_a_database_may_be_small_and_no_database_is_created(repository, tmp_path):
    disk = {"type": "rocks_db", "path": str(tmp_path / "data" / "rows")}

    assert (
        main(["check", str(repository(volatile_db={"type": "hash_map", "capacity_rows": 1}, persistent_db=disk))]) == 0
    )

    assert os.listdir(tmp_path) == ["models"]


@pytest.mark.parametrize("bound", [{"capacity_rows": 3}, {"capacity_bytes": 3 * HostTable.memory_bytes(4, 1)}])
def test_a_table_that_ram_has_no_room_for_is_a_warning_that_names_the_key(repository, tmp_path, caplog, capsys, bound):
    disk = {"type": "rocks_db", "path": str(tmp_path / "rows"), "num_threads": 1}
    folder = repository(volatile_db={"type": "hash_map", **bound}, persistent_db=disk)

    assert main(["check", str(folder)]) == 0
    checked = capsys.readouterr().err.splitlines()
    assert why_serving_refuses(folder) == ""

    (warning,) = [record.message for record in caplog.records if "no room in RAM" in record.message]
    assert warning.startswith(with_digests("memory: table b@1.item has no room in RAM", folder))
    assert f"volatile_db.{next(iter(bound))}" in warning
    assert checked == [f"hotrow check: warning: {warning.removeprefix('memory: ')}"]


def test_a_table_with_a_stated_capacity_of_0_rows_gives_no_warning(repository, tmp_path, caplog, capsys):
    disk = {"type": "rocks_db", "path": str(tmp_path / "rows"), "num_threads": 1}
    folder = repository(volatile_db={"type": "hash_map", "capacity_rows_per_table": {"a.item": 0}}, persistent_db=disk)

    assert main(["check", str(folder)]) == 0
    assert why_serving_refuses(folder) == ""

    assert capsys.readouterr().err == ""
    assert not [record for record in caplog.records if "no room" in record.message]


@pytest.mark.parametrize("is_backed", [False, True])
def test_shared_memory_must_have_room_for_every_row_and_check_prints_the_size(
    repository, tmp_path, capsys, shared_memory_name, is_backed
):
    disk = {"type": "rocks_db", "path": str(tmp_path / "rows"), "num_threads": 1}
    tier = {"type": "multi_process_hash_map", "shared_memory_name": shared_memory_name}

    def refusals(size_bytes):
        tiers = {"volatile_db": tier | {"shared_memory_size": size_bytes}}
        folder = repository(**tiers, **({"persistent_db": disk} if is_backed else {}))
        why = why_serving_refuses(folder)
        assert main(["check", str(folder)]) == bool(why)
        lines = capsys.readouterr().err.splitlines()
        assert lines[:1] == ([f"hotrow check: {why}"] if why else [])
        return lines

    advice = re.fullmatch(
        rf"hotrow check: {tmp_path}/models/ps\.json: volatile_db\.shared_memory_size: "
        r"expected at least ([0-9]+), which all tables need, got 1000",
        refusals(1000)[-1],
    )
    least = int(advice[1])

    assert refusals(least) == []
    assert refusals(least - 1)[0].startswith(
        with_digests("hotrow check: model 'b': shared_memory: table 'b@1.item': ", f"{tmp_path}/models")
        + "the table has 1,000 rows, but "
        f"volatile_db.shared_memory_size, {least - 1:,} bytes for all tables, leaves room for "
    )


@pytest.mark.parametrize("path", ["/proc/x", "file", "file/x"])
def test_a_database_whose_folder_cannot_be_created_is_refused(repository, tmp_path, capsys, path):
    (tmp_path / "file").touch()
    folder = repository(persistent_db={"type": "rocks_db", "path": str(tmp_path / path)})

    assert main(["check", str(folder)]) == 1

    error = capsys.readouterr().err
    assert error == f"hotrow check: {why_serving_refuses(folder)}\n"
    assert error.startswith(f"hotrow check: rocksdb: persistent_db.path: {tmp_path / path}: ")


@pytest.mark.parametrize(
    ("volatile", "updates", "is_warned"),
    [
        ({"type": "hash_map"}, {"type": "null"}, True),
        ({"type": "hash_map"}, {"type": "folder", "path": "updates"}, False),
        ({"type": "disabled"}, {"type": "null"}, False),
    ],
    ids=str,
)
def test_ram_in_front_of_a_database_that_catches_up_gives_a_warning_unless_it_gets_updates(
    repository, tmp_path, caplog, capsys, volatile, updates, is_warned
):
    disk = {"type": "rocks_db", "path": str(tmp_path / "rows"), "num_threads": 1}
    assert why_serving_refuses(repository(volatile_db=volatile, persistent_db=disk)) == ""
    follower = disk | {"read_only": True, "catch_up_interval_ms": 60_000}
    folder = repository(volatile_db=volatile, persistent_db=follower, update_source=updates)

    assert main(["check", str(folder)]) == 0
    assert why_serving_refuses(folder) == ""

    start = "persistent_db.catch_up_interval_ms: rows in RAM stay"
    assert (f"hotrow check: warning: {start}" in capsys.readouterr().err) == is_warned
    assert any(record.message.startswith(start) for record in caplog.records) == is_warned


def test_a_read_only_database_must_exist(repository, tmp_path, capsys):
    folder = repository(persistent_db={"type": "rocks_db", "path": str(tmp_path / "rows"), "read_only": True})

    assert main(["check", str(folder)]) == 1

    assert "rows: there is no database; loading models creates it" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


def test_a_database_without_rocksdict_is_refused(repository, tmp_path, capsys, monkeypatch):
    folder = repository(persistent_db={"type": "rocks_db", "path": str(tmp_path / "rows")})
    monkeypatch.setitem(sys.modules, "rocksdict", None)

    assert main(["check", str(folder)]) == 1

    assert capsys.readouterr().err == f"hotrow check: {why_serving_refuses(folder)}\n"


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_redis_without_its_packages_is_refused(repository, capsys, monkeypatch, package):
    folder = repository(volatile_db={"type": "redis_cluster"})
    monkeypatch.setitem(sys.modules, package, None)

    assert main(["check", str(folder)]) == 1

    expected = f"a volatile_db of type redis_cluster needs the package '{package}': pip install 'hotrow[redis]'"
    assert capsys.readouterr().err == f"hotrow check: {expected}\n"


def test_redis_must_answer_only_with_connect(repository, capsys):
    pytest.importorskip("hiredis")
    address = f"127.0.0.1:{free_port()}"
    folder = repository(volatile_db={"type": "redis_cluster", "address": address, "timeout_ms": 300})

    assert main(["check", str(folder)]) == 0
    capsys.readouterr()
    assert main(["check", "--connect", str(folder)]) == 1

    error = capsys.readouterr().err
    assert error == f"hotrow check: {why_serving_refuses(folder)}\n"
    assert address in error


def test_connect_says_that_redis_answers(repository, tmp_path, request, capsys):
    server = RedisServer(tmp_path / "redis")
    request.addfinalizer(server.kill)
    host, port = server.address
    folder = repository(volatile_db={"type": "redis_cluster", "address": f"{host}:{port}"})

    assert main(["check", "--connect", str(folder)]) == 0

    assert f"\nredis {host}:{port}: answers\n" in capsys.readouterr().out


def test_connect_says_that_no_tier_is_redis(repository, capsys):
    assert main(["check", "--connect", str(repository(volatile_db={"type": "hash_map"}))]) == 0

    assert "\n--connect has no effect: no tier is Redis\n" in capsys.readouterr().out


def test_an_existing_database_stays_unchanged(repository, tmp_path):
    folder = repository(persistent_db={"type": "rocks_db", "path": str(tmp_path / "rows")})
    assert why_serving_refuses(folder) == ""
    before = sorted(os.listdir(tmp_path / "rows"))

    assert main(["check", str(folder)]) == 0

    assert sorted(os.listdir(tmp_path / "rows")) == before


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_the_index_of_an_existing_snapshot_is_checked_and_with_full_every_byte(repository, tmp_path, capsys):
    folder = repository(volatile_db={"type": "snapshot", "path": str(tmp_path / "made")})
    assert why_serving_refuses(folder) == ""
    file = next((tmp_path / "made" / with_digests("a@1.user", folder)).glob("*.snapshot"))
    assert main(["check", "--full", str(folder)]) == 0

    flip(file, -4096)  # in a row
    assert main(["check", str(folder)]) == 0
    capsys.readouterr()
    assert main(["check", "--full", str(folder)]) == 1
    error = capsys.readouterr().err
    assert with_digests("model 'a': snapshot: table 'a@1.user': ", folder) + f"{file}: is damaged" in error
    assert "remove the file, and Hotrow makes it again" in error
    flip(file, 4096)  # in the index
    assert main(["check", str(folder)]) == 1

    file.unlink()
    assert main(["check", "--full", str(folder)]) == 0
    assert not file.exists()


def test_with_full_every_row_of_the_database_is_read_and_check_says_so(repository, tmp_path, capsys):
    folder = repository(persistent_db={"type": "rocks_db", "path": str(tmp_path / "rows")})
    for options in ([], ["--full"]):
        assert main(["check", *options, str(folder)]) == 0
        assert capsys.readouterr().out.endswith("there is no database yet\n")
    assert why_serving_refuses(folder) == ""
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("the database was not read; --full reads every row of it\n")
    assert main(["check", "--full", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("every row of the database was read\n")
    largest = max((tmp_path / "rows").glob("*.sst"), key=lambda file: file.stat().st_size)
    flip(largest, 2000)

    assert main(["check", str(folder)]) == 0
    assert main(["check", "--full", str(folder)]) == 1

    error = capsys.readouterr().err
    assert str(tmp_path / "rows") in error
    assert largest.name in error


@pytest.mark.parametrize("pattern", ["CURRENT", "*.log"])
def test_a_database_without_a_file_that_names_its_rows_is_refused_as_by_serving(repository, tmp_path, capsys, pattern):
    folder = repository(persistent_db={"type": "rocks_db", "path": str(tmp_path / "rows")})
    assert why_serving_refuses(folder) == ""
    for file in (tmp_path / "rows").glob(pattern):
        file.unlink()

    assert main(["check", "--full", str(folder)]) == main(["check", str(folder)]) == 1

    reason = why_serving_refuses(folder)
    assert "there are files of rows" in reason
    assert capsys.readouterr().err == f"hotrow check: {reason}\n" * 2


@pytest.mark.parametrize("content", [None, b"no array"], ids=["no folder", "no list of keys"])
def test_hot_keys_that_cannot_be_read_are_refused_before_anything_is_loaded(repository, tmp_path, capsys, content):
    hot = tmp_path / "hot"
    if content is not None:
        hot.mkdir()
        (hot / "b.item.npy").write_bytes(content)  # the table that is loaded last
    folder = repository(
        volatile_db={"type": "hash_map", "capacity_rows": 10, "hot_keys": str(hot)},
        persistent_db={"type": "rocks_db", "path": str(tmp_path / "rows")},
    )

    assert main(["check", str(folder)]) == 1

    reason = why_serving_refuses(folder)
    assert reason.startswith(str(hot))
    assert capsys.readouterr().err == f"hotrow check: {reason}\n"
    assert not (tmp_path / "rows").exists()


def test_ram_has_more_room_for_new_keys_if_updates_come(repository, capsys):
    sizes = []
    for source in ({}, {"update_source": {"type": "folder", "path": "log", "update_headroom_ratio": 0.5}}):
        assert main(["check", str(repository(**source))]) == 0
        sizes.append(re.findall(r" (user|item) +([\d.]+) MiB", capsys.readouterr().out))

    plain, roomy = ({name: float(size) for name, size in of_check} for of_check in sizes)
    assert plain.keys() == {"user", "item"}
    assert all(1.2 * plain[name] < roomy[name] for name in plain)


@pytest.mark.parametrize("engine", [(), ("--engine", "int8")])
def test_a_version_that_shares_tables_takes_the_memory_of_its_network(tmp_path, capsys, engine):
    TinyModel().write(tmp_path, "tiny", 1)
    version = TinyModel(network_seed=1).write_dense(tmp_path)
    calibration = tmp_path / "samples.npz"
    dense, bags = TinyModel().sample_requests(8)
    keys, row_ptrs = flatten(bags)
    np.savez(calibration, DES=dense, CATCOLUMN=keys, ROWINDEX=row_ptrs)
    options = (*engine, "--calibration", str(calibration), "--tolerance", "1") if engine else ()

    assert main(["check", str(version), *options]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model tiny version 2, on the tables of version 1"
    assert [line.split()[0] for line in lines if "MiB" in line] == ["dense", "total"]
