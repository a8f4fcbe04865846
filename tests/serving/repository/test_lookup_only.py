"""A ``ps.json`` in HPS's most common form: tables that are only looked up, without a dense network."""

from functools import partial

import numpy as np
import pytest

from serving import ParameterServer, dump_table, load_table
from serving.cli.main import main
from serving.config import read_ps_config, read_repository
from serving.errors import ConfigError, ModelFileError
from serving.lookup import LookupSession
from serving.model.sparse_file import write_sparse_directory
from serving.repository import ModelRepository
from tests.serving.ps_files import DEEP, KEYS, WIDE, write_lookup_model


@pytest.fixture
def ps_file(tmp_path):
    """Return a function that writes the ps.json of HPS's documentation with small tables and returns the file."""
    return partial(write_lookup_model, tmp_path)


def test_its_rows_are_looked_up(ps_file):
    with ParameterServer.from_config(ps_file()) as server:
        session = LookupSession(server, server.model("hps_wdl"))
        answer = session.lookup([KEYS[::-1].copy(), np.array([7, 8], dtype=np.int64)])

    wide, deep = answer.embeddings
    np.testing.assert_array_equal(wide, WIDE[::-1])
    np.testing.assert_array_equal(deep, [DEEP[1], np.full(4, 0.5)])
    assert answer.defaulted_keys == 1


def test_it_is_read_into_one_record_per_table(ps_file, tmp_path):
    config = read_ps_config(ps_file())

    (model,) = config.models
    assert (model.graph_file, model.dense_file, model.label_dim, model.max_batchsize) == (None, None, 0, 1024)
    assert [(table.name, table.dim, table.default_value, table.max_keys_per_sample) for table in model.tables] == [
        ("embedding_table1", 2, 0.0, 2),
        ("embedding_table2", 4, 0.5, 26),
    ]
    assert model.tables[0].file == tmp_path / "hps_wdl" / "1" / "wdl0_sparse_2000.model"
    assert config.keys_without_effect == (
        "models[0].slot_num, models[0].maxnum_des_feature_per_sample: no effect: the model has no dense network",
    )


def test_absent_names_get_the_defaults_of_hps_and_empty_file_names_count_as_absent(ps_file):
    change = {"embedding_table_names": None, "default_value_for_each_table": None, "dense_file": "", "network_file": ""}

    (model,) = read_ps_config(ps_file(change)).models

    assert [(table.name, table.default_value) for table in model.tables] == [
        ("sparse_embedding0", 0.0),
        ("sparse_embedding1", 0.0),
    ]


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        (
            {"embedding_vecsize_per_table": None},
            "models[0].embedding_vecsize_per_table",
            "required without a",
        ),
        (
            {"embedding_vecsize_per_table": [2]},
            "models[0].embedding_vecsize_per_table",
            "expected 2, one per table; got 1",
        ),
        ({"sparse_files": []}, "models[0].sparse_files", "expected a list that is not empty"),
        ({"dense_file": "dense.model"}, "models[0].network_file", "required next to dense_file; leave both out"),
        ({"network_file": "graph.json"}, "models[0].dense_file", "required next to network_file; leave both out"),
    ],
)
def test_a_key_that_is_missing_or_too_short_is_named(ps_file, change, path, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        read_ps_config(ps_file(change))

    assert caught.value.path == path


def test_hotrow_check_and_plan_print_its_memory(ps_file, capsys):
    file = ps_file()

    assert main(["check", str(file)]) == 0
    checked = capsys.readouterr().out
    assert main(["plan", str(file)]) == 0
    planned = capsys.readouterr().out

    assert "model hps_wdl version 1" in checked
    assert "  dense " not in checked
    assert "hps_wdl.embedding_table1" in planned


def test_hotrow_check_with_an_engine_names_the_call_that_looks_rows_up(ps_file, capsys):
    assert main(["check", str(ps_file()), "--engine", "numpy"]) == 1

    assert "model 'hps_wdl': has no dense network" in capsys.readouterr().err


def test_its_tables_are_dumped_and_loaded(ps_file, tmp_path):
    pytest.importorskip("rocksdict")
    file = ps_file(persistent_db={"type": "rocks_db", "path": "rows", "num_threads": 1})
    write_sparse_directory(tmp_path / "new", np.array([3, 9]), np.full((2, 4), 2.5, dtype=np.float32))

    assert main(["load", str(file), "hps_wdl.embedding_table2", str(tmp_path / "new")]) == 0
    assert load_table(file, "hps_wdl.embedding_table2", tmp_path / "new") == 2
    assert dump_table(file, "hps_wdl.embedding_table2", tmp_path / "dump") == 4

    assert set(np.fromfile(tmp_path / "dump" / "key", dtype=np.int64)) == {3, 7, 9, 2**40}


def test_its_folder_in_a_repository_needs_no_graph(ps_file, tmp_path):
    ps_file().rename(tmp_path / "ps.json")

    for path in (tmp_path, tmp_path / "hps_wdl", tmp_path / "hps_wdl" / "1"):
        (model,) = read_repository(path).models
        assert (model.name, model.version, model.graph_file) == ("hps_wdl", 1, None)


@pytest.mark.parametrize("control", ["none", "poll"])
def test_nothing_is_missing_in_its_folder_in_a_repository(ps_file, tmp_path, caplog, control):
    ps_file().rename(tmp_path / "ps.json")

    with ModelRepository(tmp_path, control=control) as repository:
        repository.load()
        assert [(one.version, one.state, one.reason) for one in repository.index()] == [("1", "READY", "")]

    assert "graph.json" not in caplog.text


def test_a_folder_that_ps_json_does_not_list_still_needs_a_version(ps_file, tmp_path):
    ps_file().rename(tmp_path / "ps.json")
    (tmp_path / "other" / "1").mkdir(parents=True)

    with pytest.raises(ModelFileError, match=r"other: has no version: 1 is an empty folder"):
        read_repository(tmp_path)
    with pytest.raises(ConfigError, match="no model in it"):
        read_repository(tmp_path / "other")


def test_a_fault_of_its_files_is_raised_when_its_folder_is_opened(ps_file, tmp_path):
    ps_file({"embedding_vecsize_per_table": [2]}).rename(tmp_path / "ps.json")

    with pytest.raises(ConfigError, match="embedding_vecsize_per_table: expected 2, one per table"):
        read_repository(tmp_path / "hps_wdl")
