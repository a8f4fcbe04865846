"""From signs to vectors and back, with real servers, against plain sums of PyTorch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.persia.cluster import CONFIG, FEATURES, SGD, Plain, put, start
from training.errors import DataError, SessionError
from training.persia.nn_worker import Leaf, _gradients, _raw

SIGN = st.one_of(st.integers(0, 8), st.sampled_from([2**56 - 2, 2**56 - 1, 2**63, 2**64 - 1]))
BAGS = st.integers(1, 4).flatmap(
    lambda samples: st.fixed_dictionaries(
        {one.name: st.lists(st.lists(SIGN, max_size=4), min_size=samples, max_size=samples) for one in FEATURES}
    )
)


def vectors(worker, number):
    """Look up a batch, and return leaves and what a network gets, as ``prepare_features`` does."""
    answer = worker.call("look_up", number=number)
    leaves = [
        Leaf(name, block, begin, torch.tensor(answer.arrays[block][begin:end]).requires_grad_())
        for name, block, begin, end in answer.facts["features"]
    ]
    return leaves, {
        leaf.name: leaf.vectors
        if f"index {leaf.name}" not in answer.arrays
        else _raw(leaf.vectors, answer.arrays[f"index {leaf.name}"])
        for leaf in leaves
    }


def hand_back(worker, number, leaves):
    """Send the gradients of leaves, as ``on_after_backward`` does."""
    gradients, missing = _gradients(leaves, 1.0)
    worker.call("update", gradients, number=number, missing=missing)


def loss_of(all_vectors):
    """A number whose gradients differ from place to place."""
    return sum(
        (
            (all_vector * torch.arange(all_vector.numel()).reshape(all_vector.shape).add(1).sin()).sum()
            + all_vector.square().sum() / 2
            for all_vector in all_vectors
        ),
        torch.zeros((), requires_grad=True),  # so that there is a gradient if all bags are empty
    )


@settings(max_examples=15)
@given(batches=st.lists(BAGS, min_size=1, max_size=3), servers=st.integers(1, 3))
def test_vectors_and_steps_are_those_of_plain_operations(batches, servers):
    roles, worker = start(servers)
    plain = Plain(roles)

    for number, bags in enumerate(batches):
        put(worker, number, bags)
        leaves, prepared = vectors(worker, number)
        expected = {one.name: plain.vectors(one, bags[one.name]) for one in FEATURES}
        for name, one in expected.items():
            torch.testing.assert_close(prepared[name].double(), one, rtol=1e-5, atol=1e-6)

        loss_of(prepared.values()).backward()
        hand_back(worker, number, leaves)
        loss_of(expected.values()).backward()
        for row in plain.rows.values():
            if row.grad is not None:
                row.data -= SGD["learning_rate"] * row.grad
                row.grad = None


def test_the_rows_of_features_without_a_gradient_do_not_move():
    _, worker = start(2)
    bags = {one.name: [[1, 2, 2], []] for one in FEATURES}
    put(worker, 0, bags)
    leaves, first = vectors(worker, 0)

    first["plain"].sum().backward()
    hand_back(worker, 0, leaves)

    put(worker, 1, bags)
    _, second = vectors(worker, 1)
    moved = [name for name, one in first.items() if not torch.equal(one, second[name])]
    assert moved == ["plain", "same rows"]  # they share rows


def test_a_batch_without_gradients_is_forgotten():
    roles, worker = start(1)
    put(worker, 5, {one.name: [[1]] for one in FEATURES})
    worker.call("update", number=5)

    assert roles[0].role._step == 0
    with pytest.raises(SessionError, match="expected a batch that waits here, got number 5"):
        worker.call("look_up", number=5)


def test_every_feature_must_be_there_and_no_other():
    _, worker = start(1)
    bags = {one.name: [[1]] for one in FEATURES}

    with pytest.raises(DataError, match="add_sparse: expected features of slots_config, got 'other'"):
        put(worker, 0, bags | {"other": [[1]]})
    del bags["raw"], bags["root"]
    with pytest.raises(DataError, match="expected every feature of slots_config, root, raw missing"):
        put(worker, 0, bags)


def test_more_distinct_rows_than_a_server_may_have_are_refused():
    _, worker = start(1, capacity=3)
    put(worker, 0, {one.name: [[1, 2, 3, 4]] for one in FEATURES})

    with pytest.raises(DataError, match=r"capacity: expected at most 3 distinct rows of dim 2 in a batch, .*, got "):
        worker.call("look_up", number=0)


def test_the_number_of_servers_does_not_change_vectors():
    bags = {one.name: [list(range(20)), [3]] for one in FEATURES}
    answers = []
    for servers in (1, 2, 5):
        roles, worker = start(servers)
        put(worker, 0, bags)
        answers.append(vectors(worker, 0)[1])
        counts = [len(role.role._tables[3]) for role in roles]
        assert sum(counts) == 40  # the rows of two groups
        assert min(counts) > 0

    for other in answers[1:]:
        for name, one in answers[0].items():
            torch.testing.assert_close(other[name], one)
    assert CONFIG.dims == [2, 3]
