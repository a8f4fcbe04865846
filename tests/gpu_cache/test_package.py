"""The package's exports, and the examples of its documentation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_cache

PAGE = (Path(__file__).parents[2] / "docs" / "gpu_cache.md").read_text()


@pytest.mark.usefixtures("runner")
def test_the_example_of_the_documentation_prints_what_it_shows(capsys):
    [example] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)

    exec(compile(example, "docs/gpu_cache.md", "exec"), {})

    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", example)


def test_every_exported_name_exists():
    assert all(hasattr(gpu_cache, name) for name in gpu_cache.__all__)


def test_importing_the_package_does_not_import_cupy():
    script = "import sys, gpu_cache; sys.exit('cupy' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
