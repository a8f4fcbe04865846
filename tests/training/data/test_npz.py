import dataclasses
import io
import re
import tracemalloc
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import npz
from training.errors import DataError
from training.model.document import Label, open_document
from training.samples import Samples
from training.synthetic.generator import generate_for

DIN, MMOE = open_document("din"), open_document("mmoe")
BIG = np.iinfo(np.int64).max


def read_npz(path, document, batch_size=2):
    """All samples of a file, which is read in several batches."""
    return Samples.joined(list(npz.read_npz(path, document, batch_size)))


def good(**changes):
    """Three samples for ``mmoe``, with some arrays changed. None removes an array."""
    arrays = {
        "click": [1, 0, 1],
        "purchase": [0.0, 0.0, 1.0],
        "dense": [[0.5, 2.0], [-1.0, 0.0], [3.0, 4.0]],
        "profile": [[1, 2, 3], [-1, 5, -1], [7, 8, 9]],
        "history.keys": [4, 4, -1],
        "history.row_ptrs": [0, 2, 2, 3],
    }
    arrays.update({name.replace("__", "."): value for name, value in changes.items()})
    return {name: np.array(value) for name, value in arrays.items() if value is not None}


def write(tmp_path, arrays):
    path = tmp_path / "train.npz"
    np.savez(path, **arrays)
    return path


def lists_of(bags):
    """The keys of every slot, sample by sample."""
    ends = bags.row_ptrs.tolist()
    flat = [bags.keys[begin:end].tolist() for begin, end in pairwise(ends)]
    return [flat[i : i + bags.slots] for i in range(0, len(flat), bags.slots)]


def test_a_file_is_read_as_documented(tmp_path):
    samples = read_npz(write(tmp_path, good()), MMOE)

    assert samples.labels.dtype == samples.dense.dtype == np.float32
    assert samples.labels.tolist() == [[1, 0], [0, 0], [1, 1]]
    assert samples.dense.tolist() == [[0.5, 2.0], [-1.0, 0.0], [3.0, 4.0]]
    assert lists_of(samples.bags) == [[[1], [2], [3], [4, 4]], [[], [5], [], []], [[7], [8], [9], [-1]]]


def test_integers_and_booleans_are_read_and_one_column_needs_one_dimension(tmp_path):
    arrays = {
        "label": np.array([[True], [False]]),
        "user": np.array([7, 2**32 - 1], np.uint32),
        "goods": np.asfortranarray(np.arange(22, dtype=np.int16).reshape(2, 11)),
        "categories.keys": np.array([5], np.uint64),
        "categories.row_ptrs": np.array([0] * 22 + [1], np.uint8),
    }

    samples = read_npz(write(tmp_path, arrays), DIN)

    assert samples.labels.tolist() == [[1.0], [0.0]]
    assert samples.dense.shape == (2, 0)
    assert lists_of(samples.bags)[0] == [[7], *([key] for key in range(11)), *[[]] * 11]
    assert lists_of(samples.bags)[1] == [[2**32 - 1], *([key] for key in range(11, 22)), *[[]] * 10, [5]]


def test_a_label_of_several_columns_is_one_array(tmp_path):
    several = dataclasses.replace(MMOE, labels=(Label("both", (1.0, 1.0)),))
    arrays = good(click=None, purchase=None, both=[[1, 0], [0, 0], [1, 1]])

    assert read_npz(write(tmp_path, arrays), several).labels.tolist() == [[1, 0], [0, 0], [1, 1]]
    with pytest.raises(DataError, match=r"array both: expected shape \[3, 2\], got \[3\]"):
        read_npz(write(tmp_path, arrays | {"both": np.zeros(3)}), several)


def test_the_pages_example_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    block = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)[0]

    exec(block, {})
    samples = read_npz(Path("train.npz"), MMOE)

    assert samples.labels.tolist() == [[1, 0], [0, 0]]
    assert lists_of(samples.bags)[0][3] == [4, 4, 9]
    assert lists_of(samples.bags)[1][2:] == [[], []]


@pytest.mark.parametrize("model", [DIN, MMOE])
def test_generated_samples_written_as_arrays_read_back_the_same(tmp_path, model):
    samples = generate_for(model.graph, 200, seed=1).samples
    arrays = {label.name: samples.labels[:, i] for i, label in enumerate(model.labels)}
    if model.graph.dense_dim:
        arrays["dense"] = samples.dense
    parts = samples.bags.split([entry.slots for entry in model.graph.sparse])
    for entry, bags in zip(model.graph.sparse, parts, strict=True):
        arrays |= {f"{entry.top}.keys": bags.keys, f"{entry.top}.row_ptrs": bags.row_ptrs}

    read = read_npz(write(tmp_path, arrays), model)

    np.testing.assert_array_equal(read.labels, samples.labels)
    np.testing.assert_array_equal(read.dense, samples.dense)
    np.testing.assert_array_equal(read.bags.keys, samples.bags.keys)
    np.testing.assert_array_equal(read.bags.row_ptrs, samples.bags.row_ptrs)


