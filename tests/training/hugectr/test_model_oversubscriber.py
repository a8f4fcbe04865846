"""Tables larger than memory: the same training as with all rows in memory."""

from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError
from serving.model.sparse_file import open_sparse
from tests.training.hugectr.conftest import write_data
from tests.training.hugectr.test_session import RULES, solver, train_file
from training.errors import DataError
from training.hugectr import Session

pytestmark = pytest.mark.usefixtures("data")


def rows_of(path, dim, key_type, layout):
    """Each key's vector and slot."""
    model = open_sparse(path, dim, key_type, layout)
    [(keys, vectors)] = model.batches(10_000)
    slots = [None] * len(keys) if model.slot_ids is None else model.slot_ids.tolist()
    return {key: (vector, slot) for key, vector, slot in zip(keys.tolist(), vectors.tolist(), slots, strict=True)}


@pytest.mark.parametrize(
    ("rule", "key_type"), [("Adam", "uint32"), ("LazyAdam", "int64"), ("Nesterov", "uint32"), ("SGD", "int64")]
)
def test_it_trains_as_if_all_rows_were_in_memory(graph, write_graph, rule, key_type):
    write_data(key_type, shifts=(0, 1000, 2000, 0, 1000, 0))  # other keys in the last slot of each file
    graph["optimizer"] = RULES[rule]
    config = write_graph(graph)
    settings = solver(i64_input_key=key_type == "int64")
    memory, disk = Session(settings, config), Session(settings, config, True)
    most_rows = 0
    for part in range(5):
        disk.get_model_oversubscriber().update(f"file_list.{part}.keyset")
        file_list = f"file_list.{part}.txt"
        assert train_file(disk, file_list) == train_file(memory, file_list)
        most_rows = max(most_rows, disk.get_params_num())

    assert disk.evaluation() == memory.evaluation()  # whatever the keyset, trained rows count
    assert most_rows < memory.get_params_num()
    for session, name in ((memory, "memory"), (disk, "disk")):
        session.download_params_to_files(name, 1)
    wide = "I64" if key_type == "int64" else "I32"
    for table, dim, layout in ((0, 1, "distributed"), (1, 4, "localized")):
        expected, found = (rows_of(f"{name}{table}_sparse_1.model", dim, wide, layout) for name in ("memory", "disk"))
        assert found == expected


def test_it_resumes_from_files(graph, write_graph):
    config = write_graph(graph)
    first = Session(solver(), config, True)
    first.get_model_oversubscriber().update("file_list.0.keyset")
    train_file(first, "file_list.0.txt")
    first.download_params_to_files("half", 1)
    settings = solver(
        model_file="half_dense_1.model",
        dense_opt_states_file="half_opt_dense_1.model",
        embedding_files=["half0_sparse_1.model", "half1_sparse_1.model"],
        sparse_opt_states_file=["half0_opt_sparse_1.model", "half1_opt_sparse_1.model"],
    )
    resumed = Session(settings, config, True)

    losses = []
    for session in (first, resumed):
        session.get_model_oversubscriber().update("file_list.1.keyset")
        losses.append(train_file(session, "file_list.1.txt"))

    assert losses[0] == losses[1]


def test_each_table_may_have_a_keyset(graph, write_graph):
    session = Session(solver(), write_graph(graph), True)
    keys = np.fromfile("file_list.0.keyset", np.uint32)
    keys[keys < 60].tofile("wide.keyset")
    keys[keys >= 60].tofile("deep.keyset")

    session.get_model_oversubscriber().update(keyset_file_list=["wide.keyset", "deep.keyset"])

    assert train_file(session, "file_list.0.txt")
    with pytest.raises(ConfigError, match="expected one file for each of the 2 tables, got 1"):
        session.get_model_oversubscriber().update(["wide.keyset"])
    for arguments, came in (({}, "none"), ({"keyset_file": "a", "keyset_file_list": ["a"]}, "both")):
        with pytest.raises(ConfigError, match=f"expected either keyset_file or keyset_file_list, got {came}"):
            session.get_model_oversubscriber().update(**arguments)


@pytest.mark.parametrize("rule", ["Adam", "Nesterov", "SGD"])
def test_an_optimizer_that_moves_rows_on_disk_is_refused(graph, write_graph, rule):
    graph["optimizer"] = RULES[rule] | {"update_type": "Global"}
    config = write_graph(graph)

    if rule == "SGD":  # moves no row without a gradient
        assert train_file(Session(solver(), config, True), "file_list.0.txt")
        return
    with pytest.raises(ConfigError, match="table wide_table: update_type Global moves every row in every step"):
        Session(solver(), config, True)


def test_before_the_first_update_all_rows_are_in_memory(graph, write_graph):
    session = Session(solver(), write_graph(graph), True)

    assert train_file(session, "file_list.0.txt")


def test_a_key_outside_the_keyset_is_refused(graph, write_graph):
    session = Session(solver(), write_graph(graph), True)
    keys = np.fromfile("file_list.0.keyset", np.uint32)
    keys[keys != 61].tofile("short.keyset")
    session.get_model_oversubscriber().update("short.keyset")

    with pytest.raises(DataError, match="key 61 of table deep_table is not in the keyset of the last update"):
        train_file(session, "file_list.0.txt")


def test_keysets_that_cannot_be_read_change_nothing(graph, write_graph):
    session = Session(solver(), write_graph(graph), True)
    oversubscriber = session.get_model_oversubscriber()
    oversubscriber.update("file_list.0.keyset")
    train_file(session, "file_list.0.txt")
    count = session.get_params_num()
    Path("cut.keyset").write_bytes(b"123")

    with pytest.raises(DataError, match=r"no.keyset: no such file"):
        oversubscriber.update("no.keyset")
    with pytest.raises(DataError, match=r"cut.keyset: expected a multiple of 4 bytes \(uint32 keys\), found 3 bytes"):
        oversubscriber.update("cut.keyset")

    assert session.get_params_num() == count
    assert train_file(session, "file_list.0.txt")


def test_the_folder_is_removed_with_the_session(graph, write_graph, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "mine").write_text("kept", encoding="utf-8")
    session = Session(solver(), write_graph(graph), True, str(folder))
    session.get_model_oversubscriber().update("file_list.0.keyset")
    assert len(list(folder.iterdir())) == 2

    del session

    assert [path.name for path in folder.iterdir()] == ["mine"]
