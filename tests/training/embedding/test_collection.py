"""EmbeddingBagCollection in PyTorch programs, against modules and operations of PyTorch."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kernels.errors import ReservedKeyError
from tests.training.embedding.oracle import flat, pool
from training import EmbeddingBagCollection, EmbeddingBagConfig, join_state_dicts
from training.embedding import Constant, Normal, Uniform
from training.optimizers import SGD, AdaGrad, Adam, Ftrl, MomentumSGD, Nesterov, RowWiseAdaGrad
from training.samples import Bags

EVERY = [SGD, MomentumSGD, Nesterov, Adam, AdaGrad, RowWiseAdaGrad, Ftrl]
BAGS = st.lists(st.lists(st.integers(-3, 8), max_size=4), min_size=1, max_size=6)


def jagged(bags):
    keys, offsets = flat(bags)
    return torch.tensor(keys, dtype=torch.int64), torch.tensor(offsets)


def vectors_of(table):
    return dict(zip(*(part.tolist() for part in table.rows()), strict=True))


def test_one_adam_step_moves_rows_as_in_hugectrs_worked_example():
    # HugeCTR's TensorFlow plugin: learning rate 0.1, gradient ones; keys 0 and 1 are read four times, 2 and 6 twice.
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(4)})
    optimizer = Adam(tables.parameters(), lr=0.1, beta1=0.9, beta2=0.99, epsilon=1e-3)
    pooled = tables({"t": jagged([[0], [1], [2, 6], [0], [1], [], [0], [1], [6], [0], [1], [2]])})["t"]
    before = vectors_of(tables.tables["t"])

    pooled.sum().backward()
    optimizer.step()

    after = vectors_of(tables.tables["t"])
    for key, expected in {0: 0.09975063, 1: 0.09975063, 2: 0.09950249, 6: 0.09950249}.items():
        decrease = np.subtract(before[key], after[key])
        np.testing.assert_allclose(decrease, expected, atol=2e-8)  # float32 of numbers below 0.2


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("update_type", ["Local", "Global", "LazyGlobal"])
@pytest.mark.parametrize("optimizer", EVERY)
def test_tables_learn_what_embedding_bags_of_pytorch_learn(optimizer, update_type, combiner):
    config = EmbeddingBagConfig(4, combiner)
    ours = EmbeddingBagCollection({"a": config, "b": config}, seed=3)
    ours({name: torch.arange(20) for name in "ab"})  # so that all rows exist
    theirs = nn.ModuleDict(
        {
            name: nn.EmbeddingBag.from_pretrained(
                torch.tensor(table.rows()[1]), freeze=False, mode=combiner, sparse=True, include_last_offset=True
            )
            for name, table in ours.tables.items()
        }
    )
    stepping = [optimizer(net.parameters(), lr=0.1, update_type=update_type) for net in (ours, theirs)]
    rng = np.random.default_rng(0)

    for _ in range(8):
        bags = {name: jagged([rng.integers(0, 20, rng.integers(0, 4)).tolist() for _ in range(5)]) for name in "ab"}
        pooled = [ours(bags), {name: theirs[name](*bags[name]) for name in "ab"}]
        for one, net in zip(pooled, stepping, strict=True):
            net.zero_grad()
            sum((tensor - 1).square().sum() for tensor in one.values()).backward()
            net.step()

    for name, table in ours.tables.items():
        np.testing.assert_allclose(table.rows()[1], theirs[name].weight.detach(), rtol=1e-3, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(bags=BAGS, combiner=st.sampled_from(["sum", "mean", "sqrtn"]), max_norm=st.sampled_from([None, 0.08]))
def test_weights_get_the_gradient_of_plain_pytorch(bags, combiner, max_norm):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(3, combiner, max_norm=max_norm)})
    keys, offsets = jagged(bags)
    weights = torch.rand(len(keys), generator=torch.Generator().manual_seed(0)) + 0.1
    weights.requires_grad_()
    pooled = tables({"t": (keys, offsets, weights)})["t"]
    (pooled * torch.arange(3)).sum().backward()

    known = vectors_of(tables.tables["t"])
    rows = torch.tensor([known[key] for key in keys.tolist()], dtype=torch.float64).reshape(-1, 3)
    places = torch.arange(len(keys)).split((offsets[1:] - offsets[:-1]).tolist())
    doubles = weights.detach().double().requires_grad_()
    expected = pool(
        rows, [place.tolist() for place in places], [doubles[place] for place in places], combiner, max_norm
    )
    (expected * torch.arange(3)).sum().backward()

    torch.testing.assert_close(pooled.double(), expected, rtol=1e-4, atol=1e-6)
    if len(keys):
        torch.testing.assert_close(weights.grad.double(), doubles.grad, rtol=1e-3, atol=1e-5)


def test_every_form_of_bags_gives_the_same_vectors():
    config = EmbeddingBagConfig(4)
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(4, features=tuple("abcdefg"))}, seed=1)
    bags = [[5, 6], [7], [], [8, 5]]
    keys, offsets = jagged(bags)
    nested = torch.nested.nested_tensor_from_jagged(keys, offsets)
    features = {
        "a": (keys, offsets),
        "b": (keys, offsets, torch.ones(5)),
        "c": (keys.int(), offsets.int()),
        "d": torch.tensor([[5, 6], [7, -1], [-1, -1], [5, 8]]),
        "e": nested,
        "f": TorchRecJagged(keys, offsets),
    }

    pooled = tables(features | {"g": torch.tensor([6, -1, 8])})
    of_samples = EmbeddingBagCollection({"t": config}, seed=1)({"t": Bags(keys.numpy(), offsets.numpy(), 2)})["t"]

    for feature in "bcdef":
        torch.testing.assert_close(pooled[feature], pooled["a"], rtol=0, atol=0)
    assert of_samples.shape == (2, 2, 4)
    torch.testing.assert_close(of_samples.reshape(4, 4), pooled["a"], rtol=0, atol=0)
    assert pooled["g"].shape == (3, 4)
    assert not pooled["g"][1].any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_jagged_tensor_with_holes_reads_only_the_keys_of_its_bags():
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(dim=1, initializer=Constant(1.0))})
    from_jagged = torch.nested.nested_tensor_from_jagged
    numbers = torch.arange(20)
    narrowed = torch.nested.narrow(
        numbers.reshape(4, 5), 1, torch.arange(4), torch.tensor([1, 2, 0, 2]), layout=torch.jagged
    )
    inputs = [
        (from_jagged(numbers[:8], torch.tensor([0, 4, 8]), torch.tensor([2, 1])), [[0, 1], [4]]),
        (from_jagged(numbers[:8], torch.tensor([2, 4, 6])), [[2, 3], [4, 5]]),
        (from_jagged(numbers[:5].int(), torch.tensor([0, 3, 3, 5])), [[0, 1, 2], [], [3, 4]]),
        (from_jagged(numbers[::2], torch.tensor([0, 4, 10]), torch.tensor([0, 3])), [[], [8, 10, 12]]),
        (from_jagged(numbers[:0], torch.tensor([0, 0])), [[]]),
        (narrowed, [[0], [6, 7], [], [18, 19]]),
        (torch.nested.nested_tensor([numbers[:2], numbers[:0], numbers[5:7]]), [[0, 1], [], [5, 6]]),
        (torch.nested.nested_tensor([numbers[:2], numbers[4:5]], layout=torch.jagged), [[0, 1], [4]]),
    ]

    for value, bags in inputs:
        before = set(vectors_of(tables.tables["t"]))
        pooled = tables({"t": value})["t"]

        assert pooled.ravel().tolist() == [len(bag) for bag in bags]
        assert set(vectors_of(tables.tables["t"])) == before.union(*bags)
    assert tables({"t": torch.nested.nested_tensor([])})["t"].shape == (0, 1)


def test_the_weights_of_a_jagged_tensor_with_holes_are_those_of_its_keys():
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(dim=1, initializer=Constant(1.0))})
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    value = TorchRecJagged(torch.arange(4), torch.tensor([1, 2, 3]), weights)

    pooled = tables({"t": value})["t"]
    pooled.sum().backward()

    assert pooled.ravel().tolist() == [2.0, 4.0]
    assert weights.grad.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("lengths", [[2, 9], [2, -1], [1, 1, 1]])
def test_a_jagged_tensor_whose_bags_are_not_inside_its_keys_is_refused(lengths):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(dim=1)})
    value = TorchRecJagged(torch.arange(8), torch.tensor([0, 4, 8]))
    value.lengths = lambda: torch.tensor(lengths)

    with pytest.raises(ValueError, match=r"feature 't': expected bags inside the 8 keys, got offsets \[0, 4, 8\]"):
        tables({"t": value})


def test_a_keyed_jagged_tensor_has_the_bags_of_several_features():
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(1, "sum", ("a", "b"), initializer=Constant(1.0))})
    a = TorchRecJagged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), torch.tensor([1.0, 2.0, 4.0]))
    b = TorchRecJagged(torch.tensor([4]), torch.tensor([0, 0, 1]), torch.tensor([1.0]))

    pooled = tables(TorchRecKeyed({"a": a, "b": b}))

    assert {name: one.ravel().tolist() for name, one in pooled.items()} == {"a": [3.0, 4.0], "b": [0.0, 1.0]}
    assert tables({"a": TorchRecKeyed({"a": a})})["a"].ravel().tolist() == [3.0, 4.0]
    with pytest.raises(KeyError, match="no table reads the feature 'c'"):
        tables(TorchRecKeyed({"c": b}))
    with pytest.raises(TypeError, match="feature 'a': expected one feature, got a TorchRecKeyed of 2 features"):
        tables({"a": TorchRecKeyed({"a": a, "b": b})})


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([1], "features: expected a dictionary .* or TorchRec's KeyedJaggedTensor, got list"),
        (torch.arange(3), r"features: expected a dictionary .*, got int64\[3\]"),
        ({"t": torch.eye(2).long().to_sparse()}, "feature 't': expected a tensor of keys .*, got sparse int64"),
    ],
)
def test_other_features_are_refused_by_name(features, message):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(dim=1)})

    with pytest.raises((TypeError, ValueError), match=message):
        tables(features)


def test_nested_tensors_of_another_form_are_refused_by_name():
    nested, offsets = torch.nested.nested_tensor_from_jagged, torch.tensor([0, 2])  # the first call takes a second
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(dim=1)})

    for feature, message in (
        ((nested(torch.arange(2), offsets), offsets), "got nested int64"),
        (nested(torch.ones(2, 2).long(), offsets), "expected keys with 1 dimensions"),
        (nested(torch.ones(2), offsets), "expected keys of int64 or int32, got float32"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            tables({"t": feature})


@pytest.mark.parametrize("offsets", [[], [0, 2], [1, 3], [0, 2, 1, 3], [0, -1, 3], [0, 4, 3]])
def test_offsets_that_do_not_ascend_over_all_keys_are_refused(offsets):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(dim=1)})

    with pytest.raises(ValueError, match=r"feature 't': expected offsets that ascend from 0 to 3, the number of keys"):
        tables({"t": (torch.arange(3), torch.tensor(offsets, dtype=torch.int64))})


class TorchRecKeyed:
    """What TorchRec's KeyedJaggedTensor offers."""

    def __init__(self, parts):
        self._parts = parts

    def keys(self):
        return list(self._parts)

    def to_dict(self):
        return self._parts

    def values(self):
        return torch.cat([part.values() for part in self._parts.values()])

    def offsets(self):
        lengths = torch.cat([part.offsets().diff() for part in self._parts.values()])
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def weights_or_none(self):
        return torch.cat([part.weights_or_none() for part in self._parts.values()])


