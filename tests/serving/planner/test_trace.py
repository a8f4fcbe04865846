"""Traces of every form, and files that are not traces."""

import contextlib
import json
import os
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.config import read_model_directory
from serving.errors import TraceError
from serving.planner import read_trace
from serving.planner import trace as trace_module
from tests.tools.tiny_model import TinyModel, flatten

TWO_TABLES = TinyModel()  # user with one slot, item with two


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of two tables and a model of one table."""
    folder = tmp_path_factory.mktemp("models")
    TWO_TABLES.write(folder, "two")
    TinyModel(tables={"ad": 1}, key_type="I32").write(folder, "one")
    return {name: read_model_directory(folder / name) for name in ("two", "one")}


def keys_of(bags):
    """The keys of each table of the model ``two``, in sample order."""
    return {
        "two.user": [key for sample in bags for key in sample[0]],
        "two.item": [key for sample in bags for bag in sample[1:] for key in bag],
    }


def body(dense, bags):
    samples = [{"dense": features.tolist(), "keys": keys} for features, keys in zip(dense, bags, strict=True)]
    return json.dumps({"samples": samples})


def as_lists(trace):
    return {name: keys.tolist() for name, keys in trace.items()}


class TestForms:
    def test_an_npy_file_has_the_keys_of_a_models_only_table(self, tmp_path, models):
        np.save(tmp_path / "t.npy", np.array([5, 6, 5], dtype=np.uint32))

        trace = read_trace([tmp_path / "t.npy"], [models["one"]])

        assert as_lists(trace) == {"one.ad": [5, 6, 5]}
        assert trace["one.ad"].dtype == np.int64

    @pytest.mark.parametrize(("file", "table"), [("item.npy", ""), ("two.item.npy", ""), ("t.npy", "item")])
    def test_the_name_of_the_file_or_the_option_selects_one_of_several_tables(self, tmp_path, models, file, table):
        np.save(tmp_path / file, np.array([1, 2]))

        trace = read_trace([tmp_path / file], list(models.values()), table)

        assert as_lists(trace) == {"two.item": [1, 2]}

    def test_an_npz_file_has_an_array_per_table(self, tmp_path, models):
        np.savez(tmp_path / "t.npz", **{"user": [1, 2], "one.ad": np.array([[3, 4, 5]])})

        trace = read_trace([tmp_path / "t.npz"], list(models.values()))

        assert as_lists(trace) == {"two.user": [1, 2], "one.ad": [3, 4, 5]}

    @pytest.mark.parametrize("offsets", ["one CSR", "one block per table"])
    @pytest.mark.parametrize("samples", [1, 200], ids=["one sample", "more samples than a request may have"])
    def test_the_tensors_of_requests_go_to_tables_as_in_serving(self, tmp_path, models, offsets, samples):
        dense, bags = TWO_TABLES.sample_requests(samples, seed=1)
        keys, row_ptrs = flatten(bags)
        if offsets == "one block per table":
            row_ptrs = np.concatenate(
                [
                    np.cumsum([0, *(len(bag) for sample in bags for bag in sample[part])])
                    for part in (slice(1), slice(1, 3))
                ]
            )
        np.savez(tmp_path / "t.npz", DES=dense, CATCOLUMN=keys[None], ROWINDEX=row_ptrs)

        trace = read_trace([tmp_path / "t.npz"], [models["two"]])

        assert as_lists(trace) == keys_of(bags)

    def test_rows_of_a_matrix_are_requests(self, tmp_path, models):
        np.savez(tmp_path / "t.npz", CATCOLUMN=[[1, 2, 3], [4, 5, 6]], ROWINDEX=[[0, 1, 2, 3], [0, 0, 3, 3]])

        trace = read_trace([tmp_path / "t.npz"], [models["two"]])

        assert as_lists(trace) == {"two.user": [1], "two.item": [2, 3, 4, 5, 6]}

    def test_lines_of_json_are_requests_and_empty_lines_are_ignored(self, tmp_path, models):
        dense, bags = TWO_TABLES.sample_requests(70)
        lines = [body(dense[:1], bags[:1]), "", body(dense[1:], bags[1:])]
        (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")

        assert as_lists(read_trace([tmp_path / "t.jsonl"], [models["two"]])) == keys_of(bags)

    def test_records_of_a_server_name_their_model_and_other_models_are_skipped(self, tmp_path, models):
        lines = [
            '{"model":"two","lookups":{"item":[4,9],"user":[1]}}',
            '{"model":"one","lookups":{"ad":[7]}}',
            '{"model":"gone","lookups":{"x":[7]}}',
            '{"model":"two","lookups":{"user":[2],"item":[]}}',
        ]
        (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")

        both = as_lists(read_trace([tmp_path / "t.jsonl"], list(models.values())))

        assert both == {"two.user": [1, 2], "two.item": [4, 9], "one.ad": [7]}
        assert as_lists(read_trace([tmp_path / "t.jsonl"], [models["one"]])) == {"one.ad": [7]}

    @pytest.mark.parametrize("length", [10, 30, 34])
    def test_a_last_record_that_a_kill_cut_off_is_ignored(self, tmp_path, models, length):
        line = '{"model":"one","lookups":{"ad":[7]}}'
        (tmp_path / "t.jsonl").write_text(f"{line}\n{line[:length]}")

        assert as_lists(read_trace([tmp_path / "t.jsonl"], [models["one"]])) == {"one.ad": [7]}

    def test_many_small_requests_keep_their_order(self, tmp_path, models, monkeypatch):
        monkeypatch.setattr(trace_module, "_MOST_SMALL_PARTS", 3)
        keys = np.random.default_rng(0).integers(0, 50, (20, 3))
        np.savez(tmp_path / "t.npz", CATCOLUMN=keys, ROWINDEX=np.tile([0, 1, 2, 3], (20, 1)))

        trace = read_trace([tmp_path / "t.npz"], [models["two"]])

        assert as_lists(trace) == {"two.user": keys[:, 0].tolist(), "two.item": keys[:, 1:].reshape(-1).tolist()}

    def test_a_json_file_is_one_request(self, tmp_path, models):
        dense, bags = TWO_TABLES.sample_requests(3)
        (tmp_path / "t.json").write_text(json.dumps(json.loads(body(dense, bags)), indent=2))

        assert as_lists(read_trace([tmp_path / "t.json"], [models["two"]])) == keys_of(bags)

    def test_folders_are_read_in_order_of_names_and_paths_in_the_given_order(self, tmp_path, models):
        (tmp_path / "days").mkdir()
        np.save(tmp_path / "late.npy", np.array([99]))
        for key in np.random.default_rng(0).permutation(30):
            np.save(tmp_path / "days" / f"{key:02}.npy", np.array([key]))
        (tmp_path / "days" / ".hidden").write_text("")

        trace = read_trace([tmp_path / "late.npy", tmp_path / "days"], [models["one"]])

        assert as_lists(trace) == {"one.ad": [99, *range(30)]}


def npy(name, array):
    return lambda folder: np.save(folder / name, array)


def npz(**arrays):
    return lambda folder: np.savez(folder / "t.npz", **arrays)


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def encrypted(folder):
    with zipfile.ZipFile(folder / "t.npz", "w") as archive:
        archive.writestr("user.npy", b"")
    packed = bytearray((folder / "t.npz").read_bytes())
    packed[6] |= 1
    packed[packed.index(b"PK\1\2") + 8] |= 1
    (folder / "t.npz").write_bytes(packed)


def header(dtype, shape):
    """Write an array that has only a header."""
    content = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    content = b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content
    return lambda folder: (folder / "t.npy").write_bytes(content)


def rename(folder):
    np.savez(folder / "t.npz", user=[1])
    (folder / "t.npz").rename(folder / "user.npy")


def rename_array(folder):
    np.save(folder / "t.npy", np.array([1]))
    (folder / "t.npy").rename(folder / "t.npz")


ONE, TWO, BOTH = ["one"], ["two"], ["two", "one"]


@pytest.mark.parametrize(
    ("write", "which", "expected"),
    [
        pytest.param(lambda _: None, ONE, "the folder has no trace: 0 of 0 entries", id="an empty folder"),
        pytest.param(
            text("t.csv", "1\n2\n"), ONE, "does not end in .npy or .npz or .json or .jsonl: 1 ('t.csv')", id="a suffix"
        ),
        pytest.param(lambda f: (f / "t.npy").mkdir(), ONE, "t.npy: not a regular file", id="a folder in a folder"),
        pytest.param(lambda f: os.mkfifo(f / "t.npy"), ONE, "t.npy: not a regular file", id="a pipe"),
        pytest.param(lambda f: (f / "t.npy").symlink_to("x"), ONE, "t.npy: cannot be read: No such", id="no file"),
        pytest.param(lambda f: (f / "t.json").symlink_to("x"), ONE, "t.json: cannot be read: No such", id="no json"),
        pytest.param(lambda f: (f / "t.jsonl").symlink_to("x"), ONE, "t.jsonl: cannot be read: No", id="no lines"),
        pytest.param(
            npy("t.npy", np.array([1.5])), ONE, "t.npy: keys: expected integers, got an array of float64", id="floats"
        ),
        pytest.param(npy("t.npy", np.array([True])), ONE, "got an array of bool", id="truth values"),
        pytest.param(npy("t.npy", np.zeros((2, 2), int)), ONE, "shape [n] or [1, n], got [2, 2]", id="a matrix"),
        pytest.param(npy("t.npy", np.array([2**64 - 1], np.uint64)), ONE, "does not fit int64", id="beyond int64"),
        pytest.param(
            npy("t.npy", np.array([3, -1])),
            ONE,
            "t.npy: -1 at position 1: expected a key in 0..4294967295",
            id="no uint32",
        ),
        pytest.param(
            npy("user.npy", np.array([2**63 - 1])), TWO, "user.npy: 9223372036854775807 at position 0", id="reserved"
        ),
        pytest.param(npy("t.npy", np.array([])[:0].astype(int)), ONE, "the trace has no keys", id="no keys"),
        pytest.param(
            npy("t.npy", np.array([1])),
            TWO,
            "no model has a table 't'; expected one of 'two.user', 'two.item'",
            id="whose",
        ),
        pytest.param(
            npy("t.npy", np.array([None])),
            ONE,
            "t.npy: expected a NumPy file of numbers, found Python objects",
            id="pickled",
        ),
        pytest.param(text("t.npy", "1\n2\n"), ONE, "t.npy: expected a NumPy file of numbers, found", id="text as npy"),
        pytest.param(text("t.npy", ""), ONE, "t.npy: expected a NumPy file of numbers, found", id="nothing as npy"),
        pytest.param(header("()", "(1,)"), ONE, "t.npy: expected a NumPy file of numbers, found", id="an empty type"),
        pytest.param(
            header("'<i8'", (2**70,)), ONE, "t.npy: expected a NumPy file of numbers, found", id="a shape beyond int64"
        ),
        pytest.param(text("t.npz", "PK\3\4"), ONE, "t.npz: expected a NumPy file of numbers, found", id="half a zip"),
        pytest.param(encrypted, TWO, "t.npz: expected a NumPy file of numbers, found", id="an encrypted zip"),
        pytest.param(rename, TWO, "user.npy: holds an archive of arrays: rename it to .npz", id="npz as npy"),
        pytest.param(rename_array, TWO, "t.npz: holds one array without a name: rename it to .npy", id="npy as npz"),
        pytest.param(npz(users=[1]), TWO, "t.npz: no model has a table 'users'", id="a table's name"),
        pytest.param(npz(user=[1.5]), TWO, "t.npz: user: keys: expected integers", id="floats in an archive"),
        pytest.param(
            npz(CATCOLUMN=[1]),
            TWO,
            "expected CATCOLUMN and ROWINDEX, with or without DES, found 'CATCOLUMN'",
            id="no offsets",
        ),
        pytest.param(npz(DES=[1.0]), TWO, "found 'DES'", id="no keys but dense"),
        pytest.param(
            npz(CATCOLUMN=[1], ROWINDEX=[0], user=[1]), TWO, "found 'CATCOLUMN', 'ROWINDEX', 'user'", id="both forms"
        ),
        pytest.param(
            npz(CATCOLUMN=[1, 2], ROWINDEX=[0, 1, 1, 1]), TWO, "t.npz: ROWINDEX: the offsets end at 1", id="offsets"
        ),
        pytest.param(
            npz(CATCOLUMN=[[1], [2]], ROWINDEX=[0, 1, 1, 1]),
            TWO,
            "CATCOLUMN has 2 requests, but ROWINDEX has 1",
            id="requests",
        ),
        pytest.param(
            npz(CATCOLUMN=[[1], [2]], ROWINDEX=[[0, 1, 1, 1], [0, 1, 1, 0]]),
            TWO,
            "request 1: ROWINDEX: falls from 1 to 0",
            id="second request",
        ),
        pytest.param(
            npz(CATCOLUMN=[1], ROWINDEX=[0, 1, 1, 1]), BOTH, "say which with --model: 'two', 'one'", id="whose request"
        ),
        pytest.param(text("t.json", "[]"), TWO, "t.json: the text must be a JSON object", id="a list"),
        pytest.param(
            text("t.jsonl", '{"samples": []}'), TWO, "t.jsonl: line 1: samples: the list is empty", id="no sample"
        ),
        pytest.param(text("t.jsonl", "\n{"), TWO, "t.jsonl: line 2: the text is not JSON", id="half a line"),
        pytest.param(
            text("t.jsonl", '{"model":"two","lookups":{"usr":[1]}}'),
            TWO,
            "t.jsonl: line 1: lookups.usr: model 'two' has no such table; did you mean 'user'?",
            id="a record of an unknown table",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"two","lookups":{"user":[1.5]}}'),
            TWO,
            "t.jsonl: line 1: lookups.user[0]: expected a whole number",
            id="a record with a fraction",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"two","lookups":{"user":7}}'),
            TWO,
            "t.jsonl: line 1: lookups.user: expected a list",
            id="a record without a list",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"two","lookups":[]}'),
            TWO,
            "t.jsonl: line 1: lookups: expected an object",
            id="a record of a list",
        ),
        pytest.param(
            text("t.jsonl", '{"lookups":{"user":[1]}}'),
            TWO,
            "t.jsonl: line 1: model: missing",
            id="a record without a model",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"two","lookups":{},"id":1}'),
            TWO,
            "t.jsonl: line 1: id: unknown; expected lookups, model",
            id="a record with an unknown member",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"one","lookups":{"ad":[-1]}}'),
            ["one"],
            "t.jsonl: line 1: -1 at position 0: expected a key in 0..4294967295",
            id="a record with a key too small",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"one","lookups":{"ad":[1]}}'),
            TWO,
            "the trace has no keys of these models, only keys of 'one'",
            id="a record of another model",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"two","lookups":{"user":[1]'),
            TWO,
            "the trace has no keys",
            id="a cut record alone",
        ),
        pytest.param(
            text("t.jsonl", '{"model":"two","lookups":{"user":[1]\n'),
            TWO,
            "t.jsonl: line 1: the text is not JSON",
            id="half a record with a line end",
        ),
        pytest.param(text("t.jsonl", "{}"), BOTH, "t.jsonl: line 1: requests do not name their model", id="whose line"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_file_and_place(tmp_path, models, write, which, expected):
    write(tmp_path)

    with pytest.raises(TraceError) as caught:
        read_trace([tmp_path], [models[name] for name in which])

    assert str(tmp_path) in str(caught.value)
    assert expected in str(caught.value)


def test_a_table_that_two_models_have_needs_its_full_name(tmp_path, models):
    np.save(tmp_path / "user.npy", np.array([1]))
    other = models["two"].model_copy(update={"name": "other"})

    with pytest.raises(TraceError, match="several models have a table 'user'"):
        read_trace([tmp_path / "user.npy"], [models["two"], other])
    assert list(read_trace([tmp_path / "user.npy"], [models["two"], other], "other.user")) == ["other.user"]


def test_an_option_that_names_an_unknown_table_is_refused(tmp_path, models):
    with pytest.raises(TraceError, match="--table: no model has a table 'users'"):
        read_trace([tmp_path], [models["two"]], "users")


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), form=st.sampled_from(["user.npy", "t.npz"]))
def test_a_damaged_file_is_either_read_or_refused(tmp_path, models, data, form):
    if form == "t.npz":
        np.savez_compressed(tmp_path / form, user=np.arange(30), item=np.arange(5))
    else:
        np.save(tmp_path / form, np.arange(30))
    content = bytearray((tmp_path / form).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / form).write_bytes(content[: data.draw(st.integers(0, len(content)))])

    trace = {}
    with contextlib.suppress(TraceError):
        trace = read_trace([tmp_path / form], [models["two"]])

    assert trace.keys() <= {"two.user", "two.item"}
