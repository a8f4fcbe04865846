"""Batches through the plugin, against plain PyTorch operations in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ReservedKeyError
from training import embedding_plugin as plugin
from training.errors import SessionError
from training.tables.table import EmbeddingTable

ROWS, SLOTS, DIM = 7, 2, 3
HPARAMS = {
    "SGD": [0.1],
    "MomentumSGD": [0.1, 0.9],
    "Nesterov": [0.1, 0.9],
    "Adam": [0.1, 0.9, 0.99, 1e-3],
    "RowWiseAdaGrad": [0.1, 0.1, 1e-3],
}
#: A batch is a list of bags: bag r is slot r % SLOTS of sample r // SLOTS.
BATCH = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=3), min_size=4 * SLOTS, max_size=4 * SLOTS)


def random(*shape, seed=0):
    """Multiples of 1/8, whose sums are exact."""
    return np.random.default_rng(seed).integers(-16, 17, shape).astype(np.float32) / 8


def create(**changed):
    arguments = {
        "init_value": random(ROWS, DIM),
        "max_vocabulary_size_per_gpu": ROWS,
        "slot_num": SLOTS,
        "max_nnz": 3,
        "embedding_vec_size": DIM,
        "optimizer_type": "SGD",
        "opt_hparams": [1.0],
    }
    return plugin.create_embedding(**(arguments | changed))


def convert(name, bags, is_training=True, gpus=1):
    rows = [number for number, bag in enumerate(bags) for _ in bag]
    keys = [key for bag in bags for key in bag]
    tensors = [torch.tensor(numbers, dtype=torch.int64) for numbers in (rows, keys)]
    return plugin.broadcast_then_convert_to_csr(name, *tensors, [torch.int32] * gpus, is_training)


def look_up(name, bags, trigger, is_training=True):
    return plugin.fprop(name, 0, convert(name, bags, is_training), trigger, is_training)


def rows_of(name, count, trigger):
    """Return the rows of the keys 0 to ``count`` - 1. The plugin's batches have at least this size."""
    bags = [[key] for key in range(count)]
    batch = convert(name, bags, is_training=False)
    return plugin.fprop(name, 0, batch, trigger, is_training=False).reshape(-1, DIM)[:count]


def pool(table, bags, combiner):
    divisors = [max(len(bag), 1) if combiner == "mean" else 1 for bag in bags]
    return torch.stack([table[bag].sum(dim=0) / divisor for bag, divisor in zip(bags, divisors, strict=True)])


def move(optimizer, table, states, gradient, step):
    """Move rows by the formulas of HugeCTR."""
    lr, *rest = HPARAMS[optimizer]
    first, second = states
    if optimizer == "SGD":
        table -= lr * gradient
    elif optimizer == "Adam":
        beta1, beta2, epsilon = rest
        first.mul_(beta1).add_((1 - beta1) * gradient)
        second.mul_(beta2).add_((1 - beta2) * gradient.square())
        table -= lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) * first / (second.sqrt() + epsilon)
    elif optimizer == "RowWiseAdaGrad":
        first += gradient.square().mean(dim=1, keepdim=True)
        table -= lr * gradient / ((rest[0] + first).sqrt() + rest[1])
    else:
        before = first.clone()
        first.mul_(rest[0]).sub_(lr * gradient)
        table += first if optimizer == "MomentumSGD" else (1 + rest[0]) * first - rest[0] * before


