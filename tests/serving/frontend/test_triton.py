"""The Python backend's class against a stand-in for Triton's own module."""

import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from benchmarks.tiny_model import TinyModel, flatten
from serving.errors import ConfigError, ModelFileError, StoreError
from serving.frontend.triton import TritonPythonModel
from tests.serving.ps_files import write_ps


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError:
    INVALID_ARG, UNAVAILABLE = "invalid argument", "unavailable"

    def __init__(self, message, code):
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.output_tensors, self.error = output_tensors, error


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    """The part of Triton's module that the class uses; a request is a dict of arrays."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError, module.InferenceResponse = Tensor, TritonError, InferenceResponse
    module.get_input_tensor_by_name = lambda request, name: Tensor(name, request[name]) if name in request else None
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)


@pytest.fixture
def opened(tmp_path):
    """Initialize models as Triton does; all are finalized when the test ends."""
    models = []

    def initialize(directory):
        model = TritonPythonModel()
        model.initialize({"model_repository": str(directory.parent), "model_version": directory.name})
        models.append(model)
        return model

    yield initialize
    for model in models:
        model.finalize()


def request(model, samples=3, seed=0):
    dense, bags = model.sample_requests(samples, seed)
    keys, row_ptrs = flatten(bags)
    tensors = {"DES": dense.reshape(1, -1), "CATCOLUMN": keys[None], "ROWINDEX": row_ptrs[None]}
    return tensors, model.probabilities(dense, bags)


def test_every_request_of_a_call_gets_its_own_answer(tmp_path, opened):
    tiny = TinyModel()
    requests = [request(tiny, samples, seed=samples) for samples in (1, 5, 64)]

    responses = opened(tiny.write(tmp_path)).execute([tensors for tensors, _ in requests])

    for response, (_, expected) in zip(responses, requests, strict=True):
        (output,) = response.output_tensors
        assert output.name() == "OUTPUT0"
        np.testing.assert_allclose(output.as_numpy(), expected, atol=2e-6)


def test_a_bad_request_is_an_invalid_argument_and_spoils_no_other(tmp_path, opened):
    tiny = TinyModel()
    good, expected = request(tiny)
    bad = good | {"ROWINDEX": good["ROWINDEX"][:, :-1]}
    incomplete = {name: tensor for name, tensor in good.items() if name != "CATCOLUMN"}

    responses = opened(tiny.write(tmp_path)).execute([bad, good, incomplete])

    assert [response.error.code for response in responses[::2]] == [TritonError.INVALID_ARG] * 2
    assert "ROWINDEX" in responses[0].error.message
    assert "'CATCOLUMN'" in responses[2].error.message
    assert responses[1].error is None
    np.testing.assert_allclose(responses[1].output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_a_tier_that_is_down_is_unavailable(tmp_path, opened, monkeypatch):
    tiny = TinyModel()
    model = opened(tiny.write(tmp_path))

    def no_answer(_session, _batch):
        raise StoreError("rocksdb", "tiny.user", "no answer")

    monkeypatch.setattr(type(model._session), "predict_batch", no_answer)
    (response,) = model.execute([request(tiny)[0]])

    assert response.error.code == TritonError.UNAVAILABLE
    assert response.error.message == "rocksdb: table 'tiny.user': no answer"


def test_dense_features_may_be_missing_if_the_model_has_none(tmp_path, opened):
    tiny = TinyModel(dense_dim=0)
    tensors, expected = request(tiny)
    del tensors["DES"]

    (response,) = opened(tiny.write(tmp_path)).execute([tensors])

    np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_the_version_that_triton_names_is_opened(tmp_path, opened):
    old, new = TinyModel(seed=1), TinyModel(seed=2)
    directory = old.write(tmp_path, version=1)
    new.write(tmp_path, version=2)
    tensors, expected = request(old)

    (response,) = opened(directory).execute([tensors])

    np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_a_missing_version_is_refused(tmp_path, opened):
    directory = TinyModel().write(tmp_path)

    with pytest.raises(ConfigError, match="tiny/3: no such version directory"):
        opened(directory.with_name("3"))


def test_a_broken_version_is_refused(tmp_path, opened):
    directory = TinyModel().write(tmp_path)
    (directory / "dense.model").write_bytes(b"")

    with pytest.raises(ModelFileError, match=r"dense\.model"):
        opened(directory)


def test_triton_needs_no_web_framework():
    """NumPy and pydantic in Triton's own Python are enough to import model.py."""
    absent = ["fastapi", "starlette", "uvicorn", "orjson", "prometheus_client", "rocksdict", "hiredis", "torch"]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import serving.frontend.triton"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_rows_are_in_the_tiers_of_the_ps_json_next_to_the_models(tmp_path, opened):
    tiny = TinyModel()
    directory = tiny.write(tmp_path)
    write_ps(tmp_path, volatile_db={"type": "snapshot", "path": "made"})
    tensors, expected = request(tiny)

    (response,) = opened(directory).execute([tensors])

    np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)
    assert list((tmp_path / "made").rglob("*.snapshot"))


def test_a_broken_ps_json_is_refused(tmp_path, opened):
    directory = TinyModel().write(tmp_path)
    write_ps(tmp_path, volatile_db={"type": "none"})

    with pytest.raises(ConfigError, match=r"ps\.json: volatile_db and persistent_db are both disabled"):
        opened(directory)
