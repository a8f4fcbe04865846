"""The answers of a module: one tensor, or several with names."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from serving.errors import ConfigError
from serving.importers.outputs import ONE_ANSWER, Kind, check_kinds, kinds_of_answer, named_in_order, outputs_of_widths
from serving.model.records import Output


class Answers:
    """Reads the answers of a module.

    Attributes:
        kinds: the kind of each output, in order.
    """

    def __init__(self, source: str, answer: Any, kinds: Mapping[str, Kind] | None) -> None:
        """Learn the names of the outputs from one answer.

        Args:
            source: names the module in messages.
            answer: what ``forward`` returned.
            kinds: see ``kinds_of``.

        Raises:
            ConfigError: the answer has other outputs, or its outputs need names.
        """
        if kinds is not None:
            check_kinds(source, kinds)
        self._source, self._names = source, list(kinds or ())
        named = self._named(answer)
        self.kinds = kinds_of_answer(source, answer if named is None else named, kinds)

    def tensors(self, answer: Any, samples: int) -> list[Tensor]:
        """Return the tensor of each output, float32[B] or float32[B, L].

        Raises:
            ConfigError: the answer has another form.
        """
        named = self._named(answer)
        values = [answer] if named is None else [named.get(name) for name in self.kinds]
        for name, value in zip(self.kinds, values, strict=True):
            if isinstance(value, Tensor):
                if value.dtype == torch.float32 and value.ndim in (1, 2) and value.shape[0] == samples:
                    continue
                came = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            else:
                came = type(value).__name__
            what = "one tensor" if self.kinds is ONE_ANSWER else f"{name!r}"
            expected = f"expected forward to return {what}, float32 [B] or [B, L] with B = {samples}"
            omit = "" if named is None else f"; to leave it out, use outputs={{{name!r}: 'omit'}}"
            fewer = isinstance(value, Tensor) and samples == 1 and value.shape[:1] != (1,)
            squeeze = "; squeeze() removes B if it is 1: use squeeze(1)" if fewer else ""
            raise self._error(f"{expected}, got {came}{squeeze}{omit}")
        return values

    def joined(self, answer: Any, samples: int) -> tuple[Tensor, tuple[Output, ...]]:
        """Return float32[B, W], the columns of all outputs, and the outputs; see ``tensors``."""
        parts = [tensor.reshape(samples, -1) for tensor in self.tensors(answer, samples)]
        return torch.cat(parts, dim=1), outputs_of_widths(self.kinds, [part.shape[1] for part in parts])

    def _named(self, answer: Any) -> Mapping[str, Any] | None:
        """Return the values of an answer by name; None: it is one tensor."""
        named = _named(answer)
        if named is None and isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
            return named_in_order(self._source, answer, self._names)
        return named

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
