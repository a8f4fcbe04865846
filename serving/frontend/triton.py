"""The session inside Triton: the Python backend's model class.

An exported ``model.py`` is one line, ``from serving.frontend.triton import TritonPythonModel``. The tensors are in
``serving.protocol.ctr``. Triton's own module exists only inside Triton, so it is imported when a model is opened. Rows
are in the tiers of the repository's ``ps.json``, as with ``hotrow serve``. Each instance of a model is its own process,
and only one process can open a RocksDB for writing.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from kernels.errors import HotrowError
from serving import load_model
from serving.errors import ConfigError, RequestError
from serving.protocol.ctr import PROBABILITIES, batch_of, signature_of
from serving.session import InferenceSession


class TritonPythonModel:
    """One model instance. Triton calls every method from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the version directory that Triton loads, and the tiers of its repository.

        Args:
            args: Triton's; ``model_repository`` is the model's folder and ``model_version`` its version.

        Raises:
            HotrowError: the model cannot be opened; Triton shows the message and marks the model unavailable.
        """
        self._triton: Any = import_module("triton_python_backend_utils")
        directory = Path(args["model_repository"]) / args["model_version"]
        if not directory.is_dir():
            raise ConfigError(str(directory), "", "no such version directory")
        self._session: InferenceSession = load_model(directory)
        self._inputs = signature_of(self._session.config).inputs

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request separately: a bad request does not affect the others."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Close the model."""
        self._session.close()

    def _respond(self, request: Any) -> Any:
        triton = self._triton
        try:
            probabilities = self._predict(request)
        except RequestError as err:
            return triton.InferenceResponse(error=triton.TritonError(str(err), triton.TritonError.INVALID_ARG))
        except HotrowError as err:
            return triton.InferenceResponse(error=triton.TritonError(str(err), triton.TritonError.UNAVAILABLE))
        return triton.InferenceResponse(output_tensors=[triton.Tensor(PROBABILITIES, probabilities)])

    def _predict(self, request: Any) -> Any:
        inputs = {}
        for spec in self._inputs:
            tensor = self._triton.get_input_tensor_by_name(request, spec.name)
            if tensor is not None:
                inputs[spec.name] = tensor.as_numpy()
            elif not spec.optional:
                raise RequestError(f"inputs: missing {spec.name!r}")
        return self._session.predict_batch(batch_of(self._session.config, inputs)).probabilities
