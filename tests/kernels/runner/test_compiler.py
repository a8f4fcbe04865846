"""g++ and the cache of compiled libraries."""

import os
from contextlib import ExitStack

import numpy as np
import pytest

from kernels.errors import DeviceUnavailableError, KernelError
from kernels.runner.compiler import Compiler, cache_directory
from tests.tools.warm import Warm


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Compiler()


def test_the_users_cache_keeps_libraries_by_content(compiler, tmp_path):
    first = compiler.kernels("one", "int f() { return 1; }", ["-DX=1"])
    again = compiler.kernels("one", "int f() { return 1; }", ["-DX=1"])
    others = {
        compiler.kernels("one", "int f() { return 2; }", ["-DX=1"]),
        compiler.kernels("one", "int f() { return 1; }", ["-DX=2"]),
    }

    assert first == again
    assert first.parent == tmp_path / "hotrow" / "runner"
    assert len(others - {first}) == 2


def test_a_library_in_the_cache_is_not_compiled_again(compiler):
    library = compiler.kernels("one", "int f() { return 1; }", [])
    library.write_bytes(b"left alone")

    assert compiler.kernels("one", "int f() { return 1; }", []).read_bytes() == b"left alone"


def test_processes_that_need_the_same_library_compile_it_once(compiler, tmp_path, monkeypatch):
    (tmp_path / "g++").write_text(f'#!/bin/sh\necho >> {tmp_path}/calls\nPATH={os.environ["PATH"]} exec g++ "$@"\n')
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = "from kernels.runner.compiler import Compiler; Compiler().kernels('one', 'int f() { return 1; }', [])"

    with ExitStack() as stack:
        processes = [stack.enter_context(Warm("-c", program)) for _ in range(3)]
        outputs = [process.communicate(timeout=60) for process in processes]

    assert [process.returncode for process in processes] == [0] * 3, outputs
    calls = (tmp_path / "calls").read_text().count("\n")
    assert calls == 3 + 1  # each asks for the version


def test_only_finished_libraries_stay_in_the_cache(compiler):
    compiler.kernels("good", "int f() { return 1; }", [])
    with pytest.raises(KernelError, match="bad does not compile"):
        compiler.kernels("bad", "int f() { return }", [])

    assert [file.name.partition("-")[0] for file in cache_directory().iterdir()] == ["good"]


def test_without_gpp_the_runner_is_unavailable_and_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(DeviceUnavailableError, match="needs g\\+\\+ at run time: apt-get install g\\+\\+"):
        Compiler()


def test_a_cache_directory_that_cannot_be_created_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with pytest.raises(DeviceUnavailableError, match="set XDG_CACHE_HOME to a writable folder"):
        cache_directory()


def test_a_kernel_runs_even_if_a_function_of_the_c_library_has_its_name(runner, tmp_path):
    file = tmp_path / "named.cu"
    file.write_text('extern "C" __global__ void getpid(int* out) { out[0] = 7; }\n')
    out = runner.zeros(1, np.int32)
    stream = runner.stream()

    runner.kernel(file, "getpid")((1,), (1,), [out], stream)

    stream.synchronize()
    assert runner.to_host(out).tolist() == [7]


def test_an_unknown_sanitizer_is_refused():
    with pytest.raises(ValueError, match="sanitizer 'memory': expected 'thread', 'address' or none"):
        Compiler("memory")