@settings(deadline=None, max_examples=20)
@given(
    batches=st.lists(BATCH, min_size=1, max_size=4),
    optimizer=st.sampled_from(sorted(HPARAMS)),
    update_type=st.sampled_from(["Local", "Global", "LazyGlobal"]),
    combiner=st.sampled_from(["sum", "mean"]),
    embedding_type=st.sampled_from(["distributed", "localized"]),
    gpus=st.sampled_from([1, 2, 4]),
    scaler=st.sampled_from([1.0, 128.0, 1024.0]),
)
def test_ragged_batches_train_as_plain_pytorch_does(
    batches, optimizer, update_type, combiner, embedding_type, gpus, scaler
):
    if update_type == "LazyGlobal" and optimizer == "Adam":
        update_type = "Local"  # HugeCTR's lazy Adam has a rule of its own, tested with the rules
    plugin.reset()
    plugin.init(list(range(gpus)), batch_size=4, batch_size_eval=4)
    name = create(
        embedding_type=embedding_type,
        optimizer_type=optimizer,
        opt_hparams=HPARAMS[optimizer],
        update_type=update_type,
        combiner=combiner,
        scaler=scaler,
    )
    trigger = torch.nn.Parameter(torch.ones(1))
    table = torch.from_numpy(random(ROWS, DIM)).double()
    states = [torch.zeros_like(table), torch.zeros_like(table)]

    for step, bags in enumerate(batches, start=1):
        each = convert(name, bags, gpus=gpus)
        vectors = torch.cat([plugin.fprop(name, replica, each, trigger) for replica in range(gpus)])
        known = table.clone().requires_grad_()
        expected = pool(known, bags, combiner)
        if update_type != "LazyGlobal":
            torch.testing.assert_close(vectors.reshape(-1, DIM).double(), expected, rtol=1e-4, atol=1e-4)
        factors = torch.from_numpy(random(4 * SLOTS, DIM, seed=step))
        (vectors.reshape(-1, DIM) * factors * scaler).sum().backward()
        (expected * factors).sum().backward()
        touched = sorted({key for bag in bags for key in bag})
        moved = touched if update_type == "Local" else list(range(ROWS))
        of_moved = [state[moved] for state in states]
        rows = table[moved]
        move(optimizer, rows, of_moved, known.grad[moved], step)
        table[moved] = rows
        for state, changed in zip(states, of_moved, strict=True):
            state[moved] = changed

    of_each = torch.cat(
        [
            plugin.fprop(name, r, convert(name, [[k] for k in range(ROWS)], False, gpus), trigger, False)
            for r in range(gpus)
        ]
    )
    compared = touched if update_type == "LazyGlobal" else list(range(ROWS))  # the others are behind
    found = of_each.reshape(-1, DIM)[:ROWS].double()
    torch.testing.assert_close(found[compared], table[compared], rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(bags=BATCH, order=st.randoms(use_true_random=False))
def test_padding_and_the_order_of_rows_do_not_matter(bags, order):
    plugin.reset()
    plugin.init([0], batch_size=4)
    name, trigger = create(), torch.nn.Parameter(torch.ones(()))
    padded = [bag + [-1] * (3 - len(bag)) for bag in bags]
    rows = np.repeat(np.arange(len(bags)), 3)
    keys = np.array(padded).reshape(-1)
    by_bag = list(range(len(bags)))
    order.shuffle(by_bag)
    places = np.concatenate([np.flatnonzero(rows == bag) for bag in by_bag])

    plain = look_up(name, bags, trigger)
    shuffled = plugin.broadcast_then_convert_to_csr(name, rows[places].astype(np.int32), keys[places], [0])
    offsets = np.arange(0, len(keys) + 1, 3)
    of_csr = plugin.fprop_experimental(name, 0, offsets, keys, len(keys), trigger, input_buffer_reset=True)

    assert torch.equal(plugin.fprop(name, 0, shuffled, trigger), plain)
    assert torch.equal(of_csr, plain)


def test_a_batch_without_keys_gives_zeros_and_moves_nothing(trigger):
    plugin.init([0], batch_size=4, batch_size_eval=4)
    name = create(optimizer_type="Adam", opt_hparams=HPARAMS["Adam"])

    vectors = look_up(name, [[]] * 8, trigger)
    vectors.sum().backward()

    assert vectors.shape == (4, SLOTS, DIM)
    assert not vectors.any()
    assert torch.equal(rows_of(name, ROWS, trigger), torch.from_numpy(random(ROWS, DIM)))


def test_evaluation_makes_no_rows_and_unknown_keys_count_as_zeros(trigger):
    plugin.init([0], batch_size=1, batch_size_eval=2)
    name = create(combiner="mean", max_vocabulary_size_per_gpu=100)

    vectors = look_up(name, [[1, 50], [60], [], [2]], trigger, is_training=False)

    assert not vectors.requires_grad
    row = torch.from_numpy(random(ROWS, DIM))
    expected = torch.stack([row[1] / 2, torch.zeros(DIM), torch.zeros(DIM), row[2]]).reshape(2, 2, DIM)
    torch.testing.assert_close(vectors, expected)
    assert not look_up(name, [[50], [60], [], []], trigger, is_training=False).any()
    assert look_up(name, [[50], []], trigger)[0, 0].any()  # training makes a row


def test_first_weights_depend_on_the_key_the_seed_and_the_embedding(trigger):
    def first(seed, before=0):
        plugin.reset()
        plugin.init([0], seed=seed)
        for _ in range(before):
            create(init_value=False)
        return look_up(create(init_value=True), [[3], [4]], trigger).tolist()

    assert first(1) == first(1)
    assert len({str(first(*of)) for of in ((1,), (5,), (1, 1))}) == 3
    assert all(-0.05 <= value < 0.05 for [slots] in [first(1)] for slot in slots for value in slot)


def test_every_backward_pass_is_one_step(trigger):
    plugin.init([0], batch_size=1, batch_size_eval=4)
    name = create()
    batch = convert(name, [[1], []])

    first, second = plugin.fprop(name, 0, batch, trigger), plugin.fprop(name, 0, batch, trigger)
    for vectors in (first, first, second):
        vectors.sum().backward()

    moved = rows_of(name, ROWS, trigger) - torch.from_numpy(random(ROWS, DIM))
    assert moved[:, 0].tolist() == [0, -3, 0, 0, 0, 0, 0]
    assert trigger.grad == 0


def test_vectors_without_a_gradient_and_evaluations_between_change_nothing(trigger):
    plugin.init([0], batch_size=1, batch_size_eval=4)
    name = create()
    vectors = look_up(name, [[1], [2]], trigger)
    rows_of(name, ROWS, trigger)
    with torch.no_grad():
        look_up(name, [[3], []], trigger)
    vectors.detach().requires_grad_().sum().backward()
    vectors.add_(1).sum().backward()  # in place, as activations may be

    moved = rows_of(name, ROWS, trigger) != torch.from_numpy(random(ROWS, DIM))
    assert moved.any(dim=1).nonzero().flatten().tolist() == [1, 2]


def test_embeddings_of_one_model_learn_apart(trigger):
    plugin.init([0], batch_size=1, batch_size_eval=4)
    names = [create(name_="e"), create(name_="e", opt_hparams=[2.0]), create(name_="e")]

    (look_up(names[0], [[1], []], trigger) + 3 * look_up(names[1], [[1], [1]], trigger)).sum().backward()

    assert names == ["e", "e_1", "e_2"]
    moved = [(rows_of(name, ROWS, trigger) - torch.from_numpy(random(ROWS, DIM)))[1, 0] for name in names]
    assert moved == [-1, -2 * 2 * 3, 0]


def test_half_returns_float16_and_keeps_float32_rows(trigger):
    plugin.init([0], value_type="half", batch_size=1, batch_size_eval=4)
    name = create(scaler=1024, opt_hparams=[2.0**-20])

    vectors = look_up(name, [[1], [2]], trigger)
    (vectors * 1024).sum().backward()

    assert vectors.dtype == torch.float16
    assert trigger.grad.dtype == torch.float32
    [row] = rows_in_full(name)
    assert (row == random(ROWS, DIM)[1] - np.float32(2.0**-20)).all()


def test_a_half_gradient_that_overflows_moves_no_row(trigger):
    plugin.init([0], value_type="half", batch_size=1, batch_size_eval=4)
    name = create(scaler=1024, optimizer_type="Adam", opt_hparams=HPARAMS["Adam"])
    vectors = look_up(name, [[1], [2]], trigger)

    with pytest.warns(UserWarning, match="'hugectr_embedding': a gradient is not finite, so this step is skipped"):
        (vectors.float().sum() * 1024 * 1e6).backward()

    assert (rows_in_full(name) == random(ROWS, DIM)[1]).all()
    assert plugin_table(name).step == 0
    assert trigger.grad == 0
    (vectors.float().sum() * 1024).backward()  # the first step of Adam
    np.testing.assert_allclose(rows_in_full(name)[0], random(ROWS, DIM)[1] - 0.1, atol=1e-3)


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_of_one_replica_that_is_not_finite_skips_the_step_of_all(wrong, trigger):
    plugin.init([0, 1], batch_size=2, batch_size_eval=4)
    name = create()
    each = convert(name, [[1], [], [1], [3]], gpus=2)
    first, second = (plugin.fprop(name, replica, each, trigger) for replica in range(2))

    first.sum().backward()
    with pytest.warns(UserWarning, match="a gradient is not finite"):
        second[0, 1, 2].backward(torch.tensor(wrong))

    assert plugin_table(name).step == 0
    assert (rows_in_full(name) == random(ROWS, DIM)[1]).all()
    for vectors in (second, first):
        vectors.sum().backward()
    assert (rows_in_full(name) == random(ROWS, DIM)[1] - 2).all()


def rows_in_full(name):
    """Return the float32 row of key 1."""
    table = plugin_table(name)
    return table.select(np.array([1])).vectors


def plugin_table(name) -> EmbeddingTable:
    from training.calls.plugin.state import found

    return found("test", name)[2].table


def test_uint32_keys_go_up_to_the_largest_one(trigger):
    plugin.init([0], key_type="uint32")
    name = create(init_value=False, max_vocabulary_size_per_gpu=5)
    keys = torch.tensor([0, 2**32 - 1]).to(torch.uint32)

    vectors = plugin.fprop(
        name, 0, plugin.broadcast_then_convert_to_csr(name, torch.tensor([0, 1]), keys, [0]), trigger
    )

    assert vectors.shape == (1, 2, DIM)
    assert vectors.all()


def test_a_full_vocabulary_refuses_only_new_keys(trigger):
    plugin.init([0, 1], batch_size=2, batch_size_eval=2)
    name = create(init_value=False, max_vocabulary_size_per_gpu=2)

    for replica, each in enumerate(convert(name, [[1, 1], [2], [3], [4, 4, 4]], gpus=2)):
        plugin.fprop(name, replica, each, trigger)
    plugin.fprop(name, 1, convert(name, [[1], [2], [3], [4]], gpus=2), trigger)
    with pytest.raises(ValueError, match="expected at most 4 distinct keys, the vocabulary of all GPUs, got 6"):
        plugin.fprop(name, 0, convert(name, [[7, 8, 7], [4], [], []], gpus=2), trigger)

    assert not plugin.fprop(name, 0, convert(name, [[7], [8], [], []], False, 2), trigger, False).any()


def test_slot_sizes_replace_the_vocabulary_of_a_gpu(trigger):
    plugin.init([0])
    name = create(init_value=False, slot_size_array=[1, 2])

    look_up(name, [[1], [2, 3]], trigger)
    with pytest.raises(ValueError, match="at most 3 distinct keys"):
        look_up(name, [[4], []], trigger)


def test_a_step_waits_for_all_replicas_and_a_missing_one_is_reported(trigger):
    plugin.init([0, 1], batch_size=2, batch_size_eval=4)
    name = create()
    each = convert(name, [[1], [], [1], []], gpus=2)

    first = plugin.fprop(name, 0, each, trigger)
    first.sum().backward()
    assert plugin_table(name).step == 0
    with pytest.raises(SessionError, match="expected the gradients of replicas 1 before another gradient of replica 0"):
        first.sum().backward()
    for replica in (1, 0):
        plugin.fprop(name, replica, each, trigger).sum().backward()

    assert plugin_table(name).step == 1
    assert (rows_in_full(name) == random(ROWS, DIM)[1] - 2).all()


def test_init_needs_a_reset_before_it_is_called_again():
    plugin.init([0])

    with pytest.raises(SessionError, match="init was called before; call reset first"):
        plugin.init([0])
    plugin.reset()
    plugin.reset()
    plugin.init([0])


@pytest.mark.parametrize(
    "call",
    [
        lambda trigger: create(),
        lambda trigger: convert("e", [[1]]),
        lambda trigger: plugin.fprop("e", 0, [], trigger),
        lambda trigger: plugin.fprop_experimental("e", 0, None, None, 0, trigger),
        lambda trigger: plugin.save("e", "folder"),
        lambda trigger: plugin.restore("e", "folder"),
    ],
    ids=["create_embedding", "broadcast_then_convert_to_csr", "fprop", "fprop_experimental", "save", "restore"],
)
def test_every_call_needs_init(call, trigger):
    with pytest.raises(SessionError, match="call init first"):
        call(trigger)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"visible_gpus": []}, "expected visible_gpus as different numbers, at least one, got []"),
        (ValueError, {"visible_gpus": [1, 1]}, "got [1, 1]"),
        (ValueError, {"visible_gpus": [-1]}, "expected visible_gpus of at least 0, got -1"),
        (TypeError, {"visible_gpus": ["0"]}, "expected visible_gpus as an int, got '0'"),
        (TypeError, {"visible_gpus": 0}, "init: expected visible_gpus as a list, got int"),
        (TypeError, {"visible_gpus": torch.tensor(0)}, "expected visible_gpus as a list, got int64[]"),
        (ValueError, {"seed": -1}, "expected seed of at least 0, got -1"),
        (ValueError, {"key_type": "int32"}, "expected key_type as one of 'int64', 'uint32', got 'int32'"),
        (ValueError, {"value_type": "double"}, "expected value_type as one of 'float', 'half', got 'double'"),
        (ValueError, {"batch_size": 0}, "expected batch_size of at least 1, got 0"),
        (ValueError, {"batch_size": 3}, "expected batch_size as a multiple of 2, the number of GPUs, got 3"),
        (ValueError, {"batch_size_eval": 5}, "expected batch_size_eval as a multiple of 2"),
    ],
)
def test_init_refuses_a_wrong_argument_by_name(error, arguments, message):
    with pytest.raises(error) as refused:
        plugin.init(**({"visible_gpus": [0, 1], "batch_size": 2, "batch_size_eval": 2} | arguments))

    assert message in str(refused.value)
    plugin.init([0])  # nothing was begun


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, {"name_": 1}, "expected name_ as a str, got int"),
        (ValueError, {"embedding_type": "hybrid"}, "expected embedding_type as one of 'distributed', 'localized'"),
        (ValueError, {"combiner": "max"}, "expected combiner as one of 'sum', 'mean', got 'max'"),
        (ValueError, {"optimizer_type": "Ftrl"}, "expected optimizer_type as one of 'Adam', 'MomentumSGD', "),
        (ValueError, {"update_type": "Lazy"}, "expected update_type as one of 'Local', 'Global', 'LazyGlobal'"),
        (ValueError, {"scaler": 2.0}, "expected scaler as one of 1.0, 128.0, 256.0, 512.0, 1024.0, got 2.0"),
        (
            ValueError,
            {"optimizer_type": "Adam", "opt_hparams": [0.001]},
            "expected opt_hparams of Adam as [learning_rate, beta1, beta2, epsilon], got [0.001]",
        ),
        (TypeError, {"opt_hparams": 0.1}, "create_embedding: expected opt_hparams as a list, got float"),
        (TypeError, {"opt_hparams": ["a"]}, "expected opt_hparams of SGD as [learning_rate], all numbers, got ['a']"),
        (TypeError, {"opt_hparams": [None]}, "expected opt_hparams of SGD as [learning_rate], all numbers, got [None]"),
        (ValueError, {"opt_hparams": [-1.0]}, "expected a learning rate of at least 0, got -1.0"),
        (ValueError, {"optimizer_type": "Nesterov", "opt_hparams": [1, 2]}, "momentum_factor must be at least 0"),
        (ValueError, {"slot_num": 0}, "expected slot_num of at least 1, got 0"),
        (ValueError, {"max_nnz": 0}, "expected max_nnz of at least 1, got 0"),
        (TypeError, {"max_feature_num": 1.5}, "expected max_feature_num as an int, got 1.5"),
        (ValueError, {"embedding_vec_size": 0}, "expected embedding_vec_size of at least 1, got 0"),
        (ValueError, {"max_vocabulary_size_per_gpu": 0}, "expected max_vocabulary_size_per_gpu of at least 1"),
        (ValueError, {"slot_size_array": [7]}, "expected slot_size_array with 2 numbers, one per slot, got 1"),
        (TypeError, {"slot_size_array": 5}, "create_embedding: expected slot_size_array as a list, got int"),
        (TypeError, {"slot_size_array": [1.5, 2]}, "expected slot_size_array as an int, got 1.5"),
        (TypeError, {"init_value": [[1.0] * DIM]}, "expected init_value as a bool or a float32 matrix, got list"),
        (TypeError, {"init_value": np.zeros((2, DIM))}, f"got float64[2, {DIM}]"),
        (ValueError, {"init_value": random(2, 4)}, "expected init_value [V, 3] with V of at most 7"),
        (ValueError, {"init_value": random(8, DIM)}, "the vocabulary of all GPUs, got [8, 3]"),
        (ValueError, {"init_value": random(3)}, "got [3]"),
    ],
)
def test_create_embedding_refuses_a_wrong_argument_by_name(error, arguments, message):
    plugin.init([0])

    with pytest.raises(error) as refused:
        create(**arguments)

    assert message in str(refused.value)