def test_memory_does_not_grow_with_the_file(tmp_path):
    rows = 200_000
    path = write(
        tmp_path,
        {
            "click": np.zeros(rows),
            "purchase": np.ones(rows, bool),
            "dense": np.zeros((rows, 2)),
            "profile": np.zeros((rows, 3), int),
            "history": np.arange(rows),
        },
    )
    next(npz.read_npz(path, MMOE, 1000))

    tracemalloc.start()
    count = sum(len(samples) for samples in npz.read_npz(path, MMOE, 1000))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == rows
    assert most_bytes < path.stat().st_size / 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"purchase": None}, "purchase: missing; the file has click, dense, profile, history.keys, history.row_ptrs"),
        ({"dense": None}, "dense: missing; the file has click, "),
        ({"user": [1, 2, 3]}, "user: the graph has no such input; expected click, purchase, dense, profile, history"),
        ({"profile": None}, "profile: expected either profile, or profile.keys and profile.row_ptrs; got click, "),
        ({"history__keys": None}, "history.keys and history.row_ptrs; got history.row_ptrs"),
        ({"history": [1, 2, 3]}, "history.row_ptrs; got history, history.keys, history.row_ptrs"),
        ({"click": 1}, "click: expected at least one sample, got shape []"),
        ({"click": []}, "click: expected at least one sample, got shape [0]"),
        ({"purchase": [0, 1]}, "purchase: expected shape [3, 1], got [2]"),
        ({"purchase": [[0, 1]] * 3}, "purchase: expected shape [3, 1], got [3, 2]"),
        ({"click": ["0", "1", "1"]}, "click: expected numbers, got <U1"),
        ({"dense": [1.0, 2.0, 3.0]}, "dense: expected shape [3, 2], got [3]"),
        ({"dense": np.zeros((3, 2), complex)}, "dense: expected numbers, got complex128"),
        ({"profile": np.zeros((3, 3))}, "profile: expected integers, got float64"),
        ({"profile": np.zeros((3, 3), bool)}, "profile: expected integers, got bool"),
        ({"profile": np.zeros((3, 4), int)}, "profile: expected shape [3, 3], got [3, 4]"),
        ({"profile": np.full((3, 3), 2**64 - 1, np.uint64)}, f"expected keys below {2**63}, got {2**64 - 1} at [0, 0]"),
        ({"history__keys": [[4], [4], [9]]}, "history.keys: expected shape [N], got [3, 1]"),
        ({"history__keys": [4.0, 4.0, 9.0]}, "history.keys: expected integers, got float64"),
        ({"history__row_ptrs": [0, 2, 3]}, "history.row_ptrs: expected shape [4], an offset per slot and one more"),
        (
            {"history__row_ptrs": [[0, 2, 2, 3]]},
            "history.row_ptrs: expected shape [4], an offset per slot and one more",
        ),
        ({"history__row_ptrs": [0.0, 2.0, 2.0, 3.0]}, "history.row_ptrs: expected integers, got float64"),
        ({"history__row_ptrs": [0, 2, 2, 4]}, "offsets from 0 to 3, the number of keys, got 4 at [3]"),
        ({"history__row_ptrs": [-1, 2, 2, 3]}, "offsets from 0 to 3, the number of keys, got -1 at [0]"),
        ({"history__row_ptrs": [1, 2, 2, 3]}, "history.row_ptrs: expected offsets from 0 to 3, got 1 at [0]"),
        ({"history__row_ptrs": [0, 2, 2, 2]}, "history.row_ptrs: expected offsets from 0 to 3, the last one is 2"),
        ({"history__row_ptrs": [0, 2, 1, 3]}, "history.row_ptrs: expected offsets that never fall, got 1 at [2]"),
    ],
)
def test_an_array_that_is_not_what_the_graph_reads_is_refused(tmp_path, changes, message):
    path = write(tmp_path, good(**changes))

    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_npz(path, MMOE)

    assert str(caught.value).startswith(f"{path} array ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"purchase": [0, 1, 2]}, "column purchase record 2: expected 0 or 1, found 2"),
        ({"purchase": [[0], [np.nan], [1]]}, "column purchase record 1: expected 0 or 1, found nan"),
        ({"dense": [[0, 0], [0, np.inf], [0, 0]]}, "column dense[1] record 1: expected a finite number, found inf"),
        ({"dense": [[0, 0], [0, 0], [1e39, 0]]}, "column dense[0] record 2: expected a finite number, found inf"),
        ({"profile": [[1, 2, BIG], [1, 2, 3], [1, 2, 3]]}, f"profile[2] record 0: .* to {BIG - 2}, found {BIG}"),
        ({"profile": [[1, 2, 3], [-BIG - 1, 2, 3], [1, 2, 3]]}, f"profile[0] record 1: expected a key from {-BIG + 1}"),
        ({"history__keys": [4, 4, BIG]}, f"column history record 2: .* to {BIG - 2}, found {BIG}"),
    ],
)
def test_a_value_that_training_cannot_use_is_refused(tmp_path, changes, message):
    path = write(tmp_path, good(**changes))

    with pytest.raises(DataError, match=re.escape(message).replace(r"\.\*", ".*")):
        read_npz(path, MMOE)