class TorchRecJagged:
    """What TorchRec's JaggedTensor offers."""

    def __init__(self, values, offsets, weights=None):
        self._values, self._offsets, self._weights = values, offsets, weights

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets

    def weights_or_none(self):
        return self._weights


def test_features_of_one_table_share_its_rows_and_move_them_once():
    tables = EmbeddingBagCollection({"item": EmbeddingBagConfig(2, features=("viewed", "bought"))})
    optimizer = Adam(tables.parameters(), lr=0.1)
    pooled = tables({"viewed": torch.tensor([1, 2]), "bought": torch.tensor([2])})
    before = vectors_of(tables.tables["item"])

    sum(one.sum() for one in pooled.values()).backward()
    optimizer.step()

    after = vectors_of(tables.tables["item"])
    assert set(after) == {1, 2}
    for key in (1, 2):  # the first step of Adam does not depend on the size of the gradient
        np.testing.assert_allclose(np.subtract(before[key], after[key]), 0.1, rtol=1e-5)


def test_gradients_of_several_backward_passes_are_added_until_a_step():
    one, other = (EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}, seed=0) for _ in range(2))
    steps = [SGD(net.parameters(), lr=1.0) for net in (one, other)]

    for keys in ([1, 2], [2, 3]):
        one({"t": torch.tensor(keys)})["t"].sum().backward()
    other({"t": torch.tensor([1, 2, 2, 3])})["t"].sum().backward()
    for step in steps:
        step.step()
        step.step()  # without a new gradient nothing moves

    assert vectors_of(one.tables["t"]) == vectors_of(other.tables["t"])


