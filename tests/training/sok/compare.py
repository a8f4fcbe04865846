"""SOK's calls in several processes against one process's numbers. Each process runs this, and checks itself."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from serving.errors import OutputError
from tests.training.embedding.oracle import pool
from tests.training.sok.ids import sparse
from training import sok
from training.optimizers import SGD

BATCH = 12
DOCUMENT = (
    ((17, 3), [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]], [1, 1, 3, 4, 5], [2, 3], {1: 2, 3: 1, 4: 1, 5: 1}),
    ((7, 5), [[0, 0], [1, 0], [1, 1]], [1, 2, 3], [2, 2], {1: 1, 2: 1, 3: 1}),
)


def check_document(rank, size, mode):
    """The document's example, where every process looks up the same ids. So a gradient is ``size`` times as large."""
    modes = {"distributed": ["distributed"] * 2, "localized": ["localized:0", "localized:1"]}[mode]
    arrays = [np.arange(np.prod(shape)).reshape(shape) for shape, *_ in DOCUMENT]
    variables = [sok.Variable(array, torch.float32, mode=mode) for array, mode in zip(arrays, modes, strict=True)]
    ids = [sok.SparseTensor(*one[1:4]) for one in DOCUMENT]
    vectors = sok.lookup_sparse(variables, ids, hotness=[3, 2], combiners=["sum", "sum"])
    assert vectors[0].tolist() == [[6, 8, 10], [36, 39, 42]]
    assert vectors[1].tolist() == [[5, 6, 7, 8, 9], [25, 27, 29, 31, 33]]
    loss = sum(vector.sum() for vector in vectors)
    assert loss == 321
    loss.backward()
    for number, (variable, array, one) in enumerate(zip(variables, arrays, DOCUMENT, strict=True)):
        own = list(range(rank, len(array), size)) if mode == "distributed" else [number == rank] * len(array)
        if mode == "localized":
            own = list(range(len(array))) if number == rank else []
        assert variable.shape == (len(own), array.shape[1])
        counts = {own.index(key): count for key, count in one[4].items() if key in own}
        if not own:
            assert variable.grad is None
            continue
        assert variable.grad.is_coalesced()
        assert variable.grad.indices().tolist() == [sorted(counts)]
        assert variable.grad.values()[:, 0].tolist() == [size * counts[row] for row in sorted(counts)]
    if size == 2:
        expected = {"distributed": [[(1, 3), (1, 5)], [(3, 3), (2, 5)]], "localized": [[(4, 3), None], [None, (3, 5)]]}
        shapes = [None if one.grad is None else tuple(one.grad.values().shape) for one in variables]
        assert shapes == expected[mode][rank]
    torch.optim.SGD(variables, lr=1.0 / size).step()
    expected = arrays[0].astype(np.float32)
    for key, count in DOCUMENT[0][4].items():
        expected[key] -= count
    own = range(rank, 17, size) if mode == "distributed" else range(17 if rank == 0 else 0)
    torch.testing.assert_close(variables[0].detach(), torch.tensor(expected[list(own)]))


