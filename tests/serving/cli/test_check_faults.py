"""`hotrow check` prints every fault of a repository's models, not only the first."""

import numpy as np
import pytest

from serving.cli.main import main
from tests.serving.ps_files import listed, write_ps
from tests.tools.tiny_model import TinyModel


def checked(capsys, *arguments):
    """Return the exit code, the lines on standard output and the lines on standard error."""
    code = main(["check", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def unverified(version):
    """Remove the version's manifest, so that tests can damage its files one by one."""
    (version / "manifest.json").unlink()
    return version


def repeat_a_key(table):
    keys = np.fromfile(table / "key", np.int64)
    keys[6] = keys[5]
    keys.tofile(table / "key")


def test_every_fault_of_every_model_of_a_repository_is_a_line(tmp_path, capsys):
    TinyModel().write(tmp_path, "good")
    (TinyModel().write(tmp_path, "graphless") / "graph.json").write_text("{")
    spoilt = unverified(TinyModel().write(tmp_path, "spoilt"))
    repeat_a_key(spoilt / "user")
    repeat_a_key(spoilt / "item")
    (tmp_path / "unfinished" / "1").mkdir(parents=True)

    code, out, err = checked(capsys, tmp_path)

    assert code == 1
    expected = [
        ("graphless", "graphless/1/graph.json"),
        ("unfinished", "unfinished: has no version: 1 is an empty folder"),
        ("spoilt", "spoilt/1/user/key: key 5 is in row 5 and again in row 6"),
        ("spoilt", "spoilt/1/item/key: key 5 is in row 5 and again in row 6"),
    ]
    assert len(err) == len(expected)
    for line, (model, fault) in zip(err, expected, strict=True):
        assert line.startswith(f"hotrow check: model {model!r}: ")
        assert fault in line
    assert [line for line in out if line.startswith("model")] == ["model good version 1"]
    assert not any(line.startswith("total") for line in out)


def test_every_broken_model_that_a_ps_json_lists_is_a_line(tmp_path, capsys):
    versions = [TinyModel().write(tmp_path, name) for name in ("graphless", "good", "weightless")]
    models = [listed(version / "graph.json", name) for version, name in zip(versions, "abc", strict=True)]
    file = write_ps(tmp_path, models, volatile_db={"type": "hash_map", "capacity_rows_per_table": {"a.user": 1000}})
    (versions[0] / "graph.json").unlink()
    (versions[2] / "dense.model").unlink()

    code, out, err = checked(capsys, file)

    assert (code, len(err)) == (1, 2)
    assert err[0].startswith("hotrow check: model 'a': ")
    assert "graph.json" in err[0]
    assert err[1].startswith("hotrow check: model 'c': ")
    assert "dense.model" in err[1]
    assert out[0] == "model b version 1"


def test_every_model_of_ps_json_without_a_folder_is_a_line(tmp_path, capsys):
    version = TinyModel().write(tmp_path)
    write_ps(tmp_path, [listed(version / "graph.json", name) for name in "yx"])

    code, _, err = checked(capsys, tmp_path)

    assert code == 1
    assert [line.partition(", which")[0] for line in err] == [
        f"hotrow check: model {name!r}: {tmp_path / 'ps.json'}: models: lists {name!r}" for name in "xy"
    ]


def test_a_table_of_a_model_that_cannot_be_read_is_not_called_unknown(tmp_path, capsys):
    (TinyModel().write(tmp_path) / "graph.json").write_text("{")
    TinyModel().write(tmp_path, "good")
    limit = {"type": "hash_map", "capacity_rows_per_table": {"tiny.user": 5}}
    write_ps(tmp_path, volatile_db=limit)

    _, _, err = checked(capsys, tmp_path)

    assert len(err) == 1
    assert "graph.json" in err[0]


def test_a_fault_that_is_found_twice_is_printed_once(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    repeat_a_key(unverified(TinyModel().write(tmp_path)) / "user")

    code, _, err = checked(capsys, tmp_path, "--engine", "int8")

    assert (code, len(err)) == (1, 1)
    assert "key 5 is in row 5 and again in row 6" in err[0]


def test_a_triton_configuration_without_an_input_of_the_newest_version_is_corrected_on_request(tmp_path, capsys):
    TinyModel().write(tmp_path, "tiny", 1)
    TinyModel(dense_dim=0).write(tmp_path, "tiny", 2)
    file = tmp_path / "tiny" / "config.pbtxt"
    kept = 'name: "tiny"\nmax_batch_size: 64\nversion_policy { all { } }\ninstance_group [ { count: 2 } ]\n'
    file.write_text(kept)

    code, _, err = checked(capsys, tmp_path)
    what = f"{file} does not fit the version: no input DES, CATCOLUMN, ROWINDEX; no output OUTPUT0"
    assert (code, err) == (0, [f"hotrow check: warning: {what}; --write-config corrects it"])
    assert file.read_text() == kept

    code, out, err = checked(capsys, tmp_path / "tiny", "--write-config")
    assert (code, err) == (0, [])
    assert f"{file} now has the inputs and outputs of version 2" in out
    assert file.read_text().startswith(kept)
    assert '"DES" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true optional: true' in file.read_text()

    assert checked(capsys, tmp_path)[2] == []


def test_a_triton_configuration_that_cannot_be_rewritten_is_a_fault(tmp_path, capsys, monkeypatch):
    TinyModel().write(tmp_path, "tiny", 1)
    (tmp_path / "tiny" / "config.pbtxt").write_text('name: "tiny"')

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("serving.model.triton_config.atomic_write", full)
    code, _, err = checked(capsys, tmp_path, "--write-config")

    fault = f"{tmp_path / 'tiny' / 'config.pbtxt'}: cannot be written: No space left on device"
    assert (code, err) == (1, [f"hotrow check: model 'tiny': {fault}"])
    assert (tmp_path / "tiny" / "config.pbtxt").read_text() == 'name: "tiny"'