def one_row():
    """A collection whose row of key 1 has moved once, its optimizer, and a function that returns that row."""
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
    optimizer = SGD(tables.parameters(), lr=1.0)
    tables({"t": torch.tensor([1])})["t"].sum().backward()
    optimizer.step()
    return tables, optimizer, lambda: np.array(vectors_of(tables.tables["t"])[1])


def test_a_feature_that_the_loss_does_not_use_leaves_its_table_alone():
    tables = EmbeddingBagCollection({name: EmbeddingBagConfig(2) for name in ("used", "unused")})
    optimizer = Adam(tables.parameters(), lr=0.1)
    features = {name: torch.tensor([1]) for name in tables.tables}
    sum(table.sum() for table in tables(features).values()).backward()
    optimizer.step()
    before = vectors_of(tables.tables["unused"])

    optimizer.zero_grad()
    tables(features)["used"].sum().backward()
    optimizer.step()

    assert vectors_of(tables.tables["unused"]) == before
    assert tables.tables["used"].step == 2
    assert tables.tables["unused"].step == 1


def test_weights_get_a_gradient_in_evaluation_too():
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
    tables({"t": torch.tensor([1])})
    tables.eval()
    weights = torch.ones(1, requires_grad=True)

    tables({"t": (torch.tensor([1]), torch.tensor([0, 1]), weights)})["t"].sum().backward()

    torch.testing.assert_close(weights.grad, torch.tensor(vectors_of(tables.tables["t"])[1]).sum()[None])
    assert tables.tables["t"].step == 0


