"""What PyTorch neither compiles nor records, because it reads or changes rows outside of PyTorch."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """Keep a function out of what ``torch.compile`` compiles. Refuse to trace, export or transform it.

    ``torch.compiler.disable`` also does the first, but its import takes more than a second.
    """

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return torch.compiler.disable(function)(*arguments, **named)
        if torch.compiler.is_exporting() or torch.jit.is_tracing() or _is_recorded():
            advice = "hotrow.from_torch exports a module with its tables"
            raise RuntimeError(
                f"{function.__qualname__}: a graph cannot have the rows, which are outside PyTorch; {advice}"
            )
        if torch._C._are_functorch_transforms_active():  # autograd.Function asks it too
            advice = "look the vectors up outside, and pass them to what is transformed"
            raise RuntimeError(f"{function.__qualname__}: torch.func does not reach the rows; {advice}")
        return function(*arguments, **named)

    return call  # type: ignore[return-value]


def _is_recorded() -> bool:
    """Return whether ``torch.fx`` records the call, or runs it without elements."""
    modes = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    if has_modes and any(torch._C._get_dispatch_mode(mode) is not None for mode in modes):
        return True
    is_traced: bool = torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    return is_traced
