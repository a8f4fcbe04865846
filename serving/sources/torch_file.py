"""PyTorch files (.pt, .pth): a ``state_dict``, as ``torch.save(model.state_dict(), file)`` writes it.

``torch.load(weights_only=True)`` reads them, which runs no code from the file. A pickled model is therefore refused.
Tensors are read on demand, except those of PyTorch before 1.6, which are read whole.
"""

import errno
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from serving.errors import MissingExtraError, ModelFileError
from serving.model.regular_file import check_regular, wrong_kind
from serving.model.sparse_rows import Vectors
from serving.sources.checkpoint import matrices_of
from serving.sources.rows import TableRows, check_matrix

# A damaged file raises any of these, because the unpickler runs it like a program.
_DAMAGED = (
    *(RuntimeError, ValueError, LookupError, EOFError, AttributeError, TypeError, AssertionError),
    *(struct.error, zipfile.BadZipFile),
)
_BEGINNINGS = (b"PK", b"\x80")  # a ZIP archive, and a pickle


class TorchFile:
    """The tensors of a PyTorch file. Tensors in inner dictionaries have dotted names. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """List the tensors.

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
        return rows_of_tensor(f"{self.path}#{name}", self._tensors[name].detach())


def rows_of_tensor(source: str, tensor: Any) -> TableRows:
    """Return the rows of a detached tensor. Raise ModelFileError if it is not a table."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    # a subclass may hold only a part of the tensor, or compute its values
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    is_float = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not is_plain:
        found = f"{type(tensor).__name__}, {tensor.layout}, on {tensor.device}: {dtype} {list(tensor.shape)}"
        raise ModelFileError(source, f"expected a plain tensor whose values are in RAM or all in the file, got {found}")
    check_matrix(source, dtype, is_float, tensor.shape)
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise ModelFileError(source, "expected a tensor that stores every value, got one expanded from fewer")

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
        check_regular(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, UnpicklingError, *_DAMAGED) as err:
        if isinstance(err, OSError) and err.errno != errno.EINVAL:
            raise ModelFileError(path, f"cannot be read: {err.strerror or err}") from err
        reason = wrong_kind(path, "a PyTorch file", _BEGINNINGS)
        if isinstance(err, UnpicklingError) and reason.endswith("damaged"):
            reason = (
                "holds more than tensors, and reading it would run its code; save only the tensors: "
                "torch.save(model.state_dict(), file), or torch.distributed.checkpoint for a sharded model"
            )
        raise ModelFileError(path, reason) from err


def _tensors_in(content: Any) -> dict[str, Any]:
    """Return the tensors in nested dictionaries, and skip everything else, such as an optimizer's numbers."""
    import torch

    tensors: dict[str, Any] = {}
    seen: set[int] = set()  # a file may contain a dictionary several times, even inside itself
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