def test_a_dense_array_for_a_graph_without_dense_features_is_refused(tmp_path):
    arrays = {"label": [1], "user": [1], "goods": [[1] * 11], "categories": [[1] * 11], "dense": np.zeros((1, 0))}

    with pytest.raises(DataError, match="array dense: the graph has no such input; expected label, user, "):
        read_npz(write(tmp_path, arrays), DIN)


def packed(arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def archive(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name, content in members.items():
            out.writestr(f"{name}.npy", content)
    return file.getvalue()


def plain(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def headed(shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)


OBJECTS = np.array([{}, None], dtype=object)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "train.npz: expected a .npz file of numbers, found an empty file", id="empty"),
        pytest.param(b"1\t2\n", "found 4 bytes, which begin with b'1\\t2\\n'", id="text"),
        pytest.param(plain(np.zeros(3)), "bytes, which begin with b'\\x93NUMPY", id="npy"),
        pytest.param(packed(good())[:-40], "numbers, found a file that is cut short or damaged", id="cut-short"),
        pytest.param(archive(click=b"x"), "train.npz array click: ", id="member-is-no-array"),
        pytest.param(archive(click=plain(np.zeros(9))[:-8]), "train.npz array click: ", id="member-cut-short"),
        pytest.param(
            archive(click=headed("(True, 4)")),
            "train.npz array click: shape [True, 4] takes 16 bytes",
            id="shape-of-no-integers",
        ),
        pytest.param(
            archive(click=headed((1 << 70, 4))),
            "train.npz array click: shape [1180591620717411303424, 4] takes",
            id="shape-beyond-int64",
        ),
        pytest.param(
            archive(click=headed((1 << 50,))),
            "click: shape [1125899906842624] takes",
            id="shape-of-petabytes",
        ),
        pytest.param(archive(), "train.npz array click: missing; the file has no arrays", id="no-arrays"),
        pytest.param(b"".join([packed(good())[:60], b"??", packed(good())[62:]]), "train.npz", id="changed"),
    ],
)
def test_a_file_that_is_not_an_npz_is_refused(tmp_path, content, message):
    path = tmp_path / "train.npz"
    path.write_bytes(content)

    with pytest.raises(DataError, match=re.escape(message)):
        read_npz(path, MMOE)


def test_python_objects_are_not_unpickled(tmp_path):
    path = tmp_path / "train.npz"
    np.savez(path, click=OBJECTS)

    with pytest.raises(
        DataError, match=r"train\.npz array click: expected a \.npz file of numbers, found Python objects"
    ):
        read_npz(path, MMOE)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.npz: no such file"):
        read_npz(tmp_path / "absent.npz", MMOE)
    with pytest.raises(DataError, match="not a regular file"):
        read_npz(tmp_path, MMOE)


@settings(deadline=None, max_examples=30)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), compressed=st.booleans())
def test_a_changed_byte_is_refused_or_does_no_harm(tmp_path_factory, place, value, compressed):
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **good())
    content = bytearray(file.getvalue())
    content[int(place * len(content))] = value
    path = tmp_path_factory.mktemp("changed") / "train.npz"
    path.write_bytes(content)

    try:
        samples = read_npz(path, MMOE)
    except DataError as err:
        assert str(err).startswith(str(path))  # noqa: PT017
    else:
        assert lists_of(samples.bags)[0] == [[1], [2], [3], [4, 4]]
