"""The host table, its threads, snapshots and features under the thread, address and undefined-behaviour sanitizers."""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "host"
FOLDERS = ("features", "lookup", "memory", "rows", "snapshot", "table")  # what the stress programs use
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fno-sanitize-recover=all", "-DHOTROW_ANY_DIM_LOOPS_ONLY"]

pytestmark = [pytest.mark.slow, pytest.mark.sanitizers]


class Compiler:
    """Makes stress programs for some sanitizers; Hotrow's own sources are compiled once for all of them."""

    def __init__(self, sanitizers, folder):
        """Skip with the compiler's message if the sanitizer is not installed."""
        program = shutil.which("g++")
        if program is None:
            pytest.skip("no g++")
        self._command = [program, *FLAGS, *sanitizers, f"-I{SOURCES}"]
        self._folder = folder
        probe = folder / "probe.cpp"
        probe.write_text("int main() {}\n")
        able = subprocess.run([*self._command, probe, "-o", folder / "probe"], capture_output=True, text=True)
        if able.returncode:
            pytest.skip(f"g++ cannot build with {sanitizers[0]}: {able.stderr.strip()[-200:]}")
        files = [file for name in FOLDERS for file in sorted((SOURCES / name).glob("*.cpp"))]
        files = [file for file in files if "nanobind" not in file.read_text()]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            self._objects = list(threads.map(self._compiled, files))

    def stress_program(self, name):
        """Compile and link the program of that name next to this file."""
        program = self._folder / name
        subprocess.run([*self._command, HERE / f"{name}.cpp", *self._objects, "-o", program], check=True)
        return program

    def _compiled(self, source):
        compiled = self._folder / f"{source.stem}.o"
        subprocess.run([*self._command, "-c", source, "-o", compiled], check=True)
        return compiled


def run(*command):
    if shutil.which("setarch"):  # the thread sanitizer of older compilers fails on a randomised address space
        command = ["setarch", platform.machine(), "-R", *command]
    return subprocess.run(command, capture_output=True, text=True)


# The checks left out take half of the compiler's time, and AddressSanitizer stops at the same wrong accesses.
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize=null,object-size,pointer-overflow"]


@pytest.fixture(scope="module", params=[["-fsanitize=thread"], ADDRESS], ids=["thread", "address"])
def compiler(request, tmp_path_factory):
    return Compiler(request.param, tmp_path_factory.mktemp("stress"))


@pytest.fixture(scope="module")
def table_stress(compiler):
    return compiler.stress_program("host_table_stress")


@pytest.mark.parametrize(("loops", "row_dtype"), [("avx2", "fp32"), ("portable", "fp32"), ("avx2", "int8")])
def test_readers_see_whole_rows_during_writes_and_no_sanitizer_complains(table_stress, loops, row_dtype):
    result = run(table_stress, "1000", loops, row_dtype)

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout.endswith("rows checked\n")


def test_a_pool_that_changes_its_size_runs_every_chunk_once(compiler):
    result = run(compiler.stress_program("core_pool_stress"), "1000")

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout.endswith(" jobs\n")


def test_readers_of_a_truncated_snapshot_see_its_rows_or_an_error(compiler, tmp_path):
    result = run(compiler.stress_program("snapshot_stress"), "1000", tmp_path / "t.snapshot")

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout.endswith(" rows checked\n")


def test_features_read_nothing_outside_of_their_values(compiler, tmp_path):
    result = run(compiler.stress_program("features_stress"), "20", tmp_path / "vocabulary")

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout == "20 rounds\n"
