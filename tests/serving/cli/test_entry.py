"""Ctrl-C while `hotrow` still imports its packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.tiny_model import TinyModel

ROOT = Path(__file__).parents[3]

# Python asks this finder first for every module. At the named module it sends SIGINT.
PROGRAM = """
import signal, sys

interrupted = sys.argv.pop()


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            {interrupt}


sys.meta_path.insert(0, Finder())
from serving.cli.entry import run

sys.exit(run())
"""
INTERRUPT = "signal.raise_signal(signal.SIGINT)"
TURNED = f"""
            try:
                {INTERRUPT}
            except KeyboardInterrupt:
                raise AttributeError("module has no attribute 'capi'") from None
"""
FAULTY = "raise AttributeError('a fault of its own')"


def run(program, module, *arguments):
    command = [sys.executable, "-c", PROGRAM.format(interrupt=program), *map(str, arguments), module]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("interrupt", [INTERRUPT, TURNED], ids=["as it comes", "made another error by a package"])
@pytest.mark.parametrize(
    "module",
    [
        "serving.cli.main",
        "numpy",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("kernels.errors", "serving.cli.serve", "uvicorn")),
    ],
)
def test_it_ends_with_130_and_without_a_traceback(tmp_path, module, interrupt):
    TinyModel().write(tmp_path)

    done = run(interrupt, module, "serve", tmp_path, "--http-port", "0")

    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr in ("", "hotrow serve: interrupted\n")


def test_an_error_without_ctrl_c_is_raised(tmp_path):
    done = run(FAULTY, "serving.cli.serve", "serve", tmp_path)

    assert done.returncode == 1
    assert "a fault of its own" in done.stderr


def test_the_exit_code_of_the_command_is_passed_on(tmp_path):
    done = run(FAULTY, "nothing", "check", tmp_path / "none")

    assert done.returncode == 1
    assert done.stderr.startswith("hotrow check: ")
