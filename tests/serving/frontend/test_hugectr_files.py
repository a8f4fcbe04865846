"""HugeCTR's own configuration files over HTTP, without a model repository."""

import numpy as np
import pytest

from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import listed, write_ps
from tests.tools.tiny_model import TinyModel, flatten


@pytest.fixture
def served():
    """Serve a path without a server or a socket; return a client function."""
    opened = []

    def serve(path):
        opened.append(ModelRepository(path))
        opened[-1].load()
        return Client(create_app(FrontEnd(opened[-1]))).ask

    yield serve
    for repository in opened:
        repository.close()


def ps_json(folder, versions, **tiers):
    """Write a ps.json into the new folder ``folder``; it lists ``versions`` by model name."""
    folder.mkdir()
    return write_ps(folder, [listed(place / "graph.json", name) for name, place in versions.items()], **tiers)


def assert_answers(ask, name, version, model):
    """Every route answers as the oracle does, with this version."""
    dense, bags = model.sample_requests(4, seed=2)
    expected = model.probabilities(dense, bags)
    samples = [{"dense": list(map(float, row)), "keys": bag} for row, bag in zip(dense, bags, strict=True)]
    keys, row_ptrs = flatten(bags)
    flat = np.asarray(dense, np.float32).reshape(-1)
    tensors = [("DES", "FP32", flat), ("CATCOLUMN", "INT64", keys), ("ROWINDEX", "INT32", row_ptrs)]
    inputs = [
        {"name": tensor, "datatype": datatype, "shape": [len(values)], "data": np.asarray(values).tolist()}
        for tensor, datatype, values in tensors
    ]

    predicted = ask("POST", f"/predict/{name}", json={"samples": samples}).json()
    inferred = ask("POST", f"/v2/models/{name}/versions/{version}/infer", json={"inputs": inputs}).json()

    np.testing.assert_allclose(predicted["predictions"], expected, atol=2e-6)
    np.testing.assert_allclose(np.reshape(inferred["outputs"][0]["data"], (4, 1)), expected, atol=2e-6)
    assert (predicted["model_version"], inferred["model_version"]) == (version, version)
    assert ask("GET", f"/v2/models/{name}").json()["versions"] == [version]
    assert ask("GET", f"/v2/models/{name}/ready").status_code == 200
    assert f'model="{name}",table="user",tier="memory",version="{version}"' in ask("GET", "/metrics").text


@pytest.mark.parametrize("form", ["the file", "its folder"])
def test_the_models_that_a_ps_json_lists_are_served(tmp_path, served, form):
    models = {name: TinyModel(seed=seed) for seed, name in enumerate(("ctr", "cvr"))}
    places = {name: model.write(tmp_path / "files", name) for name, model in models.items()}
    file = ps_json(tmp_path / "config", places)

    ask = served(file if form == "the file" else file.parent)

    for name, model in models.items():
        assert_answers(ask, name, "1", model)
    assert ask("GET", "/v2/models/files").status_code == 404


def test_the_tiers_that_a_ps_json_names_hold_the_rows(tmp_path, served):
    disk = {"type": "rocks_db", "path": "rows"}
    place = TinyModel().write(tmp_path / "files")
    file = ps_json(tmp_path / "config", {"ctr": place}, volatile_db={"type": "disabled"}, persistent_db=disk)

    ask = served(file)
    ask("POST", "/predict/ctr", json={"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]})

    assert (
        'hotrow_tier_hits_total{model="ctr",table="user",tier="rocksdb",version="1"} 1.0' in ask("GET", "/metrics").text
    )
    assert (tmp_path / "config" / "rows").is_dir()


def test_a_ps_json_of_any_name_that_lists_no_models_serves_its_folders(tmp_path, served):
    TinyModel().write(tmp_path, "ctr", version=3)
    limit = {"type": "hash_map", "capacity_rows_per_table": {"ctr.user": 1000}}

    ask = served(write_ps(tmp_path, name="small.json", volatile_db=limit))

    assert_answers(ask, "ctr", "3", TinyModel())


def test_a_listed_model_has_the_version_that_the_folder_of_its_graph_names(tmp_path, served):
    place = TinyModel().write(tmp_path / "files", version=7)

    assert_answers(served(ps_json(tmp_path / "config", {"ctr": place})), "ctr", "7", TinyModel())


def test_an_inference_json_is_served_under_the_name_of_its_file(tmp_path, served):
    place = TinyModel().write(tmp_path, "export", "latest")
    (place / "dcn v3.json").write_bytes((place / "graph.json").read_bytes())

    assert_answers(served(place / "dcn v3.json"), "dcn_v3", "1", TinyModel())


@pytest.mark.parametrize("part", ["tiny", "tiny/2"])
def test_the_folder_of_one_model_is_served_alone(tmp_path, served, part):
    TinyModel().write(tmp_path, version=2)
    TinyModel(seed=1).write(tmp_path, "other")

    ask = served(tmp_path / part)

    assert_answers(ask, "tiny", "2", TinyModel())
    assert ask("GET", "/v2/models/other").status_code == 404
