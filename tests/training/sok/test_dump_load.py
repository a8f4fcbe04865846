"""``dump``, ``load`` and ``incremental_dump`` in one process. Several processes are in test_processes.py."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.errors import ModelFileError, OutputError
from serving.model.sparse_file import write_sparse_directory
from tests.training.sok.ids import sparse
from training import sok
from training.optimizers import SGD, Adam


def dynamic(keys=(), name=None, dim=2):
    """A variable in which the row of key k has the value k."""
    one = sok.DynamicVariable(dim, name=name)
    one.set_rows(np.array(keys, np.int64), np.repeat(np.array(keys, np.float32)[:, None], dim, axis=1))
    return one


def columns(folder):
    return np.fromfile(folder / "key", np.int64).tolist(), np.fromfile(folder / "emb_vector", np.float32).tolist()


def rows_of(variable):
    return {key: vector[0] for keys, vectors in variable.own_rows() for key, vector in zip(keys, vectors, strict=True)}


def test_what_was_dumped_is_loaded(tmp_path):
    table = np.random.default_rng(0).normal(size=(70_000, 3)).astype(np.float32)  # more rows than a part has
    layers = [sok.All2AllDenseEmbedding(40, 2, 1, 1), sok.DistributedEmbedding("sum", 9, 2, 1, 3, use_hashtable=False)]
    layers[0](torch.tensor([5, 3, 99]))
    written = [sok.Variable(table), dynamic([7, 2**40, -3]), *(layer.embedding_variable for layer in layers)]
    read = [
        sok.Variable(np.zeros((70_000, 3))),
        dynamic(),
        sok.All2AllDenseEmbedding(40, 2, 1, 1).embedding_variable,
        sok.DistributedEmbedding("sum", 9, 2, 1, 3, use_hashtable=False).embedding_variable,
    ]

    sok.dump(tmp_path / "saved", written)
    sok.load(tmp_path / "saved", read)

    assert torch.equal(read[0], written[0])
    assert torch.equal(read[3], written[3])
    for ours, theirs in zip(read[1:3], written[1:3], strict=True):
        assert rows_of(ours) == rows_of(theirs)
    assert rows_of(read[1]) == {7: 7, 2**40: 2**40, -3: -3}
    assert read[2].keys.tolist() == [3, 5, 99]


def test_a_folder_has_hugectrs_format(tmp_path):
    sok.dump(tmp_path / "saved", [sok.Variable([[1, 2], [3, 4]], name="users"), dynamic([7, 5])])

    assert columns(tmp_path / "saved" / "users") == ([0, 1], [1, 2, 3, 4])
    assert columns(tmp_path / "saved" / "variable_1") == ([7, 5], [7, 7, 5, 5])


def test_variables_with_names_are_found_in_any_order(tmp_path):
    sok.dump(tmp_path / "saved", [dynamic([1], "one"), dynamic([2], "two"), dynamic([3], "three")])
    one, two = dynamic(name="one"), dynamic(name="two")

    sok.load(tmp_path / "saved", [two, one])

    assert (rows_of(one), rows_of(two)) == ({1: 1}, {2: 2})


def test_a_variable_without_a_name_is_found_by_its_place_among_all(tmp_path):
    sok.dump(tmp_path / "saved", [dynamic([1]), dynamic([2])])

    expected = (
        "expected 1 folders, because a variable without a name is found by its place, found variable_0, variable_1"
    )
    with pytest.raises(ModelFileError, match=expected):
        sok.load(tmp_path / "saved", dynamic())


def test_loaded_rows_replace_rows_and_begin_again(tmp_path):
    sok.dump(tmp_path / "saved", dynamic([1, 2]))
    one = dynamic([2, 3])
    adam = Adam([one], lr=0.1)
    sok.lookup_sparse(one, sparse([[2, 3]]), combiners="sum").sum().backward()
    adam.step()

    sok.load(tmp_path / "saved", one)

    assert rows_of(one) == {1: 1, 2: 2, 3: pytest.approx(2.9)}
    assert not one.table.select(np.array([2])).states.any()


def test_a_dump_replaces_an_existing_folder_as_a_whole(tmp_path):
    sok.dump(tmp_path / "saved", dynamic([1], "old"))
    sok.dump(tmp_path / "saved", dynamic([1], "new"))

    assert [folder.name for folder in (tmp_path / "saved").iterdir()] == ["new"]


def test_an_incremental_dump_has_the_rows_that_changed(tmp_path):
    ids, others = sok.DynamicVariable(1, "5", name="ids"), sok.DynamicVariable(1, "7", name="others")
    optimizer = SGD([ids, others], lr=1.0)

    def train(keys, other_keys):
        optimizer.zero_grad()
        vectors = sok.lookup_sparse([ids, others], [sparse([keys]), sparse([other_keys])], combiners=["sum", "sum"])
        sum(vector.sum() for vector in vectors).backward()
        optimizer.step()

    train([1, 2], [3])
    sok.dump(tmp_path / "full", [ids, others])
    since = [ids.step, others.step]
    train([2, 9], [])
    assert sok.incremental_dump(tmp_path / "later", [ids, others], since) == {"ids": 2, "others": 0}
    read = [sok.DynamicVariable(1, name="ids"), sok.DynamicVariable(1, name="others")]
    sok.load(tmp_path / "full", read)
    sok.load(tmp_path / "later", read[0])

    assert since == [1, 1]
    assert columns(tmp_path / "later" / "ids") == ([2, 9], [3, 4])
    assert not (tmp_path / "later" / "others").exists()
    assert [rows_of(one) for one in read] == [rows_of(one) for one in (ids, others)]


def test_each_variable_counts_its_own_steps(tmp_path):
    often, rarely = dynamic(name="often"), dynamic(name="rarely")
    optimizer = SGD([often, rarely], lr=1.0)

    def train(variable, key):
        optimizer.zero_grad()
        sok.lookup_sparse(variable, sparse([[key]]), combiners="sum").sum().backward()
        optimizer.step()

    for key in (1, 2, 3):
        train(often, key)
    train(rarely, 1)
    since = [often.step, rarely.step]
    train(often, 3)
    train(rarely, 2)

    assert since == [3, 1]
    assert sok.incremental_dump(tmp_path / "later", [often, rarely], since) == {"often": 1, "rarely": 1}
    assert [columns(tmp_path / "later" / name)[0] for name in ("often", "rarely")] == [[3], [2]]
    assert sok.incremental_dump(tmp_path / "later", rarely, 1) == {"rarely": 1}
    assert sok.incremental_dump(tmp_path / "later", [rarely], [0]) == {"rarely": 2}


@pytest.mark.parametrize("path", [".", "..", "/", Path(), "inner/.."])
@pytest.mark.parametrize("write", [sok.dump, lambda path, variables: sok.incremental_dump(path, variables, 0)])
def test_the_current_folder_is_not_replaced(path, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()

    with pytest.raises(ValueError, match=r"dump: expected a folder to replace, got '.*', which contains the current"):
        write(path, dynamic([1]))
    assert [one.name for one in tmp_path.iterdir()] == ["inner"]


@pytest.mark.parametrize("call", [sok.dump, sok.load, lambda path, variables: sok.incremental_dump(path, variables, 0)])
@pytest.mark.parametrize("path", [None, 3, b"saved"])
def test_a_path_of_another_type_is_refused(call, path):
    with pytest.raises(TypeError, match=f": expected path as a path, got {type(path).__name__}"):
        call(path, dynamic([1]))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: sok.Variable([[1]]), id="Variable"),
        pytest.param(lambda: dynamic([1]), id="DynamicVariable"),
        pytest.param(lambda: sok.All2AllDenseEmbedding(4, 2, 1, 1), id="a layer"),
    ],
)
def test_a_variable_is_not_pickled(make):
    with pytest.raises(TypeError, match=r"cannot pickle a .*: save its rows with sok\.dump"):
        pickle.dumps(make())


def test_a_layer_without_a_hash_table_may_load_fewer_rows_but_no_others(tmp_path):
    def layer(rows):
        return sok.All2AllDenseEmbedding(rows, 1, 1, 1, use_hashtable=False, name="layer").embedding_variable

    three, four = layer(3), layer(4)
    last = four[3].item()
    sok.dump(tmp_path / "three", three)
    sok.dump(tmp_path / "four", four)

    sok.load(tmp_path / "three", four)

    assert four.flatten().tolist() == [*three.flatten().tolist(), last]
    with pytest.raises(ModelFileError, match="layer/key: expected keys from 0 to 2, found keys from 0 to 3"):
        sok.load(tmp_path / "four", three)


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (
            lambda path: sok.dump(path, [dynamic([1]), dynamic()]),
            ValueError,
            "dump: variable 'variable_1' has no rows yet",
        ),
        (lambda path: sok.dump(path, []), ValueError, "dump: expected at least one variable, got none"),
        (lambda path: sok.dump(path, [torch.zeros(2, 2)]), TypeError, "dump: expected variables of sok, got Tensor"),
        (
            lambda path: sok.dump(path, [dynamic([1], "a"), dynamic([1], "a")]),
            ValueError,
            "dump: expected variables of different names, got two called 'a'",
        ),
        (
            lambda path: sok.dump(path, [dynamic([1], "variable_1"), dynamic([1])]),
            ValueError,
            "expected variables of different names, got two called 'variable_1'",
        ),
        (
            lambda path: sok.incremental_dump(path, sok.Variable([[1]], name="a"), 0),
            TypeError,
            "incremental_dump: expected variables of the type DynamicVariable, got 'a', a Variable",
        ),
        (
            lambda path: sok.incremental_dump(path, dynamic([1], "ids"), -1),
            ValueError,
            "expected since from 0 to 0, the last step of variable 'ids' in this process, got -1",
        ),
        (
            lambda path: sok.incremental_dump(path, dynamic([1], "ids"), 1),
            ValueError,
            "expected since from 0 to 0, the last step of variable 'ids' in this process, got 1",
        ),
        (
            lambda path: sok.incremental_dump(path, [dynamic([1]), dynamic([1])], 0),
            ValueError,
            "expected since as a list with the step of each of 2 variables, got 0",
        ),
        (
            lambda path: sok.incremental_dump(path, [dynamic([1])], [0, 0]),
            ValueError,
            "expected since as a list with the step of each of 1 variables, got [0, 0]",
        ),
        (lambda path: sok.incremental_dump(path, dynamic([1]), True), TypeError, "expected since as an int, got True"),
        (lambda path: sok.incremental_dump(path, dynamic([1]), "a"), TypeError, "expected since as an int, got 'a'"),
        (lambda path: sok.dump(path / "no" / "folder", dynamic([1])), OutputError, "cannot be written: no such file"),
    ],
)
def test_a_wrong_dump_is_refused_and_leaves_nothing_behind(write, error, message, tmp_path):
    with pytest.raises(error, match=re.escape(message)):
        write(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def store(path, name, keys, dim=2):
    vectors = np.zeros((len(keys), dim), np.float32)
    write_sparse_directory(path / name, np.array(keys, np.int64), vectors)


def spoil(path, name, column, content):
    (path / name / column).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: store(path, "rows", [0, 1]),
            "rows/key: expected 3 rows with keys from 0 to 2, found 2 rows with keys",
        ),
        (
            lambda path: store(path, "rows", [0, 1, 3]),
            "expected 3 rows with keys from 0 to 2, found 3 rows with keys from 0",
        ),
        (
            lambda path: store(path, "rows", [0, 1, 2], dim=3),
            "rows/emb_vector: expected 24 bytes for 3 keys of 8 bytes",
        ),
        (lambda path: (path / "rows" / "key").unlink(), "rows/key: no such file"),
        (lambda path: spoil(path, "rows", "emb_vector", b"1234"), "rows/emb_vector: expected 24 bytes"),
        (lambda path: spoil(path, "ids", "key", np.array([5, 5]).tobytes()), "ids/key: key 5 is in row 0 and again"),
        (lambda path: spoil(path, "ids", "key", np.array([5, 2**63 - 1]).tobytes()), "ids/key: row 1: key"),
        (lambda path: (path / "ids").rename(path / "other"), "expected a folder 'ids', found layer, other, rows"),
        (lambda path: store(path, "layer", range(5)), "layer/key: expected at most max_vocabulary_size_per_gpu = 4"),
        (lambda path: path.rename(path.with_name("moved")), "saved: expected a folder 'rows', found none"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_changes_nothing(damage, message, tmp_path):
    def variables(rows, ids):
        layer = sok.All2AllDenseEmbedding(4, 2, 1, 1, name="layer")
        layer(torch.tensor([3]))
        return [sok.Variable(rows, name="rows"), dynamic(ids, "ids"), layer.embedding_variable]

    path = tmp_path / "saved"
    sok.dump(path, variables(np.ones((3, 2)), [5, 6]))
    read = variables(np.zeros((3, 2)), [6, 7])
    read[1].set_rows(np.array([6]), np.full((1, 2), 9, np.float32))
    damage(path)

    with pytest.raises(ModelFileError, match=re.escape(message)):
        sok.load(path, read)

    assert read[0].sum() == 0
    assert rows_of(read[1]) == {6: 9, 7: 7}
    assert read[2].keys.tolist() == [3]
