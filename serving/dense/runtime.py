"""ONNX Runtime: how a session is opened, the same way for every network. It is imported when one is, never before."""

from pathlib import Path
from typing import Any

from serving.errors import MissingExtraError, ModelFileError


def import_runtime() -> Any:
    """Return the module ``onnxruntime``.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as err:
        raise MissingExtraError("onnxruntime", "onnx", "the ONNX engine") from err
    return onnxruntime


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions with which ONNX Runtime refuses a model, or an input of it; they have no base of their own."""
    state = import_runtime().capi.onnxruntime_pybind11_state
    return (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
        UnicodeDecodeError,  # of damage in a name
    )


def open_session(model: bytes | Path, threads: int, source: str) -> Any:
    """Return an ``onnxruntime.InferenceSession``.

    Args:
        model: the ONNX model, or its file: one of more than 2 GiB has its weights in files beside it.
        threads: how many threads work on one call.
        source: the model's file, for messages.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelFileError: ``model`` is not an ONNX model, or one that this ONNX Runtime cannot run.
        ValueError: ``threads`` is less than 1.
    """
    if threads < 1:
        raise ValueError(f"expected at least 1 thread, got {threads}")
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # what goes wrong is raised; warnings speak to those who write optimisers
    # a thread that spins between calls takes the core from the lookup of the next request
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        content = model if isinstance(model, bytes) else str(model)
        # without the fallback, which prints and tries once more with the same provider
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except refusals() as err:
        raise ModelFileError(source, f"ONNX Runtime cannot open it: {one_line(err)}") from err


def one_line(error: Exception) -> str:
    """The message of an exception of ONNX Runtime, which may have several lines."""
    return " ".join(str(error).split())
