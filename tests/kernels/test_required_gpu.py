"""`make test-gpu` cannot pass by skipping."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = "def test_a(): pass\n"
SKIPS = {
    "a test and a fixture": "import pytest\n\n"
    "def test_b(): pytest.skip('no GPU for a test')\n\n"
    "@pytest.fixture\ndef gpu(): pytest.skip('no GPU for a fixture')\n\ndef test_c(gpu): pass\n",
    "a module": "import pytest\n\npytest.skip('no GPU for a module', allow_module_level=True)\n",
}


def run_tests(folder, source, required):
    (folder / "test_some.py").write_text(PASSES)
    (folder / "test_more.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if name != "HOTROW_REQUIRE_GPU"}
    environment |= {"HOTROW_REQUIRE_GPU": "1"} if required else {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", folder]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS)
def test_a_skip_is_a_failure_if_a_gpu_is_required(tmp_path, source):
    assert run_tests(tmp_path, source, required=False).returncode == 0

    required = run_tests(tmp_path, source, required=True)

    assert required.returncode != 0
    for skipped in source.split("skip('")[1:]:
        assert skipped.partition("'")[0] in required.stdout


@pytest.mark.long
def test_without_a_skip_a_required_gpu_changes_nothing(tmp_path):
    assert run_tests(tmp_path, PASSES, required=True).returncode == 0


def make(*arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_without_a_gpu_make_test_gpu_stops_with_one_line_before_it_installs_anything(tmp_path):
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is an NVIDIA driver")
    except OSError:
        code, lines = make("test-gpu", f"VENV={tmp_path / 'venv'}")

    assert (code, len(lines)) == (2, 1)
    assert "needs an NVIDIA GPU and its driver" in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("python", "why"), [(f"{sys.executable} -S", "No module named 'numpy'"), ("no-python", "not found")]
)
def test_a_python_without_the_packages_of_the_gpu_tests_gets_one_line(python, why):
    code, lines = make("gpu-python", f"GPU_PYTHON={python}")

    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"'{python}' needs NumPy, CuPy, pytest and Hotrow itself")
    assert why in lines[0]
