"""The answers of a module: one tensor, or several with names."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from serving.errors import ConfigError
from serving.importers.outputs import ONE_ANSWER, Kinds, kinds_of_answer, outputs_of_widths
from serving.model.records import Output


class Answers:
    """Reads the answers of a module.

    Attributes:
        kinds: the kind of each output, in order.
    """

    def __init__(self, source: str, answer: Any, kinds: Kinds | None) -> None:
        """Learn the names of the outputs from one answer.

        Args:
            source: names the module in messages.
            answer: what ``forward`` returned.
            kinds: the outputs to keep; None: all, as probabilities.

        Raises:
            ConfigError: the answer has other outputs, or its outputs need names.
        """
        self._source = source
        named = _named(answer)
        self.kinds = kinds_of_answer(source, answer if named is None else named, kinds)

    def tensors(self, answer: Any, samples: int) -> list[Tensor]:
        """Return the tensor of each output, float32[B] or float32[B, L].

        Raises:
            ConfigError: the answer has another form.
        """
        named = _named(answer)
        values = [named.get(name) for name in self.kinds] if named is not None else answer
        values = list(values) if _is_list(values) else [values]
        if len(values) != len(self.kinds):
            raise self._error(f"returns {len(values)} values, expected one for each of {', '.join(self.kinds)}")
        for name, value in zip(self.kinds, values, strict=True):
            if isinstance(value, Tensor):
                if value.dtype == torch.float32 and value.ndim in (1, 2) and value.shape[0] == samples:
                    continue
                came = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            else:
                came = type(value).__name__
            what = "one tensor" if self.kinds is ONE_ANSWER else f"{name!r}"
            expected = f"expected forward to return {what}, float32 [B] or [B, L] with B = {samples}"
            raise self._error(f"{expected}, got {came}")
        return values

    def joined(self, answer: Any, samples: int) -> tuple[Tensor, tuple[Output, ...]]:
        """Return float32[B, W], the columns of all outputs, and the outputs; see ``tensors``."""
        parts = [tensor.reshape(samples, -1) for tensor in self.tensors(answer, samples)]
        return torch.cat(parts, dim=1), outputs_of_widths(self.kinds, [part.shape[1] for part in parts])

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(self._source, "", reason)


def _named(answer: Any) -> Mapping[str, Any] | None:
    """Return the values of an answer by name; None: they have no names."""
    if isinstance(answer, Mapping):
        return answer
    if is_dataclass(answer) and not isinstance(answer, type):
        return {field.name: getattr(answer, field.name) for field in fields(answer)}
    if isinstance(answer, tuple) and hasattr(answer, "_asdict"):
        named: Mapping[str, Any] = answer._asdict()
        return named
    return None


def _is_list(answer: Any) -> bool:
    return isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
