"""The host table, its threads and snapshots under the thread, address and undefined-behaviour sanitizers."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "host"


def build(tmp_path_factory, sanitizer, name, kernels="*.cpp"):
    """Compile a stress program; skip, with the compiler's words, where the sanitizer is not installed."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("stress")
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-pthread",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        "-DHOTROW_ANY_DIM_LOOPS_ONLY",
    ]
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    able = subprocess.run([compiler, *flags, probe, "-o", folder / "probe"], capture_output=True, text=True)
    if able.returncode:
        pytest.skip(f"g++ cannot build with -fsanitize={sanitizer}: {able.stderr.strip()[-200:]}")
    program = folder / name
    files = [
        HERE / f"{name}.cpp",
        *(file for file in sorted(SOURCES.glob(kernels)) if "nanobind" not in file.read_text()),
    ]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", *files, "-o", program], check=True)
    return program


def run(*command):
    if shutil.which("setarch"):  # the thread sanitizer of older compilers fails on a randomised address space
        command = ["setarch", platform.machine(), "-R", *command]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def stress_program(request, tmp_path_factory):
    return build(tmp_path_factory, request.param, "host_table_stress")


@pytest.mark.slow
@pytest.mark.parametrize(("loops", "row_dtype"), [("avx2", "fp32"), ("portable", "fp32"), ("avx2", "int8")])
def test_readers_beside_writers_see_whole_rows_and_no_sanitizer_complains(stress_program, loops, row_dtype):
    result = run(stress_program, "2000", loops, row_dtype)

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout.endswith("rows checked\n")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_callers_of_a_pool_that_changes_its_size_get_every_chunk_done_once(tmp_path_factory, sanitizer):
    program = build(tmp_path_factory, sanitizer, "core_pool_stress", "core_pool.cpp")

    result = run(program, "1000")

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout.endswith(" jobs\n")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_readers_of_a_snapshot_that_is_cut_short_see_its_rows_or_an_error(tmp_path_factory, tmp_path, sanitizer):
    program = build(tmp_path_factory, sanitizer, "snapshot_stress")

    result = run(program, "1000", tmp_path / "t.snapshot")

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout.endswith(" rows checked\n")