@pytest.mark.parametrize("keys", [torch.empty(0, dtype=torch.int64), torch.empty((0, 3), dtype=torch.int64)])
def test_a_batch_may_be_empty(keys):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})

    pooled = tables({"t": keys})["t"]
    pooled.sum().backward()

    assert pooled.shape == (0, 2)
    assert tables({}) == {}


def test_another_optimizer_begins_with_states_of_its_own():
    tables, _, row = one_row()
    momentum = MomentumSGD(tables.parameters(), lr=1.0)
    tables({"t": torch.tensor([1])})["t"].sum().backward()
    momentum.step()

    optimizer = AdaGrad(tables.parameters(), lr=0.1)  # its state has the same first value
    before = row()
    tables({"t": torch.tensor([1])})["t"].sum().backward()
    optimizer.step()

    np.testing.assert_allclose(before - row(), 0.1, rtol=1e-5)


@pytest.mark.parametrize("use", ["eval", "no_grad"])
def test_evaluation_never_makes_rows_and_unknown_keys_have_the_default_vector(use):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2, "mean", default_value=2.5)})
    tables({"t": torch.tensor([1])})
    known = vectors_of(tables.tables["t"])
    if use == "eval":
        tables.eval()

    with torch.set_grad_enabled(use == "eval"):
        pooled = tables({"t": jagged([[98, 99], [], [1, 99]])})["t"]

    assert vectors_of(tables.tables["t"]) == known
    assert pooled.requires_grad == (use == "eval")
    np.testing.assert_allclose(pooled.detach(), [[2.5, 2.5], [0, 0], (np.array(known[1]) + 2.5) / 2], rtol=1e-6)


