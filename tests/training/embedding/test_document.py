"""A collection is exported and served with its own predictions, as embedding-tables.md does it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from serving import load_model
from serving.errors import OutputError
from serving.model.pooling import Pooling
from training import EmbeddingBagCollection, EmbeddingBagConfig


@pytest.mark.filterwarnings("ignore")  # the exporter warns of its own libraries
@pytest.mark.usefixtures("exporter")
def test_the_documents_model_is_served_with_the_trainers_predictions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "embedding-tables.md").read_text()
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "embedding-tables.md", "exec"), names)
    assert capsys.readouterr().out.startswith("3\n")

    # for each sample: the user, what the user viewed, what the user bought
    keys, row_ptrs = np.array([7, 5, 6, 6, 9, 9, 1 << 40, 5]), np.array([0, 1, 3, 6, 7, 8, 8])
    with load_model(names["version"]) as session:
        answer = session.predict(np.zeros((2, 0), np.float32), keys, row_ptrs)

    tables, net = names["tables"].eval(), names["net"]
    with torch.no_grad():
        expected = net(torch.cat(list(tables(names["batch"]).values()), dim=1)).sigmoid()
    assert abs(expected[0] - expected[1]) > 0.1  # it has learned
    np.testing.assert_allclose(answer, expected, atol=1e-6)


def test_the_tables_are_written_as_lookups_read_them(tmp_path):
    tables = EmbeddingBagCollection(
        {"short": EmbeddingBagConfig(2, "mean", max_norm=0.01), "empty": EmbeddingBagConfig(2)}
    )
    vectors = tables({"short": torch.tensor([5, 3])})["short"].detach()

    tables.write_tables(tmp_path / "tables")

    folder = tmp_path / "tables" / "short"
    assert np.fromfile(folder / "key", np.int64).tolist() == [5, 3]
    np.testing.assert_allclose(np.fromfile(folder / "emb_vector", np.float32).reshape(2, 2), vectors, rtol=1e-6)
    assert [path.name for path in folder.parent.iterdir()] == ["short"]
    assert Pooling.read(folder) == Pooling("mean", 0.0)
    assert EmbeddingBagConfig(2, "sqrtn", default_value=0.5).pooling == Pooling("sqrtn", 0.5)


def test_a_folder_with_other_files_is_kept(tmp_path):
    (tmp_path / "notes").write_text("mine")
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})

    with pytest.raises(OutputError, match="notes is no file of a table, and would be erased"):
        tables.write_tables(tmp_path)

    assert (tmp_path / "notes").read_text() == "mine"
