"""Find the line of a module's own code that a message names."""

import linecache
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
# These functions return keys as they are.
_MOVES = frozenset(
    (
        *("__getitem__", "__get__", "cat", "stack", "view", "reshape", "flatten", "unsqueeze", "squeeze", "unbind"),
        *("split", "chunk", "t", "transpose", "permute", "to", "long", "int", "contiguous", "clone", "expand"),
        *("detach", "size", "dim", "numel", "type", "narrow", "select", "unflatten", "concat", "tensor_split"),
    )
)
_INTEGERS = (torch.int64, torch.int32)
_MOST_CONSTANTS = 64


def line_of_call() -> str:
    """Return the line of the module's code that made the current call: ``"model.py, line 3: x = self.user(ids)"``.

    An empty text if there is none.
    """
    return _shown(walk_stack(sys._getframe(1)))


def line_of_error(trace: TracebackType | None) -> str:
    """Return the innermost line of the module's code in a traceback; see ``line_of_call``."""
    return _shown(reversed(list(walk_tb(trace))))


def line_of_trace(trace: str) -> str:
    """Return the innermost line of the module's code in the text of a traceback; see ``line_of_call``."""
    for file, number in reversed(re.findall(r'File "(.+)", line (\d+)', trace)):
        if shown := _shown_line(file, int(number), None):
            return shown
    return ""


def at_line(line: str) -> str:
    """Return the end of a message that names a line."""
    return f"; in {line}" if line else ""


def _shown(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, number in frames:
        if shown := _shown_line(frame.f_code.co_filename, number, frame.f_globals):
            return shown
    return ""


def _shown_line(file: str, number: int, module: dict[str, Any] | None) -> str:
    """Return a line with its file; an empty text if it is a library's."""
    if file.startswith(_LIBRARIES) or f"{Path('/torchrec/')}" in file:
        return ""
    code = linecache.getline(file, number, module).strip()
    return f"{Path(file).name}, line {number}: {code}" if code else f"{Path(file).name}, line {number}"


class KeyUses(TorchFunctionMode):  # type: ignore[misc]
    """Finds the first line that computes something from keys.

    Attributes:
        line: see ``line_of_call``.
        constants: integers that calls on integer tensors get, and those of small tensors that are no keys.
    """

    def __init__(self, keys: Sequence[Tensor]) -> None:
        """Watch the tensors ``keys`` and what is moved out of them."""
        super().__init__()
        self.line = ""
        self.constants: set[int] = set()
        self._keys = {id(tensor): tensor for tensor in keys}  # kept, so that no other tensor gets the same id

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the line of a call on keys that does more than move them."""
        answer = func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        flat = [each for arg in given for each in (arg if isinstance(arg, list | tuple) else (arg,))]
        is_move = getattr(func, "__name__", "") in _MOVES
        integers = [value for value in flat if isinstance(value, Tensor) and value.dtype in _INTEGERS]
        if integers and not is_move and len(self.constants) < _MOST_CONSTANTS:
            self.constants.update(value for value in flat if type(value) is int)
            for value in integers:
                if id(value) not in self._keys and value.numel() <= _MOST_CONSTANTS:
                    self.constants.update(value.flatten().tolist())
        if any(id(value) in self._keys for value in flat):
            if not is_move:
                self.line = self.line or line_of_call()
            else:
                made = answer if isinstance(answer, list | tuple) else (answer,)
                self._keys.update((id(tensor), tensor) for tensor in made if isinstance(tensor, Tensor))
        return answer