def test_admission_eviction_fixed_rows_and_row_types_are_per_table():
    tables = EmbeddingBagCollection(
        {
            "rare": EmbeddingBagConfig(2, admit_after=2),
            "bounded": EmbeddingBagConfig(2, max_rows=2, initializer=Constant(7)),
            "fixed": EmbeddingBagConfig(2, rows=10, initializer=Normal(0, 1)),
            "narrow": EmbeddingBagConfig(2, row_dtype="bf16", initializer=Constant(1 / 3)),
        }
    )
    for key in range(4):
        pooled = tables({name: torch.tensor([key // 2 if name == "rare" else key]) for name in tables.tables})

    assert {name: len(table) for name, table in tables.tables.items()} == {
        "rare": 2,
        "bounded": 2,
        "fixed": 10,
        "narrow": 4,
    }
    assert set(vectors_of(tables.tables["bounded"])) == {2, 3}
    assert pooled["narrow"].tolist() == [[torch.tensor(1 / 3).bfloat16().item()] * 2]


def test_a_whole_model_trains_in_one_optimizer_():
    torch.manual_seed(0)
    tables = EmbeddingBagCollection({"user": EmbeddingBagConfig(4), "item": EmbeddingBagConfig(4)})
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model = nn.ModuleList([tables, net])
    optimizer = Adam(model.parameters(), lr=0.01)
    users = torch.arange(50)
    model.to("cpu")

    losses = []
    for _ in range(60):
        pooled = tables({"user": users, "item": users % 7})
        loss = nn.functional.binary_cross_entropy_with_logits(
            net(torch.cat(list(pooled.values()), dim=1))[:, 0], (users % 7 > 3).float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0] / 3


@pytest.mark.parametrize("optimizer", EVERY)
def test_training_resumes_from_a_saved_state_as_if_it_had_never_stopped(optimizer, tmp_path):
    def train(net, stepping, seed):
        rng = np.random.default_rng(seed)
        for _ in range(6):
            pooled = net({name: torch.tensor(rng.integers(0, 30, 8)) for name in ("a", "b")})
            stepping.zero_grad()
            sum((one - 1).square().sum() for one in pooled.values()).backward()
            stepping.step()

    def make():
        net = EmbeddingBagCollection(
            {"a": EmbeddingBagConfig(3, admit_after=2), "b": EmbeddingBagConfig(3, max_rows=12)}, seed=5
        )
        return net, optimizer(net.parameters(), lr=0.05, update_type="LazyGlobal")

    net, whole = make()
    train(net, whole, 0)
    torch.save((net.state_dict(), whole.state_dict()), tmp_path / "saved")
    train(net, whole, 1)

    resumed, again = make()
    train(resumed, again, 9)  # what it has learned is replaced
    rows, state = torch.load(tmp_path / "saved", weights_only=True)
    resumed.load_state_dict(rows)
    again.load_state_dict(state)
    train(resumed, again, 1)

    for name in ("a", "b"):
        assert vectors_of(resumed.tables[name]) == vectors_of(net.tables[name])


def test_rows_of_earlier_versions_are_read():
    rows = {
        "keys": torch.tensor([7, 8]),
        "last_steps": torch.ones(2, dtype=torch.int64),
        "slot_ids": torch.zeros(2, dtype=torch.int64),
        "sighted_keys": torch.zeros(0, dtype=torch.int64),
        "sightings": torch.zeros(0, dtype=torch.int64),
    }
    trained = {"rule": "adam", "initial_states": [0.0, 0.0], "parts": torch.arange(12.0).reshape(2, 3, 2), **rows}
    untrained = {"rule": "", "initial_states": [], "parts": torch.ones(2, 1, 2), **rows}

    for state, vectors, states in (
        (trained, [[0, 1], [6, 7]], [[2, 3, 4, 5], [8, 9, 10, 11]]),
        (untrained, [[1, 1], [1, 1]], [[], []]),
    ):
        tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
        tables.set_extra_state({"shard": [0, 1, "key"], "tables": {"t": state}})
        [found] = tables.tables["t"].dump()
        assert (found.vectors.tolist(), found.states.tolist()) == (vectors, states)


def test_a_dump_has_the_rows_that_changed_since_a_mark():
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
    optimizer = SGD(tables.parameters(), lr=1.0)

    def step(keys):
        optimizer.zero_grad()
        tables({"t": torch.tensor(keys)})["t"].sum().backward()
        optimizer.step()

    step([1, 2, 3])
    mark = tables.tables["t"].step
    step([2, 9])

    [part] = tables.tables["t"].dump(since=mark)
    assert part.keys.tolist() == [2, 9]
    other = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}).tables["t"]
    other.load(part)
    assert vectors_of(other) == {key: vectors_of(tables.tables["t"])[key] for key in (2, 9)}


def test_a_copy_of_a_module_has_its_own_rows():
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
    tables({"t": torch.tensor([1, 2])})
    before = vectors_of(tables.tables["t"])

    copied = copy.deepcopy(tables)
    optimizer = SGD(tables.parameters(), lr=1.0)
    tables({"t": torch.tensor([1, 3])})["t"].sum().backward()
    optimizer.step()

    assert vectors_of(copied.tables["t"]) == before
    assert vectors_of(tables.tables["t"])[1] != before[1]


TABLES = EmbeddingBagCollection({"t": EmbeddingBagConfig(2), "fixed": EmbeddingBagConfig(2, rows=3)})
KEYS, OFFSETS = torch.tensor([1, 2]), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("error", "features", "message"),
    [
        (KeyError, {"user": KEYS}, "no table reads the feature 'user'; the features are t, fixed"),
        (TypeError, {"t": [1, 2]}, "feature 't': expected a tensor of keys [B] or [B, n], (keys, offsets), "),
        (TypeError, {"t": KEYS.float()}, "feature 't': expected keys of int64 or int32, got float32[2]"),
        (ValueError, {"t": KEYS.reshape(1, 1, 2)}, "feature 't': expected keys with 1 or 2 dimensions, got int64[1, 1"),
        (TypeError, {"t": (KEYS, [0, 2])}, "feature 't': expected offsets of int64 or int32, got list"),
        (ValueError, {"t": (KEYS, OFFSETS, KEYS)}, "feature 't': expected a weight for each of 2 keys, got int64[2]"),
        (ValueError, {"t": (KEYS, OFFSETS, torch.ones(1))}, "expected a weight for each of 2 keys, got float32[1]"),
        (IndexError, {"fixed": torch.tensor([0, 3])}, "table 'fixed': expected keys from 0 to 2, got 3 at position 1"),
        (ReservedKeyError, {"t": torch.tensor([1, 2**63 - 1])}, "key 9223372036854775807 at position 1 is reserved"),
    ],
)
def test_wrong_bags_are_refused_by_name(error, features, message):
    with pytest.raises(error, match=re.escape(message)):
        TABLES(features)
    assert len(TABLES.tables["t"]) == 0


def test_wrong_tables_and_states_are_refused():
    with pytest.raises(ValueError, match="feature 'x': expected one table that reads it, got 'a' and 'b'"):
        EmbeddingBagCollection({name: EmbeddingBagConfig(2, features=("x",)) for name in "ab"})
    with pytest.raises(ValueError, match="table 'a': dim: expected 1 to"):
        EmbeddingBagCollection({"a": EmbeddingBagConfig(0)})
    with pytest.raises(ValueError, match="expected the rows of t, fixed, got those of other"):
        TABLES.set_extra_state({"shard": [0, 1, "key"], "tables": {"other": {}}})


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (EmbeddingBagConfig(3), {}, "table 't': expected rows of 3 floats, got 2"),
        (EmbeddingBagConfig(2, max_rows=1), {}, "table 't': expected at most 1 rows in a process, got 2"),
        (
            EmbeddingBagConfig(2),
            {"shard": [1, 2, "key"]},
            "expected the rows of process 0 of 1, by key, got those of 1 of 2, by key; join the states of all",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_the_rows_stay(config, changes, message):
    saved = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
    saved({"t": torch.tensor([1, 2])})
    tables = EmbeddingBagCollection({"t": config})
    tables({"t": torch.tensor([5])})

    with pytest.raises(ValueError, match=re.escape(message)):
        tables.set_extra_state(saved.get_extra_state() | changes)

    assert list(vectors_of(tables.tables["t"])) == [5]


def test_a_table_is_not_resumed_with_an_optimizer_that_would_drop_its_states():
    saved = trained(AdaGrad)

    other = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
    Adam(other.parameters())
    with pytest.raises(ValueError, match="table 't': expected the states of adam, got those of ada_grad"):
        other.load_state_dict(saved.state_dict())
    for loaded in (EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}), pickle.loads(pickle.dumps(saved))):
        loaded.load_state_dict(saved.state_dict())
        AdaGrad(loaded.parameters())
        with pytest.raises(ValueError, match="expected the optimizer ada_grad, whose states were loaded, got adam"):
            Adam(loaded.parameters())
        message = "ada_grad with first states [0.0], whose states were loaded, got first states [0.5]"
        with pytest.raises(ValueError, match=re.escape(message)):
            AdaGrad(copy.deepcopy(loaded).parameters(), initial_accumulator=0.5)
        assert (loaded.tables["t"].state()["parts"][:, 2:] > 0).all()
        loaded.tables["t"].forget_states()
        Adam(loaded.parameters())
        assert loaded.tables["t"].state()["parts"].shape == (3, 6)
        loaded.load_state_dict(trained(SGD).state_dict())  # SGD has no states, so none are lost
        assert loaded.tables["t"].state()["parts"].shape == (3, 6)
        assert vectors_of(loaded.tables["t"]) == vectors_of(trained(SGD).tables["t"])


