"""Run docs/sok.md. Its models are served with the predictions of the trainer."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.importers import plan_import, write_model
from serving.opening import load_model

pytestmark = pytest.mark.usefixtures("exporter")
PAGE = (Path(__file__).parents[3] / "docs" / "sok.md").read_text()


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the page's Python in one folder. Give the names it defines, the folder, and what each block printed.

    ``predictions`` are those of the trained model when it was exported.
    """
    folder, names, printed = tmp_path_factory.mktemp("sok"), {"__name__": "session"}, []
    torch.manual_seed(0)
    # the exporter warns of its own libraries
    with contextlib.chdir(folder), warnings.catch_warnings(action="ignore"):
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, "sok.md", "exec"), names)
            printed.append(output.getvalue())
            if "version" in names and "predictions" not in names:
                names["predictions"] = predict(names)
    return names, folder, printed


def predict(names):
    with torch.no_grad():
        variables = [names["tags"], names["users"]]
        vectors = names["sok"].lookup_sparse(variables, names["batch"], combiners=["mean", "sum"])
        return names["net"](torch.cat(vectors, dim=1)).sigmoid()


def test_the_examples_print_what_the_page_shows(session):
    _, _, (example, layers, served, later) = session

    assert f"# {'# '.join(example.splitlines(keepends=True))}```" in PAGE
    assert [layers, served] == ["True\n", ""]
    assert f"since))  # {later}" in PAGE


def test_the_pages_model_is_served_with_the_trainers_predictions(session):
    names, folder, _ = session

    keys, row_ptrs = np.array([7, 8, 1001, 9, 1002, 1003]), np.array([0, 2, 3, 4, 5, 5, 6])
    with load_model(folder / names["version"]) as served:
        answer = served.predict(np.zeros((3, 0), np.float32), keys, row_ptrs)

    assert np.ptp(names["predictions"].numpy()) > 0.1  # equal answers for all samples would prove nothing
    np.testing.assert_allclose(answer, names["predictions"], atol=1e-6)


def test_the_documents_demo_model_is_served_with_the_trainers_predictions(session, tmp_path):
    names, _, _ = session
    model = names["model"].eval()
    names["sok"].dump(tmp_path / "tables", model.embedding_layer.embedding_variable)
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            model.dense_layers,
            (torch.zeros(2, 50, 16),),
            tmp_path / "net.onnx",
            input_names=["variable_0"],
            dynamic_shapes=({0: "B"},),
            verbose=False,
        )
    plan = plan_import(tmp_path / "net.onnx", "sum", checkpoint=tmp_path / "tables", logits=True)
    version = write_model(plan, tmp_path / "models", "demo")

    keys = torch.randint(0, 1010, (40, 10, 5))  # some are unknown
    expected = model(keys, training=False).sigmoid()
    with load_model(version) as served:
        answer = served.predict(np.zeros((40, 0), np.float32), keys.numpy().reshape(-1), np.arange(40 * 50 + 1))

    assert np.ptp(expected.detach().numpy()) > 0.1  # equal answers for all samples would prove nothing
    np.testing.assert_allclose(answer, expected.detach(), atol=1e-5)
