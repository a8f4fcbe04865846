"""Compile every kernel for GPUs, on a machine without a GPU: ``make check-nvrtc``.

A ``.cu`` file lists the specialisations to compile, one per line, with the macros in shell syntax::

    // Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, fp32, 16)
    //   FORM(1, int8, 64)"

An indented line continues the line before. Without such a line, the lines of the included files count; without any, the
file is compiled once, without macros. A kernel fails the check if it does not compile, or if it keeps registers or
arrays in memory.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import KernelError
from kernels.source import CUDA_DIRECTORY, KernelSource, macro_options, read_source
from kernels.system_cores import usable_cores

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

_COMPILED_WITH = re.compile(r"^// Compiled with: *(.*(?:\n//  .*)*)$", re.MULTILINE)
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel.

    Args:
        kernel: its name.
        registers: per thread.
        spill_bytes: stored and loaded per thread because registers run out.
        stack_bytes: per thread.
    """

    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int


@dataclass(frozen=True)
class Compilation:
    """One file, compiled with one set of macros for one architecture."""

    file: Path
    architecture: int
    defines: dict[str, str | int]


def specialisations(source: KernelSource) -> list[dict[str, str | int]]:
    """Return the macros of each specialisation of a kernel file: at least one, which may have no macros."""
    own: list[str] = _COMPILED_WITH.findall(source.path.read_text(encoding="utf-8"))
    lines = own or _COMPILED_WITH.findall(source.text) or [""]
    return [dict(_macro(source, word) for word in shlex.split(re.sub(r"\n// +", " ", line))) for line in lines]


def usages(log: str) -> list[Usage]:
    """Return each kernel's resources from the assembler's log."""
    return [
        Usage(entry["name"], int(entry["registers"]), int(entry["stores"]) + int(entry["loads"]), int(entry["stack"]))
        for entry in _ENTRY.finditer(log)
    ]


def compilations(file: Path, architectures: Sequence[int] = ARCHITECTURES) -> Iterator[Compilation]:
    """Yield every compilation of one file: each specialisation for each architecture."""
    for defines in specialisations(read_source(file)):
        for architecture in architectures:
            yield Compilation(file, architecture, defines)


def check(compilation: Compilation) -> list[tuple[str, str | None]]:
    """Compile; return lines to print, each with its fault or None."""
    from kernels.cuda_compiler import compile_cubin

    source = read_source(compilation.file)
    macros = " ".join(f"{name}={value}" for name, value in compilation.defines.items())
    what = f"{compilation.file.name} sm_{compilation.architecture} {macros}".strip()
    options = [*macro_options(compilation.defines), "--ptxas-options=-v"]
    began = time.perf_counter()
    try:
        _, log = compile_cubin(source.text, compilation.architecture, options)
    except KernelError as err:
        return [(what, f"does not compile: {err}")]
    found = usages(log)
    compiled = (f"{what}: {time.perf_counter() - began:.1f} s", _missing(source, found))
    return [compiled, *((f"  {usage.kernel}: {usage.registers} registers", _local_memory(usage)) for usage in found)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the files named, or all, on every core; return the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: every file of kernels/cuda")
    parser.add_argument(
        "--architecture", action="append", type=int, choices=ARCHITECTURES, help="for this one; default: for all"
    )
    options = parser.parse_args(arguments)
    files = options.files or sorted(CUDA_DIRECTORY.glob("*.cu"))
    architectures = options.architecture or ARCHITECTURES
    compiled = [compilation for file in files for compilation in compilations(file.absolute(), architectures)]
    failed = 0
    with ProcessPoolExecutor(usable_cores()) as pool:
        for lines in pool.map(check, compiled):
            for line, wrong in lines:
                print(line if wrong is None else f"{line}\n  FAILED: {wrong}", flush=True)
                failed += wrong is not None
    print(f"{len(files)} files, {failed} failures")
    return int(failed > 0)


def _macro(source: KernelSource, word: str) -> tuple[str, str | int]:
    name, equals, value = word.partition("=")
    if not equals:
        raise KernelError(f"{source.path.name}: expected NAME=value, not {word!r}, in 'Compiled with'")
    return name, value


def _local_memory(usage: Usage) -> str | None:
    """Describe a kernel's use of local memory, which is as slow as global memory; None if it uses none."""
    if usage.spill_bytes:
        return f"{usage.kernel} spills {usage.spill_bytes} bytes"
    return f"{usage.kernel} has {usage.stack_bytes} bytes of stack" if usage.stack_bytes else None


def _missing(source: KernelSource, found: Sequence[Usage]) -> str | None:
    """Name the kernels that the log does not mention, so that a changed log format cannot pass the check."""
    missing = source.signatures.keys() - {usage.kernel for usage in found}
    return f"the compiler's log does not mention {', '.join(sorted(missing))}" if missing else None


if __name__ == "__main__":
    sys.exit(main())
