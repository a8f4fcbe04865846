"""PyTorch files (.pt, .pth): a ``state_dict``, as ``torch.save(model.state_dict(), file)`` writes it.

They are read by ``torch.load(weights_only=True)``, which runs no code of the file's; so a pickled model is refused.
Tensors stay on the disk until they are read, but for those of PyTorch before 1.6, which are read as a whole.
"""

import errno
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from serving.errors import MissingExtraError, ModelFileError
from serving.importers.checkpoint import matrices_of
from serving.importers.rows import TableRows, check_matrix
from serving.model.sparse_rows import Vectors

# As what damage in a file shows: the unpickler is an interpreter, and stumbles like a program.
_DAMAGED = (
    *(RuntimeError, ValueError, LookupError, EOFError, AttributeError, TypeError, AssertionError),
    *(struct.error, zipfile.BadZipFile),
)
_CUT_SHORT = "cut short, damaged, or no PyTorch file"


class TorchFile:
    """The tensors of a PyTorch file, those of inner dictionaries by dotted names; see ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """Read what the tensors are.

        Raises:
            MissingExtraError: PyTorch is not installed.
            ModelFileError: the file cannot be read, or holds more than tensors and plain data.
        """
        self.path = path
        self._tensors = _tensors_in(_load(path))
        if not self._tensors:
            raise ModelFileError(path, "expected a dictionary of tensors, as model.state_dict() is, found no tensor")

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return list(self._tensors)

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``."""
        return matrices_of({name: tuple(tensor.shape) for name, tensor in self._tensors.items()})

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        import torch

        tensor = self._tensors[name].detach()
        source = f"{self.path}#{name}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        # a subclass is a part of a tensor, or computes its values
        is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        is_float = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if not is_plain:
            found = f"{type(tensor).__name__}, {tensor.layout}, on {tensor.device}: {dtype} {list(tensor.shape)}"
            raise ModelFileError(source, f"expected a plain tensor whose values are all in the file, got {found}")
        check_matrix(source, dtype, is_float, tensor.shape)
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise ModelFileError(source, "expected a value of its own for each place, got a tensor expanded from fewer")

        def read(begin: int, end: int) -> Vectors:
            vectors: Vectors = tensor[begin:end].to(torch.float32, copy=True).contiguous().numpy()
            return vectors

        return TableRows(source, tensor.shape[0], tensor.shape[1], None, read)


def _load(path: Path) -> Any:
    try:
        import torch
    except ImportError as err:
        raise MissingExtraError("torch", "train", f"reading {path}") from err
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as err:
        # PyTorch seeks to where the rest should be
        reason = _CUT_SHORT if err.errno == errno.EINVAL else f"cannot be read: {err.strerror or err}"
        raise ModelFileError(path, reason) from err
    except UnpicklingError as err:
        reason = (
            "holds more than tensors, and reading it would run its code; save the tensors alone: "
            "torch.save(model.state_dict(), file), of a sharded model by torch.distributed.checkpoint"
        )
        raise ModelFileError(path, reason) from err
    except _DAMAGED as err:
        lines = str(err).splitlines() or [type(err).__name__]
        raise ModelFileError(path, f"{_CUT_SHORT}: {lines[0].split('. ')[0]}") from err


def _tensors_in(content: Any) -> dict[str, Any]:
    """Find the tensors in nested dictionaries; what else is in them, an optimizer's numbers say, is passed over.

    A file may have a dictionary in several places, even inside itself: it is looked through once.
    """
    import torch

    tensors: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [("", content)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor) and name:
            tensors[name] = value
        elif isinstance(value, dict) and id(value) not in seen:
            seen.add(id(value))
            members = [(f"{name}.{key}" if name else str(key), member) for key, member in value.items()]
            waiting += reversed(members)
    return tensors
