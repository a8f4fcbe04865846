"""A table among the parameters of a PyTorch module."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, Self

import torch
from torch.utils.hooks import RemovableHandle

from training.embedding.eager import eager
from training.embedding.exchange import OwnedTable, ShardSink, SharedLookups
from training.embedding.gradients import Receiver, TableSink, backward_pass
from training.embedding.inputs import FeatureBags
from training.embedding.lookups import Lookups
from training.embedding.table_gradient import gradient_of, tensors_in
from training.processes import Processes
from training.tables.table import EmbeddingTable

# Functions that return the parameter or an alias.
_ALIASES = {
    torch.Tensor.data.__get__,
    torch.Tensor.detach,
    torch.Tensor.requires_grad_,
    torch.Tensor.to,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.float,
}

# Functions that would read or write elements, and do not return a tensor. Their own names do not say so.
_OF_ELEMENTS = {"__setitem__", "__array__", "allclose", "equal", "numpy", "tolist", "type"}

# What to do instead, by the PyTorch function that a program reaches first.
_ADVICE = {
    "chunk": "ignored_params for fully_shard",
    "flatten": "ignored_states for FullyShardedDataParallel",
    "type": "ZeroRedundancyOptimizer for the other parameters only",
}


class TableParameter(torch.nn.Parameter):  # type: ignore[misc]
    """Stands for a table among the parameters of a module. Its shape is [0, D]; the rows are in ``table``.

    ``grad`` is the sum float32[U, D] of the gradients of each row that has one. PyTorch's functions on gradients may
    change it in place. PyTorch may also ask what the parameter is, move it and detach it. Everything else would
    compute with elements that are not here, so it raises an error.

    Attributes:
        table: the rows of this process.
        processes: have the rows of the whole table.
        owner: see ``OwnedTable``.
        sink: the gradients.
        optimizer: the number of the optimizer that was made for it last; None: there is none.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Make a parameter without elements."""
        return super().__new__(cls, torch.empty(0, 0))  # type: ignore[no-any-return]

    def __init__(
        self, table: EmbeddingTable, processes: Processes | None = None, owner: int | None = None, **named: Any
    ) -> None:
        """Take the rows of this process. See ``OwnedTable`` for the owner. None: this process has all rows."""
        if isinstance(table, TableParameter):
            _refuse("Parameter", [table], named)
        self.table = table
        self.processes = processes or Processes()
        self.owner = owner
        is_shared = self.processes.size > 1
        self.sink = ShardSink(self.processes, OwnedTable(table, owner)) if is_shared else TableSink()
        self.optimizer: int | None = None
        if self.device.type == "meta":
            raise RuntimeError(f"table {table.name!r}: expected a device with memory for the rows, got meta")
        self.data = torch.empty(0, table.config.dim)
        self.register_post_accumulate_grad_hook(_keep)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, in RAM. It can be changed in place or replaced. None: no backward pass has left one."""
        if torch._guards.TracingContext.try_get() is not None:  # torch.compile leaves out what reads it
            raise torch._dynamo.exc.Unsupported(f"table {self.table.name!r}: grad: the rows are outside PyTorch")
        return self.sink.rows()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.sink.clear()
        else:
            self.sink.replace(gradient_of(value, self.table.native))

    @grad.deleter
    def grad(self) -> None:
        self.sink.clear()

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """Call a function with the gradient of each backward pass; see ``torch.Tensor.register_hook``."""
        handle = RemovableHandle(self.sink.hooks)
        self.sink.hooks[handle.id] = hook
        return handle

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let PyTorch read what the parameter is, and refuse what would compute with its elements."""
        name = function.__name__
        writes = name.endswith("_") and not name.endswith("__")
        if function == torch.Tensor.data.__set__:
            name, writes = "data", bool(args[1].numel())
        if function not in _ALIASES and (writes or name in _OF_ELEMENTS):
            _refuse(name, args, kwargs)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **kwargs or {})
        except RuntimeError as err:
            _refuse(name, args, kwargs, err)
        if function in _ALIASES and result.dtype == torch.float32 and result.device.type != "meta":
            return result if result is args[0] else _alias_of(args[0], result)
        if any(True for _ in tensors_in([result])):
            _refuse(name, args, kwargs)
        return result

    def __repr__(self, **named: Any) -> str:
        """Show the table, because there are no elements."""
        return f"TableParameter({self.table.name!r}, {self.table.shown})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableParameter":
        """Copy the rows. Gradients and hooks are not copied, as for any parameter."""
        copied = _made(copy.deepcopy(self.table, memo), self.processes, self.owner, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the rows."""
        return _made, (self.table, self.processes, self.owner, self.requires_grad)


