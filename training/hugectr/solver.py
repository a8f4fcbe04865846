"""How a session trains: batches, files to start from, devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.errors import ConfigError
from training.arguments import is_whole

_SCALERS = (128.0, 256.0, 512.0, 1024.0)


@dataclass(frozen=True, slots=True)
class SolverParser:
    """The settings of a session. Read-only.

    Training runs on the CPU in float32. So the settings of GPUs are checked, but change nothing: ``vvgpu``,
    ``use_mixed_precision``, ``enable_tf32_compute``, ``scaler``, ``use_algorithm_search`` and ``use_cuda_graph``.

    Attributes:
        seed: determines the first weights and the dropout, at least 0.
        max_eval_batches: the most batches of one ``Session.evaluation``.
        batchsize_eval: the samples of an evaluation batch.
        batchsize: the samples of a training batch.
        model_file: a dense model to start from; "": none.
        dense_opt_states_file: the optimizer's states of the dense model; "": none.
        embedding_files: sparse models to start from, one per table.
        sparse_opt_states_file: the optimizer's states of the sparse models, one file per table.
        vvgpu: the GPUs of each node.
        use_mixed_precision: whether HugeCTR would train in float16.
        enable_tf32_compute: whether HugeCTR would multiply in TF32.
        scaler: the factor of the loss in mixed precision: 128, 256, 512 or 1024; otherwise 1.
        i64_input_key: whether keys are int64; otherwise they are uint32.
        use_algorithm_search: whether HugeCTR would search cuBLAS's algorithms.
        use_cuda_graph: whether HugeCTR would use CUDA graphs.
        repeat_dataset: whether the data repeats forever (non-epoch mode) or ends (epoch mode).
        kafka_brockers: ``host:port[;host:port]`` for ``Session.dump_incremental_model_2kafka``; "": none. HugeCTR
            spells it so.
        model_name: the model's name in Kafka's topics; "": that of the document's file.

    Raises:
        ConfigError: a setting has another type or is out of range.
    """

    seed: int = 0
    max_eval_batches: int = 100
    batchsize_eval: int = 2048
    batchsize: int = 2048
    model_file: str = ""
    dense_opt_states_file: str = ""
    embedding_files: str | Sequence[str] = ()
    sparse_opt_states_file: str | Sequence[str] = ()
    vvgpu: Sequence[Sequence[int]] = ((0,),)
    use_mixed_precision: bool = False
    enable_tf32_compute: bool = False
    scaler: float = 1.0
    i64_input_key: bool = False
    use_algorithm_search: bool = True
    use_cuda_graph: bool = True
    repeat_dataset: bool = True
    kafka_brockers: str = ""
    model_name: str = ""

    def __post_init__(self) -> None:
        """Check every setting, and make tuples of lists."""
        for name, least in (("seed", 0), ("max_eval_batches", 1), ("batchsize_eval", 1), ("batchsize", 1)):
            value = getattr(self, name)
            if not is_whole(value, least):
                raise _error(name, f"expected a whole number of at least {least}", value)
        texts = dict.fromkeys(("model_file", "dense_opt_states_file"), "a path")
        texts |= dict.fromkeys(("kafka_brockers", "model_name"), "a text")
        for name, expected in texts.items():
            if not isinstance(getattr(self, name), str):
                raise _error(name, f"expected {expected}", getattr(self, name))
        for name in ("embedding_files", "sparse_opt_states_file"):
            object.__setattr__(self, name, _paths(name, getattr(self, name)))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _error(name, "expected True or False", getattr(self, name))
        object.__setattr__(self, "vvgpu", _gpus(self.vvgpu))
        allowed = _SCALERS if self.use_mixed_precision else (1.0,)
        if self.scaler not in allowed:
            wanted = " or ".join(f"{scaler:g}" for scaler in allowed)
            raise _error(
                "scaler", f"expected {wanted} with use_mixed_precision {self.use_mixed_precision}", self.scaler
            )


_SWITCHES = (
    "use_mixed_precision",
    "enable_tf32_compute",
    "i64_input_key",
    "use_algorithm_search",
    "use_cuda_graph",
    "repeat_dataset",
)
solver_parser_helper = SolverParser


def _paths(name: str, value: Any) -> tuple[str, ...]:
    paths = ((value,) if value else ()) if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) and path for path in paths):
        raise _error(name, "expected a path or a list of paths", value)
    return tuple(paths)


def _gpus(nodes: Any) -> tuple[tuple[int, ...], ...]:
    is_list = isinstance(nodes, list | tuple) and nodes
    if not is_list or not all(
        isinstance(gpus, list | tuple) and gpus and all(is_whole(gpu, 0) for gpu in gpus) for gpus in nodes
    ):
        raise _error("vvgpu", "expected a list of GPU numbers for each node", nodes)
    return tuple(tuple(gpus) for gpus in nodes)


def _error(name: str, expected: str, value: Any) -> ConfigError:
    return ConfigError("solver_parser_helper", name, f"{expected}, got {value!r}")
