"""A server with a dense network on 8-bit integers, and a server with a network in a separate file."""

import json
import shutil

import numpy as np
import pytest

from serving.cli.main import main
from tests.tools.tiny_model import flatten


def write(model, repository, samples=200):
    """Write the model with a calibration next to its graph; return the version's folder."""
    version = model.write(repository)
    (version / "manifest.json").unlink()
    dense, bags = model.sample_requests(samples, seed=1)
    keys, row_ptrs = flatten(bags)
    np.savez(version / "calibration.npz", DES=dense, CATCOLUMN=keys, ROWINDEX=row_ptrs)
    return version


def errors_of(model, served):
    """The errors of the server's answers to forty samples."""
    dense, bags = model.sample_requests(40, seed=2)
    samples = [{"dense": row.tolist(), "keys": slots} for row, slots in zip(dense, bags, strict=True)]
    code, _, body = served.ask("/predict/tiny", json.dumps({"samples": samples}).encode())
    assert code == 200
    return np.abs(np.array(json.loads(body)["predictions"]) - model.probabilities(dense, bags))


@pytest.mark.slow
def test_an_int8_server_answers_nearly_like_the_model(model, tmp_path, start):
    write(model, tmp_path / "repository")

    served = start(tmp_path / "repository", "--engine", "int8", "--tolerance", "0.05")

    assert 1e-5 < errors_of(model, served).max() < 0.1


@pytest.mark.slow
def test_a_server_runs_a_network_in_a_separate_file(model, tmp_path, start):
    version = write(model, tmp_path / "repository")
    assert main(["export-onnx", str(version), str(tmp_path / "net.onnx")]) == 0
    shutil.move(tmp_path / "net.onnx", version / "net.onnx")
    (version / "dense.model").unlink()
    document = json.loads((version / "graph.json").read_text())
    document["inference"]["dense_model_file"] = "net.onnx"
    document["layers"] = document["layers"][: 1 + len(model.tables)]
    (version / "graph.json").write_text(json.dumps(document))

    served = start(tmp_path / "repository")

    assert errors_of(model, served).max() < 1e-5
