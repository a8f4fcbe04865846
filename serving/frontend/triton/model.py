"""The class that Triton's Python backend loads from ``model.py``."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from kernels.errors import HotrowError
from serving.errors import ConfigError, RequestError
from serving.frontend.served_model import batches
from serving.frontend.triton.metrics import TritonMetrics
from serving.frontend.triton.opening import open_model, read_settings


class TritonPythonModel:
    """One model instance. Triton calls every method from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the version that Triton loads, with the tiers of its repository.

        Args:
            args: Triton's; ``model_repository`` is the model's folder, ``model_version`` its version, and
                ``model_config`` its configuration as JSON.

        Raises:
            HotrowError: the model cannot be opened. Triton shows the message and marks the model unavailable.
        """
        self._triton: Any = import_module("triton_python_backend_utils")
        _check_numpy(self._triton)
        settings = read_settings(args)
        self._opened = open_model(settings)
        try:
            self._metrics = TritonMetrics(self._triton, self._opened.readings)
        except BaseException:
            self._opened.close()
            raise

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the requests in as few lookups as possible. A bad request does not affect the others."""
        responses: dict[int, Any] = {}
        questions: dict[int, Any] = {}
        for place, request in enumerate(requests):
            try:
                questions[place] = self._read(request)
            except HotrowError as err:
                responses[place] = self._error(err)
        model = self._opened.model
        most = model.config.max_batchsize if model.can_merge else 1
        for batch in batches(questions, lambda place: model.samples(questions[place]), most):
            answers = self._answer([questions[place] for place in batch])
            responses.update(zip(batch, answers, strict=True))
        self._metrics.send_if_due()
        return [responses[place] for place in range(len(requests))]

    def finalize(self) -> None:
        """Close the model and release its tiers, caches and metrics."""
        try:
            self._metrics.close()
        finally:
            self._opened.close()

    def _read(self, request: Any) -> Any:
        inputs = {}
        for spec in self._opened.model.signature.inputs:
            tensor = self._triton.get_input_tensor_by_name(request, spec.name)
            if tensor is not None:
                inputs[spec.name] = tensor.as_numpy()
            elif not spec.optional:
                raise RequestError(f"inputs: missing {spec.name!r}")
        return self._opened.model.read(inputs)

    def _answer(self, questions: list[Any]) -> list[Any]:
        """Answer questions together. If that fails, answer each alone, so that only the faulty requests fail."""
        try:
            answers = self._opened.model.answer(questions)
        except HotrowError as err:
            if len(questions) == 1:
                return [self._error(err)]
            return [response for one in questions for response in self._answer([one])]
        return [self._response(answer) for answer in answers]

    def _response(self, answer: Any) -> Any:
        outputs, _ = self._opened.model.outputs(answer)
        tensors = [self._triton.Tensor(name, array) for name, array in outputs.items()]
        return self._triton.InferenceResponse(output_tensors=tensors)

    def _error(self, error: HotrowError) -> Any:
        kind = self._triton.TritonError
        code = kind.INVALID_ARG if isinstance(error, RequestError) else kind.UNAVAILABLE
        return self._triton.InferenceResponse(error=kind(str(error), code))


def _check_numpy(triton: Any) -> None:
    """Refuse a Triton that reads arrays of NumPy 2 wrongly: it repeats a tensor's first value.

    Raises:
        ConfigError: this Triton needs NumPy 1.
    """
    if int(np.__version__.split(".")[0]) < 2:  # and NumPy 1 cannot give this Triton an array of DLPack
        return
    values = np.array([1.5, 2.0], dtype=np.float32)
    if not np.array_equal(triton.Tensor.from_dlpack("probe", values).as_numpy(), values):
        reason = f"this Triton corrupts tensors with NumPy {np.__version__}; install 'numpy<2' in Triton's Python"
        raise ConfigError("Triton", "", reason)
