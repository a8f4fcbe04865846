"""The host table under the thread, address and undefined-behaviour sanitizers: tests/kernels/host_table_stress.cpp."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "host"


def build(tmp_path_factory, sanitizer):
    """Compile the stress program; skip, with the compiler's words, where the sanitizer is not installed."""
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
    program = folder / "host_table_stress"
    sources = [
        HERE / "host_table_stress.cpp",
        *(file for file in sorted(SOURCES.glob("*.cpp")) if "nanobind" not in file.read_text()),
    ]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", *sources, "-o", program], check=True)
    return program


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def stress_program(request, tmp_path_factory):
    return build(tmp_path_factory, request.param)


@pytest.mark.slow
@pytest.mark.parametrize(("loops", "row_dtype"), [("avx2", "fp32"), ("portable", "fp32"), ("avx2", "int8")])
def test_readers_beside_writers_see_whole_rows_and_no_sanitizer_complains(stress_program, loops, row_dtype):
    command = [stress_program, "2000", loops, row_dtype]
    if shutil.which("setarch"):  # the thread sanitizer of older compilers fails on a randomised address space
        command = ["setarch", platform.machine(), "-R", *command]

    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    assert result.stdout.endswith("rows checked\n")