def trained(optimizer):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}, seed=1)
    step = optimizer(tables.parameters(), lr=0.1)
    tables({"t": torch.tensor([1, 2, 5])})["t"].sum().backward()
    step.step()
    return tables


def part_of(state, rank, size, sharding="key"):
    """The state of a process that has a part of the rows."""
    tables = {
        name: {
            key: value[(table["sighted_keys" if key.startswith("sight") else "keys"] % size) == rank]
            if isinstance(value, torch.Tensor)
            else value
            for key, value in table.items()
        }
        for name, table in state["tables"].items()
    }
    return {"shard": [rank, size, sharding], "tables": tables}


def test_the_states_of_all_processes_are_joined_into_one():
    saved = torch.nn.Sequential(trained(AdaGrad), torch.nn.Linear(2, 1))
    whole = saved.state_dict()
    states = [whole | {"0._extra_state": part_of(whole["0._extra_state"], rank, 3)} for rank in (2, 0, 1)]
    resumed = torch.nn.Sequential(EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}), torch.nn.Linear(2, 1))

    resumed.load_state_dict(join_state_dicts(states))

    assert vectors_of(resumed[0].tables["t"]) == vectors_of(saved[0].tables["t"])
    for left, right in zip(
        *(sorted(one[0].tables["t"].state()["parts"].tolist()) for one in (resumed, saved)), strict=True
    ):
        assert left == right
    assert torch.equal(resumed[1].weight, saved[1].weight)


