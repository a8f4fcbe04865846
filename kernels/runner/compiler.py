"""Compile kernels with g++ for the runner, and keep the libraries in the user's cache directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from kernels.errors import DeviceUnavailableError, KernelError

HEADERS = Path(__file__).parent / "cpu"

_FLAGS = [
    "-std=c++17",
    "-O1",  # tests run each kernel for a moment only, and -O2 takes a quarter longer to compile
    "-g1",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",  # floats are rounded exactly where the kernel's operators and intrinsics say
    "-fno-math-errno",
    "-fno-strict-aliasing",  # kernels read rows and lines as whole words, which nvcc allows
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
]
# A call finds the kernel even if a function of the C library has the same name.
_OWN_NAMES_FIRST = "-Wl,-Bsymbolic-functions"
_SANITIZERS = {
    "": [],
    "thread": ["-fsanitize=thread", "-Wno-tsan"],
    # The checks left out take half of the compiler's time, and AddressSanitizer stops at the same wrong accesses.
    "address": [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        "-fno-sanitize=vptr,null,object-size,pointer-overflow",
    ],
}


class Compiler:
    """Compiles C++ to shared libraries. Any thread may call it; libraries are compiled one at a time.

    Wait for a library that another process is compiling.

    Args:
        sanitizer: ``"thread"``, ``"address"`` (with undefined behaviour) or ``""``; the sanitizer's library must be
            preloaded into the process.
    """

    def __init__(self, sanitizer: str = "") -> None:
        """See the class.

        Raises:
            DeviceUnavailableError: there is no g++.
            ValueError: ``sanitizer`` is unknown.
        """
        if sanitizer not in _SANITIZERS:
            raise ValueError(f"sanitizer {sanitizer!r}: expected 'thread', 'address' or none")
        self.sanitizer = sanitizer
        self._program = shutil.which("g++")
        if self._program is None:
            raise DeviceUnavailableError("the kernel runner needs g++ at run time: apt-get install g++")
        self._version = _run([self._program, "-v"]).stderr
        self._lock = threading.Lock()

    def scheduler(self) -> Path:
        """Return the library that runs the threads of blocks."""
        files = sorted(HEADERS.glob("*.cpp"))
        flags = [f"-DHOTROW_{self.sanitizer.upper()}_SANITIZER"] if self.sanitizer else []
        return self._library("scheduler", "".join(f'#include "{file.name}"\n' for file in files), flags)

    def kernels(self, name: str, text: str, options: Sequence[str]) -> Path:
        """Compile a kernel file's text with the headers that replace CUDA's, and return the library."""
        flags = ["-include", "cuda_cpu.h", _OWN_NAMES_FIRST, *options, *_SANITIZERS[self.sanitizer]]
        return self._library(name, text, flags)

    def _library(self, name: str, text: str, flags: Sequence[str]) -> Path:
        digest = hashlib.sha256(repr((text, [*_FLAGS, *flags], self._version)).encode())
        for header in sorted(HEADERS.iterdir()):
            digest.update(header.read_bytes())
        with self._lock:
            directory = cache_directory()
            library = directory / f"{name}-{digest.hexdigest()[:32]}.so"
            if not library.exists():
                with directory.with_suffix(".lock").open("w") as locks:  # of one byte per library
                    fcntl.lockf(locks, fcntl.LOCK_EX, 1, int.from_bytes(digest.digest()[:7]))
                    if not library.exists():
                        self._compile(text, flags, library)
            return library

    def _compile(self, text: str, flags: Sequence[str], library: Path) -> None:
        # Another process may read the library: it appears as a whole.
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / "library.so"
            command = [str(self._program), *_FLAGS, f"-I{HEADERS}", *flags, "-x", "c++", "-", "-o", str(made)]
            done = _run(command, text)
            if done.returncode:
                raise KernelError(f"{library.name.partition('-')[0]} does not compile:\n{done.stderr[:4000]}")
            made.replace(library)


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    # Do not pass on a preloaded sanitizer: the compiler would run under it too, many times slower.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(
        command, input=text, capture_output=True, encoding="utf-8", errors="replace", env=environment, check=False
    )


def cache_directory() -> Path:
    """Return ``$XDG_CACHE_HOME/hotrow/runner`` or ``~/.cache/hotrow/runner``, and create it if it does not exist.

    Raises:
        DeviceUnavailableError: it cannot be created.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "hotrow" / "runner"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise DeviceUnavailableError(
            f"the kernel runner keeps compiled kernels in {directory}, which cannot be created ({err.strerror}): "
            "set XDG_CACHE_HOME to a writable folder"
        ) from err
    return directory