def which_make_rows(parameters: Sequence[TableParameter], bags: Sequence[FeatureBags], trains: bool) -> list[bool]:
    """Return for each lookup whether new keys get rows. A frozen table makes none, and no table does without gradients.

    ``torch.utils.checkpoint`` repeats a forward pass inside of a backward pass. The first forward pass has made the
    rows, unless it ran without gradients as it does with ``use_reentrant=True``. A key that a table has not admitted
    has no row in either.

    Raises:
        RuntimeError: a repeated forward pass would make rows, or several processes share a table, so none can tell.
    """
    makes_rows = [trains and torch.is_grad_enabled() and entry.requires_grad for entry in parameters]
    if backward_pass() == -1:
        return makes_rows
    for parameter, makes, one in zip(parameters, makes_rows, bags, strict=True):
        table = parameter.table
        if not makes or table.config.admit_after > 1:
            continue
        repeated = f"table {table.name!r}: a repeated forward pass cannot make rows"
        if parameter.processes.size > 1:
            raise RuntimeError(f"{repeated} in several processes: keep the tables out of torch.utils.checkpoint")
        if (table.native.find(one.keys) < 0).any():
            advice = "pass use_reentrant=False to torch.utils.checkpoint, or keep the tables out of it"
            raise RuntimeError(f"{repeated}: {advice}")
    return [False] * len(parameters)


def sinks_of(parameters: Sequence[TableParameter], lookups: Lookups) -> Receiver:
    """Return a receiver that gives each lookup's gradient to the sink of its table."""
    if isinstance(lookups, SharedLookups) and torch.is_grad_enabled():
        shards = _shards(parameters)
        for parameter, owned in zip(parameters, lookups.owned, strict=True):
            assert isinstance(parameter.sink, ShardSink)
            parameter.sink.looked_up, parameter.sink.owned = shards, owned
    return partial(_to_sinks, parameters)


def send_gradients(parameters: Iterable[TableParameter]) -> None:
    """Send the gradients of tables that processes share to the owners of the rows. Every process calls this."""
    of_processes: dict[int, list[ShardSink]] = defaultdict(list)
    for sink in _shards(parameters):
        of_processes[id(sink.processes)].append(sink)
    for sinks in of_processes.values():
        ShardSink.send("step", sinks)


def _shards(parameters: Iterable[TableParameter]) -> list[ShardSink]:
    return list(dict.fromkeys(entry.sink for entry in parameters if isinstance(entry.sink, ShardSink)))


def _to_sinks(parameters: Sequence[TableParameter], gradients: Sequence[Any]) -> list[torch.Tensor | None]:
    returned: list[torch.Tensor | None] = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and parameter.requires_grad:  # it may have been frozen since
            expected = "tables that the processes share, or a process_group of this process alone"
            parameter.processes.require_joined(f"table {parameter.table.name!r}", expected)
            parameter.sink.receive(gradient)
        nothing = torch.empty(0, parameter.table.config.dim, device=parameter.device)
        returned.append(None if gradient is None else nothing)
    return returned


@eager
def _keep(parameter: TableParameter) -> None:
    if torch.is_grad_enabled():
        reason = "expected backward() without create_graph, because the gradients of rows cannot be differentiated"
        raise TypeError(f"table {parameter.table.name!r}: {reason}")
    parameter.sink.keep()


def _alias_of(parameter: TableParameter, elements: torch.Tensor) -> TableParameter:
    """Return an alias that refuses what the parameter refuses. It has no gradient."""
    alias: TableParameter = elements.as_subclass(type(parameter))
    alias.__dict__.update(parameter.__dict__, sink=TableSink())
    return alias


def _sent(parameter: TableParameter) -> Any:
    """Pickle the rows for another process. Elements of other parameters would be in memory that both share."""
    reason = "another process gets a copy of the rows, so this process will not see what it trains"
    warnings.warn(f"table {parameter.table.name!r}: {reason}", stacklevel=2)
    return parameter.__reduce_ex__(None)


ForkingPickler.register(TableParameter, _sent)


def _made(table: EmbeddingTable, processes: Processes, owner: int | None, requires_grad: bool) -> TableParameter:
    parameter: TableParameter = TableParameter(table, processes, owner).requires_grad_(requires_grad)
    return parameter


def _refuse(function: str, args: Any, kwargs: Any, cause: Exception | None = None) -> NoReturn:
    table = next(
        value.table for value in tensors_in([*args, *(kwargs or {}).values()]) if isinstance(value, TableParameter)
    )
    instead = "an optimizer of training.optimizers, or row_dtype of the table's config for rows of another type"
    # no TypeError, which + and other operators would take for "ask the other operand"
    raise RuntimeError(
        f"table {table.name!r}: PyTorch's {function!r} does not reach the rows, which are outside PyTorch; "
        f"expected {_ADVICE.get(function, instead)}"
    ) from cause
