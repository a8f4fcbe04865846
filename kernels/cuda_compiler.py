"""Compile kernels with NVRTC, and keep their machine code in the user's cache directory."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cupy.cuda import nvrtc

from kernels.errors import KernelError

COMPILER_OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
"""NVRTC's options: no contraction, for the same floats as on the host; lambdas are device code.

NVRTC keeps subnormals by default. CuPy does not: ``cupy.RawModule`` and ``RawKernel`` append ``-ftz=true`` when they
compile, and the last option wins. So CuPy only loads machine code.
"""


def cubin_file(name: str, text: str, architecture: int, options: Sequence[str]) -> Path:
    """Return the file with a kernel file's machine code, compiled unless the cache has it.

    Args:
        name: the beginning of the file's name.
        text: of ``read_source``.
        architecture: 90 for sm_90.
        options: see ``compile_cubin``.

    Raises:
        KernelError: it does not compile.
    """
    made_of = repr((text, architecture, COMPILER_OPTIONS, tuple(options), nvrtc.getVersion()))
    file = _directory() / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.cubin"
    if not file.exists():
        cubin, _ = compile_cubin(text, architecture, options)
        # Another process may make the same file: each writes its own file, and the rename is atomic.
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            made = Path(scratch) / file.name
            made.write_bytes(cubin)
            made.replace(file)
    return file


@functools.cache
def _directory() -> Path:
    """Return ``$XDG_CACHE_HOME/hotrow/cubin`` or ``~/.cache/hotrow/cubin``, or else a directory of this process."""
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "hotrow" / "cubin"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:  # without a writable home each process compiles for itself
        own = tempfile.mkdtemp(prefix="hotrow-cubin-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return Path(own)


def compile_cubin(text: str, architecture: int, options: Sequence[str]) -> tuple[bytes, str]:
    """Compile a kernel file's text for a GPU, which need not be present.

    Args:
        text: of ``read_source``.
        architecture: 80 for sm_80.
        options: for NVRTC, in addition to ``COMPILER_OPTIONS``.

    Returns:
        machine code and the compiler's log: registers and spills, with the option ``--ptxas-options=-v``.

    Raises:
        KernelError: it does not compile.
    """
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{architecture}", *COMPILER_OPTIONS, *options))
        # CuPy (14.2) takes the last byte for the end of a string and drops it, but it belongs to the ELF file.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as err:
        raise KernelError(f"sm_{architecture}: {nvrtc.getProgramLog(program).strip() or err}") from err
    finally:
        nvrtc.destroyProgram(program)
