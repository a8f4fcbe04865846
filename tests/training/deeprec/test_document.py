"""Run docs/deeprec.md. Its model is served with the predictions of the trainer."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.opening import load_model

pytestmark = pytest.mark.usefixtures("exporter")
PAGE = (Path(__file__).parents[3] / "docs" / "deeprec.md").read_text()


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the page's Python in one folder. Give the names it defines, the folder, and what each block printed."""
    folder, names, printed = tmp_path_factory.mktemp("deeprec"), {"__name__": "session"}, []
    torch.manual_seed(0)
    # the exporter warns of its own libraries
    with contextlib.chdir(folder), warnings.catch_warnings(action="ignore"):
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, "deeprec.md", "exec"), names)
            printed.append(output.getvalue())
    return names, folder, printed


def test_the_examples_print_what_the_page_shows(session):
    _, _, (losses, partitions, _) = session

    assert f"# {'# '.join(losses.splitlines(keepends=True))}```" in PAGE
    assert f"# {partitions}```" in PAGE


def test_the_pages_model_is_served_with_the_trainers_predictions(session):
    names, folder, _ = session
    with torch.no_grad():
        vectors = names["deeprec"].input_layer(names["batch"], names["columns"])
        expected = names["net"](*vectors.split(8, dim=1)).sigmoid()

    keys, row_ptrs = np.array([7, 8, 1001, 9, 1002, 1003]), np.array([0, 2, 3, 4, 5, 5, 6])
    with load_model(folder / names["version"]) as served:
        answer = served.predict(np.zeros((3, 0), np.float32), keys, row_ptrs)

    assert np.ptp(expected.numpy()) > 0.1  # equal answers for all samples would prove nothing
    np.testing.assert_allclose(answer, expected, atol=1e-6)