def check_lookups(rank, size, kind):
    """Random ids, other ones in each process, against sums in float64 over all processes."""
    rng = np.random.default_rng(3)
    shapes = [(11, 3), (1, 2), (5, 4)]  # the second has fewer rows than there are processes
    arrays = [rng.normal(size=shape) for shape in shapes]
    if kind == "dynamic":
        variables = [
            sok.DynamicVariable(dim, mode=["distributed", "localized:1", None][n]) for n, (_, dim) in enumerate(shapes)
        ]
        for variable, array in zip(variables, arrays, strict=True):
            keys = np.arange(len(array))
            mine = variable.placement.owns(keys)
            variable.set_rows(keys[mine], array[mine].astype(np.float32))
    else:
        modes = ["distributed"] * 3 if kind == "distributed" else ["localized:1", "localized:0", "localized:1"]
        variables = [sok.Variable(array, mode=mode) for array, mode in zip(arrays, modes, strict=True)]
    combiners = ["mean", "sum", "sqrtn"]
    tables = [torch.tensor(array.astype(np.float32).astype(np.float64)).requires_grad_() for array in arrays]
    for batch in ([4] * size, [0, *[3] * (size - 1)]):  # then the first process has an empty batch
        total = 0
        for process in range(size):
            bags = [
                [rng.integers(0, len(a), rng.integers(0, 4)).tolist() for _ in range(batch[process])] for a in arrays
            ]
            weights = [[torch.tensor(rng.uniform(0.1, 1, len(bag))) for bag in of] for of in bags]
            expected = [
                pool(table, of, of_weights, combiner)
                for table, of, of_weights, combiner in zip(tables, bags, weights, combiners, strict=True)
            ]
            total = total + sum((one * (process + 1)).square().sum() for one in expected)
            if process != rank:
                continue
            leaves = [torch.cat([*of, torch.zeros(0)]).float().requires_grad_() for of in weights]
            answer = sok.lookup_sparse(variables, [sparse(of) for of in bags], leaves, combiners=combiners)
            for ours, theirs in zip(answer, expected, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
            loss = sum((one * (rank + 1)).square().sum() for one in answer)
        total.backward()
        loss.backward()
    rate = 0.01
    (SGD(variables, lr=rate) if kind == "dynamic" else torch.optim.SGD(variables, lr=rate)).step()
    for variable, table in zip(variables, tables, strict=True):
        expected = table.detach() - rate * table.grad
        parts = [(keys, torch.tensor(vectors)) for keys, vectors in variable.own_rows()]
        for keys, vectors in parts:
            torch.testing.assert_close(vectors.double(), expected[torch.from_numpy(keys)], rtol=1e-4, atol=1e-4)


class Demo(torch.nn.Module):
    """The document's model, with the other legacy layer next to it."""

    def __init__(self, rows=16):
        super().__init__()
        self.embedding_layer = sok.All2AllDenseEmbedding(20, 4, slot_num=2, nnz_per_slot=3)
        self.bags = sok.DistributedEmbedding("mean", rows, 4, slot_num=2, max_nnz=3, use_hashtable=False)
        torch.manual_seed(0)
        self.top = torch.nn.Linear(2 * 3 * 4 + 2 * 4, 1)

    def forward(self, keys, sparse_keys):
        return self.top(torch.cat([self.embedding_layer(keys).flatten(1), self.bags(sparse_keys).flatten(1)], dim=1))


def train_demo(rank, size):
    """Return each step's loss over the global batch, which all processes share. Processes must not matter."""
    assert sok.Init(global_batch_size=BATCH, seed=5) == "OK"
    model, rng, losses = Demo(), np.random.default_rng(1), []
    embeddings, others = sok.split_embedding_variable_from_others(model.parameters())
    adam, dense = sok.optimizers.Adam(learning_rate=0.05), torch.optim.SGD(others, lr=0.1)
    adagrad = torch.optim.Adagrad(embeddings[1:], lr=0.05)
    for _ in range(5):
        keys = torch.tensor(rng.integers(0, 20, (BATCH, 2, 3)))
        bags = [rng.integers(0, 16, rng.integers(0, 4)).tolist() for _ in range(2 * BATCH)]
        labels = (keys.sum(dim=(1, 2)) % 2).float()[:, None]
        share = slice(BATCH * rank // size, BATCH * (rank + 1) // size)
        logits = model(keys[share], sparse(bags[2 * share.start : 2 * share.stop]))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[share], reduction="sum") / BATCH
        for variable in model.parameters():
            variable.grad = None
        loss.backward()
        adam.apply_gradients([(embeddings[0].grad, embeddings[0])], experimental_aggregate_gradients=False)
        with sok.OptimizerScope(embeddings), torch.sparse.check_sparse_tensor_invariants():
            adagrad.step()
        total = loss.detach().clone()
        for tensor in (total, *(other.grad for other in others)):
            if size > 1:
                dist.all_reduce(tensor)
        dense.step()
        losses.append(total.item())
    return losses, model


def ids_of(*ids):
    return sok.SparseTensor([[row, 0] for row in range(len(ids))], list(ids), [len(ids), 1])


def check_other_losses(rank):
    """The rows of a variable move outside of this package, so gradients cross in the backward pass."""
    one, other = (sok.Variable(np.zeros((4, 1)), name=name) for name in ("one", "other"))
    vectors = [sok.lookup_sparse(variable, ids_of(0, 1)) for variable in (one, other)]
    with pytest.raises(RuntimeError, match=r"got backward pass of training lookup \d+ of tables one\[1\] in process 0"):
        vectors[min(rank, 1)].sum().backward()
    assert one.grad is None
    assert other.grad is None


def check_a_gradient_that_is_not_finite(rank):
    """A process whose rows nobody has read notices it too."""
    variable = sok.Variable(np.zeros((4, 1)), name="one")
    (sok.lookup_sparse(variable, ids_of(0)) * (np.inf if rank == 1 else 1.0)).sum().backward()
    assert variable.grad.coalesce().values().isnan().all()
    assert variable.grad._nnz() == 1


def main(folder):
    warnings.simplefilter("error")
    sok.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    for mode in ("distributed", "localized"):
        check_document(rank, size, mode)
    for kind in ("distributed", "localized", "dynamic"):
        check_lookups(rank, size, kind)
    check_other_losses(rank)
    check_a_gradient_that_is_not_finite(rank)
    sok.init(dist.group.WORLD)  # a group that exists
    losses, model = train_demo(rank, size)
    state = model.state_dict()
    state["embedding_layer._extra_state"] = state["embedding_layer._extra_state"] + 1  # keys of another process
    with pytest.raises(ValueError, match="expected a state with distinct keys of this process"):
        model.load_state_dict(state)
    sok.dump(Path(folder, "demo"), [model.embedding_layer.embedding_variable, model.bags.embedding_variable])
    dynamic = sok.DynamicVariable(2, "13", name="ids")
    keys = torch.arange(rank, 7)  # the processes share some
    sok.lookup_sparse(dynamic, sok.SparseTensor(torch.stack([keys, keys], dim=1), keys, [7, 7])).sum().backward()
    SGD([dynamic], lr=1.0).step()
    static = sok.Variable(np.arange(10).reshape(5, 2), name="rows")
    assert Path(folder, "demo").is_dir()
    sok.dump(Path(folder, "saved"), [static, dynamic])
    assert sok.incremental_dump(Path(folder, "later"), dynamic, since=0) == {"ids": 7}
    with pytest.raises(OutputError, match="cannot be written: no such file"):
        sok.dump(Path(folder, "no", "folder"), [static, dynamic])
    again = [sok.Variable(np.zeros((5, 2)), name="rows"), sok.DynamicVariable(2, name="ids", mode="localized:1")]
    sok.load(Path(folder, "saved"), again)
    assert torch.equal(again[0], static)
    assert again[1].size[0] == (7 if rank == 1 else 0)
    sys.stdout.write(f"rank {rank} of {size}: all equal, losses {losses}\n")


if __name__ == "__main__":
    main(sys.argv[1])