I64 = torch.int64


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (KeyError, {"embedding_name": "other"}, "there is no embedding 'other'; there are 'hugectr_embedding'"),
        (ValueError, {"T": [I64, I64]}, "expected T with 1 items, one per GPU, got 2"),
        (TypeError, {"T": 1}, "expected T as a list, got int"),
        (TypeError, {"values": torch.zeros(2)}, "expected values as a tensor or an array of int64, got float32[2]"),
        (
            TypeError,
            {"row_indices": torch.arange(2).to_sparse()},
            "expected row_indices as a tensor or an array of int64, got sparse int64[2]",
        ),
        (TypeError, {"row_indices": [0, 1]}, "expected row_indices as a tensor or an array of int64, got list"),
        (
            ValueError,
            {"values": torch.tensor([[1, 2]])},
            "expected values [N], and row_indices [N] or [2, N], got [1, 2]",
        ),
        (ValueError, {"row_indices": torch.zeros(3, dtype=I64)}, "got [2] and [3]"),
        (ValueError, {"row_indices": torch.zeros(3, 2, dtype=I64)}, "got [2] and [3, 2]"),
        (
            IndexError,
            {"row_indices": torch.tensor([3, 4])},
            "expected row_indices from 0 to 3, 2 samples of 2 slots, got 4 at position 1",
        ),
        (IndexError, {"row_indices": torch.tensor([-1, 1])}, "got -1 at position 0"),
        (IndexError, {"row_indices": torch.tensor([0, 2]), "is_training": False}, "from 0 to 1, 1 samples of 2 slots"),
        (IndexError, {"values": torch.tensor([1, 2**32])}, "expected uint32 keys, got 4294967296"),
        (IndexError, {"values": torch.tensor([-2, 1])}, "expected uint32 keys, got -2"),
        (
            ValueError,
            {"row_indices": torch.tensor([3, 3]), "max_nnz": 1},
            "expected at most max_nnz = 1 keys in a slot, got 2 in slot 1 of sample 1",
        ),
        (
            ValueError,
            {"row_indices": torch.tensor([2, 3]), "max_feature_num": 1},
            "expected at most max_feature_num = 1 keys in a sample, got 2 in sample 1",
        ),
    ],
)
def test_a_wrong_batch_is_refused_by_name(error, arguments, message):
    plugin.init([0], key_type="uint32", batch_size=2)
    name = create(max_nnz=arguments.pop("max_nnz", 3), max_feature_num=arguments.pop("max_feature_num", 6))
    usual = {"embedding_name": name, "row_indices": torch.tensor([0, 1]), "values": torch.tensor([1, 2]), "T": [I64]}

    with pytest.raises(error) as refused:
        plugin.broadcast_then_convert_to_csr(**(usual | arguments))

    assert message in str(refused.value)


