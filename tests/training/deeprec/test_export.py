"""What the columns have learned is served with the predictions of the trainer."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from serving.errors import OutputError
from serving.importers import plan_import, write_model
from serving.opening import load_model
from training.deeprec import (
    FtrlOptimizer,
    SparseTensor,
    categorical_column_with_embedding,
    embedding_column,
    input_layer,
    write_tables,
)
from training.embedding import Normal

KEYS = {"users": 1_000_003, "tags": 7}  # the distance of two ids


def draw(rng, samples, most):
    """Ragged ids of each feature, with empty rows."""
    bags = {
        name: [rng.integers(0, most, rng.integers(0, 4)) * step for _ in range(samples)] for name, step in KEYS.items()
    }
    return bags, {name: sparse(of_feature) for name, of_feature in bags.items()}


def sparse(bags):
    rows = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
    return SparseTensor(np.stack([rows, rows * 0], axis=1), np.concatenate(bags), [len(bags), 4])


class Net(nn.Module):
    """The layers after the columns. Its inputs are the columns' vectors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, *vectors):
        return self.layers(torch.cat(vectors, dim=1))


@pytest.mark.usefixtures("exporter")
def test_a_model_that_columns_have_trained_is_served_with_its_predictions(tmp_path):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    columns = [
        embedding_column(categorical_column_with_embedding("users"), 4, initializer=Normal(0, 1), max_norm=1.5),
        embedding_column(categorical_column_with_embedding("tags"), 3, "sqrtn", Normal(0, 1)),
    ]
    columns.sort(key=lambda column: column.name)
    net = Net()
    optimizers = [
        FtrlOptimizer([column.parameter for column in columns], 1.0, l2_regularization_strength=0.001),
        torch.optim.Adam(net.parameters(), lr=0.01),
    ]
    for _ in range(60):
        bags, ids = draw(rng, 64, 30)
        labels = torch.tensor([[float(sum(bag) % 2)] for bag in bags["tags"]])
        loss = nn.functional.binary_cross_entropy_with_logits(net(input_layer(ids, columns)), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    write_tables(columns, tmp_path / "tables")
    with warnings.catch_warnings(action="ignore"):  # the exporter's own libraries are deprecated
        torch.onnx.export(
            net.eval(),
            tuple(torch.zeros(2, column.table.config.dim) for column in columns),
            tmp_path / "net.onnx",
            input_names=[column.name for column in columns],
            dynamic_shapes=(tuple({0: torch.export.Dim("B")} for _ in columns),),
            verbose=False,
        )
    combiners = {column.name: column.table.config.combiner for column in columns}
    plan = plan_import(tmp_path / "net.onnx", "sum", checkpoint=tmp_path / "tables", combiners=combiners, logits=True)
    path = write_model(plan, tmp_path / "models", "ctr")

    bags, ids = draw(rng, 50, 33)  # some ids are unknown
    with torch.no_grad():
        expected = net(input_layer(ids, columns)).sigmoid()
    in_order = [bag for of_sample in zip(*(bags[column.key] for column in columns), strict=True) for bag in of_sample]
    row_ptrs = np.cumsum([0, *map(len, in_order)])
    with load_model(path) as session:
        answer = session.predict(np.zeros((50, 0), np.float32), np.concatenate(in_order), row_ptrs)
    assert np.ptp(expected.numpy()) > 0.1  # equal answers for all samples would prove nothing
    np.testing.assert_allclose(answer, expected, atol=1e-6)


def test_tables_replace_an_existing_folder_as_a_whole(tmp_path):
    column = embedding_column(categorical_column_with_embedding("users"), 2)
    input_layer({"users": sparse([np.array([5, 3])])}, [column])
    (tmp_path / "tables" / "old_embedding").mkdir(parents=True)

    write_tables([column], tmp_path / "tables")

    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["users_embedding"]
    keys, vectors = column.table.rows()
    folder = tmp_path / "tables" / "users_embedding"
    assert np.fromfile(folder / "key", np.int64).tolist() == keys.tolist() == [5, 3]
    assert np.fromfile(folder / "emb_vector", np.float32).tolist() == vectors.reshape(-1).tolist()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(OutputError, match="tables: cannot be written: "):
        write_tables([], tmp_path / "file" / "tables")
