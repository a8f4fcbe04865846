"""Opens ONNX Runtime sessions, the same way for every network; ONNX Runtime is imported with the first session."""

from pathlib import Path
from typing import Any

from serving.errors import MissingExtraError, ModelFileError


def import_runtime() -> Any:
    """Return the module ``onnxruntime``, or raise MissingExtraError if it is not installed."""
    try:
        import onnxruntime
    except ImportError as err:
        raise MissingExtraError("onnxruntime", "onnx", "the ONNX engine") from err
    return onnxruntime


def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions with which ONNX Runtime refuses a model or its input; they share no base class."""
    state = import_runtime().capi.onnxruntime_pybind11_state
    return (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
        UnicodeDecodeError,  # from a damaged name
    )


def open_session(model: bytes | Path, threads: int, source: str) -> Any:
    """Return an ``onnxruntime.InferenceSession``.

    Args:
        model: the ONNX model, or its file; a model of more than 2 GiB has weights in files next to it.
        threads: how many threads work on one call.
        source: the model's file, for messages.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelFileError: ``model`` is not an ONNX model, or this ONNX Runtime cannot run it.
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
    options.log_severity_level = 4  # errors are raised; warnings are for authors of optimizers
    # A thread that spins between calls takes a core from the lookup of the next request.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        content = model if isinstance(model, bytes) else str(model)
        # The fallback would print, then try again with the same provider.
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except refusals() as err:
        raise ModelFileError(source, f"ONNX Runtime cannot open it: {one_line(err)}") from err


def one_line(error: Exception) -> str:
    """Return the message of an ONNX Runtime exception, which may have several lines, as one line."""
    return " ".join(str(error).split())