def test_nested_values_are_refused():
    plugin.init([0], batch_size=2)
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(2), torch.tensor([0, 2]))  # imports for a second

    with pytest.raises(TypeError, match="expected values as a tensor or an array of int64, got nested int64"):
        plugin.broadcast_then_convert_to_csr(
            embedding_name=create(), row_indices=torch.tensor([0, 1]), values=nested, T=[I64]
        )


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"replica_id": 2}, "expected replica_id as one of 0, 1, got 2"),
        (TypeError, {"replica_id": 0.0}, "expected replica_id as an int, got 0.0"),
        (TypeError, {"to_each_replica": torch.zeros(1)}, "to_each_replica as broadcast_then_convert_to_csr returns it"),
        (ValueError, {"to_each_replica": []}, "expected to_each_replica with 2 items, got 0"),
        (ValueError, {"is_training": False}, "for replica 0 with is_training=False, got replica 0 with True"),
        (TypeError, {"bp_trigger": 1.0}, "expected bp_trigger as a float32 tensor with one element, got float"),
        (TypeError, {"bp_trigger": torch.zeros(2)}, "got float32[2]"),
        (TypeError, {"bp_trigger": torch.zeros(1, dtype=torch.float64)}, "got float64[1]"),
        (ValueError, {"bp_trigger": torch.zeros(1)}, "expected bp_trigger to require a gradient"),
    ],
)
def test_fprop_refuses_a_wrong_argument_by_name(error, arguments, message, trigger):
    plugin.init([0, 1], batch_size=2, batch_size_eval=2)
    name = create()
    each = convert(name, [[1]] * 4, gpus=2)
    usual = {"embedding_name": name, "replica_id": 0, "to_each_replica": each, "bp_trigger": trigger}

    with pytest.raises(error) as refused:
        plugin.fprop(**(usual | arguments))

    assert message in str(refused.value)


