"""Rows on disk: what ``save`` writes, what ``restore`` reads, and what ``restore`` refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ModelFileError
from serving.model.sparse_file import open_sparse, write_sparse_directory
from tests.serving.model.single_file import write_single_file
from training import embedding_plugin as plugin
from training.calls.plugin.state import found

SLOTS, DIM = 2, 3


def create(**changed):
    arguments = {
        "init_value": False,
        "embedding_type": "distributed",
        "max_vocabulary_size_per_gpu": 10,
        "slot_num": SLOTS,
        "max_nnz": 4,
        "embedding_vec_size": DIM,
        "opt_hparams": [0.1, 0.9, 0.99, 1e-3],
    }
    return plugin.create_embedding(**(arguments | changed))


def train(name, trigger, slots, steps=1):
    """Take steps with the keys of the slots of one sample."""
    rows = torch.tensor([slot for slot, keys in enumerate(slots) for _ in keys], dtype=torch.int64)
    values = torch.tensor([key for keys in slots for key in keys], dtype=torch.int64)
    for _ in range(steps):
        each = plugin.broadcast_then_convert_to_csr(name, rows, values, [torch.int32])
        plugin.fprop(name, 0, each, trigger).square().sum().backward()


def rows_of(name):
    keys, vectors = found("test", name)[2].table.rows()
    return dict(zip(keys.tolist(), vectors.tolist(), strict=True))


@settings(deadline=None, max_examples=15)
@given(
    slots=st.lists(
        st.lists(st.integers(-3, 9).filter(lambda key: key != -1), max_size=4), min_size=2, max_size=2
    ).filter(any),
    embedding_type=st.sampled_from(["distributed", "localized"]),
)
def test_a_restored_embedding_trains_on_as_a_new_one_with_the_same_rows(tmp_path_factory, slots, embedding_type):
    folder = tmp_path_factory.mktemp("saved") / "rows"
    trigger = torch.nn.Parameter(torch.ones(1))
    plugin.reset()
    plugin.init([0])
    name, other = (create(embedding_type=embedding_type) for _ in range(2))
    train(name, trigger, slots, steps=3)
    plugin.save(name, folder)
    saved = rows_of(name)

    train(name, trigger, [[0, 5], [6]])
    train(other, trigger, [[7], []])
    for one in (name, other):
        plugin.restore(one, folder)
        assert rows_of(one) == saved
        train(one, trigger, slots, steps=2)

    assert rows_of(name) == rows_of(other)  # the states of the optimizer began again in both


def test_a_localized_embedding_saves_the_slots_of_its_keys(tmp_path, trigger):
    plugin.init([0])
    init_value = np.ones((3, DIM), np.float32)
    localized, distributed = create(init_value=init_value, embedding_type="localized"), create(init_value=init_value)
    for name in (localized, distributed):
        train(name, trigger, [[8], [2, 9]])
        plugin.save(name, tmp_path / name)

    model = open_sparse(tmp_path / localized, DIM)
    [(keys, vectors)] = model.batches(100)
    assert dict(zip(keys.tolist(), model.slot_ids.tolist(), strict=True)) == {0: 0, 1: 1, 2: 0, 8: 0, 9: 1}
    assert dict(zip(keys.tolist(), vectors.tolist(), strict=True)) == rows_of(localized)
    assert open_sparse(tmp_path / distributed, DIM).slot_ids is None
    plugin.restore(distributed, tmp_path / localized)
    plugin.restore(localized, tmp_path / localized)
    assert rows_of(distributed) == rows_of(localized)
    plugin.save(localized, tmp_path / "again")
    assert (tmp_path / "again" / "slot_id").read_bytes() == (tmp_path / localized / "slot_id").read_bytes()


@pytest.mark.parametrize("embedding_type", ["distributed", "localized"])
@pytest.mark.parametrize("key_type", ["uint32", "int64"])
def test_the_single_file_of_the_plugin_of_hugectr_is_read(tmp_path, embedding_type, key_type):
    plugin.init([0], key_type=key_type)
    name = create(embedding_type=embedding_type)
    keys, vectors = np.array([7, 2**31 + 5]), np.arange(6, dtype=np.float32).reshape(2, DIM)
    slot_ids = np.array([1, 0], np.uint64) if embedding_type == "localized" else None
    write_single_file(tmp_path / "rows", keys, vectors, "I32" if key_type == "uint32" else "I64", slot_ids)

    plugin.restore(name, tmp_path / "rows")

    assert rows_of(name) == dict(zip(keys.tolist(), vectors.tolist(), strict=True))


def test_a_backward_pass_after_a_restore_leaves_rows_of_other_keys_alone(tmp_path, trigger):
    plugin.init([0])
    name = create(optimizer_type="SGD", opt_hparams=[1.0])
    vectors = np.zeros((2, DIM), np.float32)
    write_sparse_directory(tmp_path / "rows", np.array([5, 6]), vectors)
    each = plugin.broadcast_then_convert_to_csr(name, torch.tensor([0, 1]), torch.tensor([1, 6]), [0])
    before = plugin.fprop(name, 0, each, trigger)

    plugin.restore(name, tmp_path / "rows")
    before.sum().backward()

    assert rows_of(name)[5] == [0, 0, 0]


def test_a_restore_forgets_the_gradients_of_a_step_that_waits_for_other_replicas(tmp_path, trigger):
    plugin.init([0, 1], batch_size=2, batch_size_eval=2)
    name = create(optimizer_type="SGD", opt_hparams=[1.0])
    write_sparse_directory(tmp_path / "rows", np.array([1, 2]), np.zeros((2, DIM), np.float32))
    each = plugin.broadcast_then_convert_to_csr(name, torch.tensor([0, 2]), torch.tensor([1, 2]), [0, 1])
    plugin.fprop(name, 0, each, trigger).sum().backward()

    plugin.restore(name, tmp_path / "rows")
    for replica in (0, 1):
        plugin.fprop(name, replica, each, trigger).sum().backward()

    assert rows_of(name) == {1: [-1, -1, -1], 2: [-1, -1, -1]}


def files(keys=(1, 2), dim=DIM, **columns):
    def write(path):
        keys_of_rows = np.array(keys)
        write_sparse_directory(path, keys_of_rows, np.ones((len(keys), dim), np.float32), **columns)

    return write


def repeated(path):
    files()(path)
    np.array([1, 1]).tofile(path / "key")


def cut_short(path):
    files()(path)
    (path / "emb_vector").write_bytes(b"1234")


@pytest.mark.parametrize(
    ("write", "embedding", "message"),
    [
        (lambda path: None, {}, "no such file"),
        (files(dim=4), {}, "expected 24 bytes for 2 keys of 12 bytes, found 32, as if of 4 floats each"),
        (files(keys=range(11)), {}, "expected at most 10 rows, the vocabulary of all GPUs, found 11"),
        (files(keys=[1, 2**32]), {}, "row 1: key 4294967296 is not a uint32"),
        (files(), {"embedding_type": "localized"}, "expected slot_id, because the embedding is localized, found none"),
        (repeated, {}, "key 1 is in row 0 and again in row 1"),
        (cut_short, {}, "expected 24 bytes"),
        (lambda path: path.write_bytes(b"123"), {}, "expected a multiple of 16 bytes"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, trigger, write, embedding, message):
    plugin.init([0], key_type="uint32")
    name = create(**embedding)
    train(name, trigger, [[3], [4]])
    before = rows_of(name)
    write(tmp_path / "rows")

    with pytest.raises(ModelFileError) as refused:
        plugin.restore(name, tmp_path / "rows")

    assert message in str(refused.value)
    assert rows_of(name) == before


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: plugin.save("e", ""), "save: embedding 'e': expected save_name with the name of a folder"),
        (ValueError, lambda: plugin.save("e", "."), "expected save_name with the name of a folder, got '.'"),
        (TypeError, lambda: plugin.save("e", 5), "save: embedding 'e': expected save_name as a path, got int"),
        (
            TypeError,
            lambda: plugin.restore("e", None),
            "restore: embedding 'e': expected file_name as a path, got None",
        ),
    ],
)
def test_what_is_not_a_path_is_refused_by_name(error, call, message):
    plugin.init([0])
    create(name_="e", init_value=np.ones((1, DIM), np.float32))

    with pytest.raises(error) as refused:
        call()

    assert message in str(refused.value)


def test_an_embedding_without_rows_or_a_path_of_a_file_is_not_saved(tmp_path, trigger):
    plugin.init([0])
    name = create()
    with pytest.raises(ModelFileError, match="embedding 'hugectr_embedding' has no rows yet"):
        plugin.save(name, tmp_path / "rows")
    train(name, trigger, [[1], []])
    (tmp_path / "file").touch()

    with pytest.raises(ModelFileError, match="file: cannot be written: Not a directory"):
        plugin.save(name, tmp_path / "file")
    with pytest.raises(KeyError, match="there is no embedding 'other'"):
        plugin.save("other", tmp_path / "rows")

    assert {path.name for path in tmp_path.iterdir()} == {"file"}
