"""Kernel sources: a ``.cu`` file and all its includes as one text, and the signatures of its kernels.

With one text, every compiler sees the same source, and its digest shows whether a compiled file is up to date. The text
is the same in every folder. Line numbers are the line numbers of the files.

A kernel is declared as ``extern "C" __global__ void [__launch_bounds__(...)] name(parameters)``, without macros. A
parameter is a pointer or one of ``SCALARS``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernels.errors import KernelError

CUDA_DIRECTORY = Path(__file__).parent / "cuda"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$')
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(
    r'extern\s*"C"\s*__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)', re.DOTALL
)

SCALARS: dict[str, str] = {
    "bool": "?",
    "char": "i1",
    "signed char": "i1",
    "unsigned char": "u1",
    "short": "i2",
    "unsigned short": "u2",
    "int": "i4",
    "unsigned": "u4",
    "unsigned int": "u4",
    "long long": "i8",
    "unsigned long long": "u8",
    "float": "f4",
    "double": "f8",
    **{f"{kind}{8 * size}": f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)},
    **{f"{sign}int{8 * size}_t": f"{sign or 'i'}{size}" for sign in ("", "u") for size in (1, 2, 4, 8)},
    "size_t": "u8",
}
"""Types of parameters passed by value, with NumPy's code for each; ``u32``, ``i64`` and so on are Hotrow's names."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Args:
        name: as declared.
        dtype: of a value; None for a pointer.
    """

    name: str
    dtype: np.dtype[np.generic] | None


@dataclass(frozen=True)
class KernelSource:
    """A ``.cu`` file with its includes.

    Args:
        path: the file.
        text: the whole source, with ``#line`` directives.
        signatures: by kernel, its parameters in order.
    """

    path: Path
    text: str
    signatures: dict[str, tuple[Parameter, ...]]

    def parameters(self, kernel: str) -> tuple[Parameter, ...]:
        """Return a kernel's parameters.

        Raises:
            KernelError: the file has no such kernel.
        """
        if kernel not in self.signatures:
            raise KernelError(
                f"{self.path.name} has no kernel {kernel!r}: it has {', '.join(self.signatures) or 'none'}"
            )
        return self.signatures[kernel]


def read_source(file: str | Path) -> KernelSource:
    """Read a kernel file.

    Args:
        file: relative to ``kernels/cuda``, or absolute. Includes in quotes are searched next to the including file and
            then in ``kernels/cuda``, and each is included once.

    Raises:
        KernelError: the file or an included file is missing, or a kernel's parameter has an unknown type.
    """
    path = CUDA_DIRECTORY / file
    text = _in_one_piece(path, set())
    bare = _COMMENT.sub(" ", text)
    signatures = {name: _parameters(path, name, declared) for name, declared in _KERNEL.findall(bare)}
    return KernelSource(path, text, signatures)


def macro_options(defines: dict[str, str | int]) -> list[str]:
    """Return ``-Dname=value`` for each define, in the order of their names."""
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


def _in_one_piece(path: Path, taken: set[Path]) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as err:
        raise KernelError(f"{path}: {err.strerror or err}") from err
    taken.add(path.resolve())
    pieces = [f'#line 1 "{path.name}"']
    for number, line in enumerate(lines, 1):
        include = _INCLUDE.match(line)
        if include:
            included = _included(path, include[1], number)
            if included.resolve() not in taken:
                pieces.append(_in_one_piece(included, taken))
            pieces.append(f'#line {number + 1} "{path.name}"')
        else:
            pieces.append("" if _PRAGMA_ONCE.match(line) else line)
    return "\n".join(pieces) + "\n"


def _included(path: Path, name: str, number: int) -> Path:
    for directory in (path.parent, CUDA_DIRECTORY):
        if (directory / name).is_file():
            return directory / name
    raise KernelError(f'{path}:{number}: no file "{name}" next to it or in {CUDA_DIRECTORY}')


def _parameters(path: Path, kernel: str, declared: str) -> tuple[Parameter, ...]:
    if declared.strip() in ("", "void"):
        return ()
    return tuple(_parameter(path, kernel, part) for part in declared.split(","))


def _parameter(path: Path, kernel: str, declared: str) -> Parameter:
    words = re.sub(r"__restrict__|\b__grid_constant__\b", " ", declared).replace("*", " * ").split()
    name = words[-1]
    if "*" in words:
        return Parameter(name, None)
    spelled = " ".join(word for word in words[:-1] if word != "const")
    if spelled not in SCALARS:
        raise KernelError(
            f"{path.name}: {kernel}: parameter {name!r} has type {spelled!r}, whose width is not known: "
            f"pass a pointer or one of {', '.join(SCALARS)}"
        )
    return Parameter(name, np.dtype(SCALARS[spelled]))