def test_fprop_refuses_the_keys_of_another_replica_embedding_or_init(trigger):
    plugin.init([0, 1], batch_size=2, batch_size_eval=2)
    name, other = create(), create()
    each = convert(name, [[1]] * 4, gpus=2)

    with pytest.raises(ValueError, match="for replica 1 with is_training=True, got replica 0"):
        plugin.fprop(name, 1, each[0], trigger)
    with pytest.raises(ValueError, match="expected to_each_replica of this embedding, got that of 'hugectr_embedding'"):
        plugin.fprop(other, 0, each, trigger)
    plugin.reset()
    plugin.init([0, 1], batch_size=2, batch_size_eval=2)
    create()
    with pytest.raises(ValueError, match="or from before reset"):
        plugin.fprop(name, 0, each, trigger)


def test_a_reserved_key_is_refused_and_nothing_changes(trigger):
    plugin.init([0])
    name = create(max_vocabulary_size_per_gpu=100)

    with pytest.raises(ReservedKeyError):
        look_up(name, [[50], [2**63 - 1]], trigger)

    assert len(plugin_table(name)) == ROWS


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (
            ValueError,
            {"row_offset": torch.tensor([0, 1])},
            "expected row_offset [3], 1 samples of 2 slots and 1, got [2]",
        ),
        (ValueError, {"row_offset": torch.tensor([0, 2, 1])}, "expected row_offset to ascend from 0 to nnz = 2, got a"),
        (ValueError, {"row_offset": torch.tensor([1, 1, 2])}, "got 1 to 2"),
        (ValueError, {"nnz": 1}, "expected row_offset to ascend from 0 to nnz = 1, got 0 to 2"),
        (ValueError, {"nnz": 3}, "expected values [N] with N of at least nnz = 3, got [2]"),
        (ValueError, {"nnz": -1}, "expected nnz of at least 0, got -1"),
        (TypeError, {"nnz": torch.tensor(2.0)}, "expected nnz as an int, got float32[]"),
        (ValueError, {"values": torch.tensor([[1, 2]])}, "got [1, 2]"),
        (
            ValueError,
            {"row_offset": torch.tensor([0, 0, 2])},
            "max_nnz = 1 keys in a slot, got 2 in slot 1 of sample 0",
        ),
    ],
)
def test_fprop_experimental_refuses_a_wrong_argument_by_name(error, arguments, message, trigger):
    plugin.init([0])
    name = create(max_nnz=1)
    usual = {"row_offset": torch.tensor([0, 1, 2]), "values": torch.tensor([1, 2]), "nnz": 2, "bp_trigger": trigger}

    with pytest.raises(error) as refused:
        plugin.fprop_experimental(name, 0, **(usual | arguments))

    assert message in str(refused.value)
