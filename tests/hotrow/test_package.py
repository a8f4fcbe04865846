"""The package ``hotrow``: its names, and what it says where Python cannot find its parts."""

import ast
import os
import re
import subprocess
import sys
from inspect import getsource
from pathlib import Path

import pytest

import hotrow

ROOT = Path(__file__).parents[2]
PUBLIC = [
    "CreateEmbeddingCache",
    "CreateParameterServer",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCache",
    "EmbeddingCollection",
    "InferenceSession",
    "LookupSession",
    "ModelConfig",
    "ParameterServer",
    "TableConfig",
    "__version__",
    "dump_table",
    "errors",
    "from_keras",
    "from_torch",
    "load_model",
    "load_table",
    "open_snapshot",
    "optimizers",
    "plan_import",
    "read_batch",
    "write_model",
]


def python(*arguments, folder=ROOT):
    """Run Python in a folder that comes before Hotrow in Python's path."""
    # -S: an editable install of Hotrow would come first otherwise.
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_public_names_are_there_with_their_docstrings():
    assert dir(hotrow) == hotrow.__all__ == PUBLIC
    assert all(getattr(hotrow, name).__doc__ for name in ["__doc__", *PUBLIC])
    assert re.fullmatch(r"\d+(\.\d+)*", hotrow.__version__)
    assert not hasattr(hotrow, "load_everything")


def test_a_type_checker_sees_every_public_name():
    [block] = [node for node in ast.parse(getsource(hotrow)).body if isinstance(node, ast.If)]
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    declared = [node.target.id for node in block.body if isinstance(node, ast.AnnAssign)]

    assert sorted([*imported, *declared]) == PUBLIC
    assert (ROOT / "hotrow" / "py.typed").is_file()


def test_importing_the_package_and_listing_its_names_imports_no_other_package():
    code = "import sys; before = set(sys.modules); import hotrow; dir(hotrow); print(set(sys.modules) - before)"

    imported = ast.literal_eval(python("-c", code).stdout)

    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"hotrow"}


def test_a_name_that_needs_pytorch_says_so_without_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("training")]:
        monkeypatch.delitem(sys.modules, name)

    expected = r"hotrow\.EmbeddingBagCollection needs the package 'torch': pip install 'hotrow\[train\]'"
    with pytest.raises(hotrow.errors.MissingExtraError, match=expected):
        _ = hotrow.EmbeddingBagCollection


def test_it_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "hotrow", "--version"], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, f"hotrow {hotrow.__version__}\n")


@pytest.mark.parametrize("name", ["kernels", "gpu_cache", "serving", "training"])
@pytest.mark.parametrize("file", ["{}/__init__.py", "{}.py"])
def test_another_projects_package_of_the_same_name_is_recognized_and_not_imported(tmp_path, name, file):
    foreign = tmp_path / file.format(name)
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('imported')", encoding="utf-8")
    expected = (
        f"{foreign} belongs to another project and hides Hotrow's package '{name}': "
        "rename it, or give Hotrow an environment of its own\n"
    )

    command = python("-m", "hotrow", "--version", folder=tmp_path)
    program = python("-c", "from hotrow import load_model", folder=tmp_path)

    assert (command.returncode, command.stdout, command.stderr) == (2, "", f"hotrow: {expected}")
    assert program.stderr.endswith(f"\nImportError: {expected}")


@pytest.mark.parametrize("is_empty", [False, True], ids=["no folder", "an empty folder"])
def test_a_package_that_is_missing_is_reported(tmp_path, is_empty):
    (tmp_path / "hotrow").symlink_to(ROOT / "hotrow")
    if is_empty:
        (tmp_path / "kernels").mkdir()  # as `pip uninstall` of another project's package leaves it

    done = subprocess.run(
        [sys.executable, "-S", "-m", "hotrow"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr == "hotrow: Hotrow's package 'kernels' is not installed: pip install --force-reinstall hotrow\n"


@pytest.mark.parametrize("program", ["import hotrow; hotrow.load_model", "import serving; serving.load_model"])
def test_a_source_folder_without_the_extension_says_how_to_build_it(tmp_path, program):
    for name in ("hotrow", "gpu_cache", "serving", "training"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "kernels").mkdir()
    for name in ("__init__.py", "errors.py"):
        (tmp_path / "kernels" / name).symlink_to(ROOT / "kernels" / name)
    expected = (
        f"{tmp_path} has Hotrow's sources but no C++ extension for Python 3.{sys.version_info.minor}: "
        "run `pip install -e .` there, or run Python in another folder\n"
    )

    command = python("-m", "hotrow", "serve", folder=tmp_path)
    imported = python("-c", program, folder=tmp_path)

    assert (command.returncode, command.stderr) == (2, f"hotrow: {expected}")
    assert imported.stderr.endswith(f"ImportError: {expected}")