@pytest.mark.parametrize("state", [{}, {"0": 1}, [1], torch.ones(2)], ids=str)
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match="expected the state of an EmbeddingBagCollection, got "):
        EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}).set_extra_state(state)


def test_the_union_of_all_processes_states_is_loaded():
    """``torch.distributed.checkpoint`` saves this; ``dcp_to_torch`` makes one file of it."""
    saved = trained(AdaGrad)
    whole = saved.get_extra_state()
    resumed = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})

    resumed.load_state_dict({"_extra_state": {f"{rank}": part_of(whole, rank, 3) for rank in (2, 0, 1)}})

    assert vectors_of(resumed.tables["t"]) == vectors_of(saved.tables["t"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: [], "expected the state of each process, got none"),
        (lambda states: states[:1], "_extra_state: expected the states of processes 0 to 1, got 0 of 2, by key"),
        (
            lambda states: [states[0]] * 2,
            "_extra_state: expected the states of processes 0 to 1, got 0 of 2, by key, 0 of",
        ),
        (lambda states: [*states, {"x": 1}], "expected '_extra_state' in every state, got a state without it"),
        (
            lambda states: [states[0], {"_extra_state": part_of(trained(SGD).get_extra_state(), 1, 2)}],
            "table 't': expected the same optimizer in all processes, got ('ada_grad', [0.0]) and ('sgd', [])",
        ),
    ],
)
def test_states_that_do_not_belong_together_are_not_joined(change, message):
    states = [{"_extra_state": part_of(trained(AdaGrad).get_extra_state(), rank, 2)} for rank in (0, 1)]

    with pytest.raises(ValueError, match=re.escape(f"join_state_dicts: {message}")):
        join_state_dicts(change(states))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1, 0), "Uniform: expected low of at most high, got 1 and 0"),
        (lambda: Uniform("a", 0), "Uniform: expected low as a number, got 'a'"),
        (lambda: Uniform(float("nan"), 0), "Uniform: expected low from -3.40282e+38 to 3.40282e+38, got nan"),
        (lambda: Normal(0, -1), "Normal: expected std from 0 to 3.40282e+38, got -1"),
        (lambda: Normal(None, 1), "Normal: expected mean as a number, got None"),
        (lambda: Constant(1e300), "Constant: expected value from -3.40282e+38 to 3.40282e+38, got 1e+300"),
        (
            lambda: EmbeddingBagConfig(2, initializer=nn.init.zeros_),
            "initializer: expected Uniform(low, high), Normal(",
        ),
        (lambda: EmbeddingBagConfig(2, initializer=Uniform), "initializer: expected Uniform(low, high), Normal("),
        (lambda: EmbeddingBagConfig(2, "max"), "combiner: expected one of sum, mean, sqrtn, got 'max'"),
        (lambda: EmbeddingBagConfig(2, row_dtype="int8"), "row_dtype: expected one of fp32, fp16, bf16, got 'int8'"),
        (lambda: EmbeddingBagConfig(2.5), "dim: expected an int, got 2.5"),
        (lambda: EmbeddingBagConfig(2, rows=True), "rows: expected an int or None, got True"),
        (lambda: EmbeddingBagConfig(2, max_norm="1"), "max_norm: expected a number or None, got '1'"),
        (
            lambda: EmbeddingBagConfig(2, default_value=float("inf")),
            "EmbeddingBagConfig: expected default_value from -3.40282e",
        ),
        (lambda: EmbeddingBagConfig(2, features="user"), "features: expected a tuple of names, got 'user'"),
        (lambda: EmbeddingBagCollection([2]), "an EmbeddingBagConfig for each table's name, got list"),
        (lambda: EmbeddingBagCollection({"t": 2}), "an EmbeddingBagConfig for each table's name, got 't': int"),
        (lambda: EmbeddingBagCollection({}, seed=-1), "seed: expected an int from 0 to 9223372036854775807, got -1"),
        (lambda: TABLES.parameter_of("user"), "no table 'user'; the tables are t, fixed"),
    ],
)
def test_wrong_settings_are_refused_before_the_first_lookup(make, message):
    with pytest.raises((TypeError, ValueError, KeyError), match=re.escape(message)):
        make()


def test_a_table_has_a_learning_rate_of_its_own_and_shows_its_rows_and_bytes():
    config = EmbeddingBagConfig(4, row_dtype="fp16", initializer=Constant(0.0))
    tables = EmbeddingBagCollection({"slow": config, "fast": config})
    groups = [{"params": [tables.parameter_of("slow")]}, {"params": [tables.parameter_of("fast")], "lr": 2.0}]
    optimizer = AdaGrad(groups, lr=1.0, epsilon=1e-12)
    sum(table.sum() for table in tables({"slow": torch.arange(3), "fast": torch.arange(2)}).values()).backward()
    optimizer.step()

    assert [vectors_of(tables.tables[name])[0][0] for name in ("slow", "fast")] == [-1.0, -2.0]
    assert "(slow): 3 rows of 4, 72 bytes, sum of slow" in repr(tables)
    assert repr(tables.tables["fast"]) == "EmbeddingTable('fast', 2 rows of 4, 48 bytes)"
    assert repr(tables.parameter_of("fast")) == "TableParameter('fast', 2 rows of 4, 48 bytes)"
