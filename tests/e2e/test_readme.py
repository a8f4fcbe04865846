"""Run the README and the pages of docs as they are.

A page's first ``json`` block is its ps.json. Its ``python``, ``sh`` and ``console`` blocks run from top to bottom, in a
folder with the output of `make demo`. The printed lines are compared with the shown lines, without their numbers.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from serving import ParameterServer
from tests.tools import warm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "README.md"}
#: Pages whose examples need more than the demo's model.
OWN_TESTS = {
    "deeprec.md": "tests/training/deeprec/test_document.py",
    "embedding-tables.md": "tests/training/embedding/test_document.py",
    "gpu_cache.md": "tests/gpu_cache/test_package.py",
    "importing.md": "tests/e2e/test_importing.py",
    "models.md": "tests/training/model/test_families.py",
    "planning.md": "tests/serving/planner/test_command.py",
    "sok.md": "tests/training/sok/test_document.py",
    "tensorflow.md": "tests/tensorflow/test_page.py",
    "triton.md": "tests/e2e/test_triton.py",
}
#: What pages train on, and what tests train on: the same shape of output in a quarter of the time.
SMALLER = {
    "write_movielens_like.py ratings.parquet": "write_movielens_like.py ratings.parquet --rows 5000",
    "--synthetic 20000": "--synthetic 4000",
    "20_000": "5_000",
    "19_000": "4_750",
}
SERVED = re.compile(r"(?:127\.0\.0\.1|localhost):(8000|8001)")


def blocks(page):
    """Language and text of a page's fenced blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def shape(text):
    """Output without its numbers and its spacing."""
    numbered = re.sub(r"\d[\d,]*(\.\d+)?(e-?\d+)?", "#", text)
    return re.sub(r"\s+", " ", numbered).replace("# ]", "#]").strip()  # NumPy fills short numbers with spaces


def is_shown(shown, printed):
    """Whether the printed lines match the shown lines, where ``...`` stands for any number of lines."""
    patterns = [r"(.*\n)*?" if line == "..." else re.escape(shape(line)) + r"\n" for line in shown]
    return re.fullmatch("".join(patterns), "".join(f"{shape(line)}\n" for line in printed.splitlines())) is not None


def promised_output(code):
    """The output that a Python block shows: comments after ``print``, or below the last ``print``."""
    tail = re.search(r"(?:^# .*\n)+\Z", code, flags=re.MULTILINE)
    return [line[2:] for line in tail[0].splitlines()] if tail else re.findall(r"print\(.*\)  # (.*)", code)


def run(command, folder):
    """Return the output of a command's words; a command that fails also fails the test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    how = {"cwd": folder, "env": environment, "timeout": 250}
    if command[0] == sys.executable:
        answer = warm.run(*command[1:], **how)
    else:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert answer.returncode == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


def run_shell(text, folder):
    """Return the output of lines for a shell, which is not needed for lines of Hotrow's commands and their words."""
    printed = ""
    for is_command, lines in groupby(
        text.splitlines(), lambda line: bool(re.fullmatch(r"hotrow [^$><|\\*#]*(#.*)?", line))
    ):
        if is_command:
            words = [shlex.split(line, comments=True)[1:] for line in lines]
            printed += "".join(run([sys.executable, "-m", "serving.cli.main", *of_line], folder) for of_line in words)
        else:
            printed += run(["bash", "-e", "-c", "\n".join(lines)], folder)
    return printed


def run_python(code, folder):
    """Return the output of a Python block. A block that trains runs in this process, which has PyTorch already."""
    if not re.search("^(import torch|from training)", code, flags=re.MULTILINE):
        return run([sys.executable, "-c", "import warnings; warnings.simplefilter('error')\n" + code], folder)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "a page", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


class Reader:
    """Follows a page in a new folder."""

    def __init__(self, folder, start, demo):
        self._folder, self._start, self._demo = folder, start, demo
        self._served = None
        self._addresses = {}  # by the port that the page shows

    def follow(self, page):
        is_first = True
        for language, text in blocks(page):
            if language == "json" and is_first:
                (self._folder / "ps.json").write_text(text)
                is_first = False
            elif language == "python":
                printed = run_python(self._adapted(text), self._folder)
                promised = promised_output(text)
                assert not promised or is_shown(promised, printed), printed
            elif language == "sh":
                run_shell(text, self._folder)
            elif language == "console":
                for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.MULTILINE):
                    printed = self._at_prompt(command)
                    assert is_shown(shown.splitlines(), printed), f"{command}\n{printed}"

    def _at_prompt(self, command):
        if command == "make demo":
            return self._demo
        if command == "make demo-updates":
            return demo_of_updates(self._folder)
        if command.startswith("hotrow serve "):
            _, _, repository, *options = command.replace("8001", "0").split()
            here = [
                str(self._folder / one) if option == "--log-requests" or (self._folder / one).is_file() else one
                for option, one in pairwise(["", *options])
            ]
            if self._served is not None:
                assert self._served.stop() == 0  # two servers cannot have the port
            served = self._served = self._start(self._folder / repository, *here)
            grpc = re.search(r"gRPC on (\S+)", served.printed)
            self._addresses = {"8000": f"{served.host}:{served.port}", "8001": grpc and grpc[1]}
            return served.printed
        return run_shell(self._adapted(command), self._folder)

    def _adapted(self, text):
        for of_page, of_test in SMALLER.items():
            text = text.replace(of_page, of_test)
        return SERVED.sub(lambda found: self._addresses[found[1]], text)


def demo_of_updates(folder):
    """The output of a smaller `make demo-updates`, which leaves no process and no file."""
    temporary = folder / "temporary"
    temporary.mkdir()
    command = [str(ROOT / "examples" / "demo_updates.py"), "--samples", "4000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with warm.Warm(*command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as process:
        printed, errors = process.communicate(timeout=250)
        assert process.returncode == 0, errors
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert not list(temporary.glob("hotrow-*"))
    windows = [line.split() for line in printed.splitlines() if re.match(r" +\d", line)]
    without, updated, rows = ([float(window[column].replace(",", "")) for window in windows] for column in (2, 3, 4))
    assert (rows[0], without[0]) == (0, updated[0])  # before the first update
    assert min(rows[1:]) > 0
    assert updated[-1] > without[-1] + 0.01
    return printed


def run_warm(command, check=False):
    """``subprocess.run`` of Python's programs."""
    done = warm.run(*command[1:])
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    assert not (check and done.returncode), done
    return done


def run_demo(folder, *arguments):
    """Run the program of `make demo` in this process, and its commands without their imports; return its output."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.ExitStack() as started,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        patch.chdir(folder)
        patch.setattr("sys.argv", ["demo.py", *arguments])
        patch.setattr(subprocess, "run", run_warm)
        patch.setattr(subprocess, "Popen", lambda command, **_how: started.enter_context(warm.Warm(*command[1:])))
        try:
            runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()


@pytest.fixture(scope="module")
def demo(exporter, tmp_path_factory):
    """The folder of a smaller `make demo`, and its output; some pages that use it export a module."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, run_demo(folder, "--rows", "20000")


@pytest.mark.slow
def test_a_demo_that_fails_leaves_what_is_there(demo, tmp_path, capsys):
    shutil.copytree(demo[0] / "demo_output", tmp_path / "demo_output")
    (tmp_path / "demo_output" / "notes.txt").write_text("mine", encoding="utf-8")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    (tmp_path / "odd.txt").write_text(("7" + "\t1" * 39 + "\n") * 20)
    with pytest.raises(SystemExit, match="training failed; the line above says why"):
        run_demo(tmp_path, "--data", "odd.txt")

    assert "column label record 0: expected 0 or 1, found 7" in capsys.readouterr().err
    (tmp_path / "odd.txt").unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_demo_says_which_package_is_missing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')", encoding="utf-8")
    command = [sys.executable, str(ROOT / "examples" / "demo_updates.py")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "torch is not installed: run `make demo-updates`, which installs what this demo needs\n"


@pytest.fixture
def reader(demo, tmp_path, start):
    folder, printed = demo
    (tmp_path / "demo_output").symlink_to(folder / "demo_output")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return Reader(tmp_path, start, printed)


@pytest.mark.slow
def test_the_readme_can_be_followed(reader):
    reader.follow(README)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # other tests run the examples of three pages, on less data and for less time
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("embedding-plugin.md", "loadtests.md", "persia.md")))
        for name in sorted(PAGES.keys() - OWN_TESTS)
    ],
)
def test_a_page_can_be_followed(name, reader):
    reader.follow(PAGES[name])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_an_example_that_runs(name):
    before_first_chapter = PAGES[name].partition("\n## ")[0]
    runnable = "python|sh|console" if name not in OWN_TESTS else r"\w*"

    assert re.search(rf"^```({runnable})\n", before_first_chapter, flags=re.MULTILINE)
    assert name not in OWN_TESTS or name in (ROOT / OWN_TESTS[name]).read_text()


def test_the_configurations_shown_can_be_opened(tmp_path):
    [block] = [text for language, text in blocks(README) if language == "json"]
    tiers = json.loads(block)
    tiers["persistent_db"]["path"] = "rocksdb"
    (tmp_path / "ps.json").write_text(json.dumps(tiers))

    with ParameterServer.from_config(tmp_path / "ps.json") as server:
        assert [store.name for store in server.stores] == ["memory", "rocksdb"]


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = [README, (ROOT / "CONTRIBUTING.md").read_text(), *PAGES.values()]

    assert set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", "\n".join(pages), flags=re.MULTILINE)) <= targets


def test_the_readmes_figures_are_in_the_table_of_all_results():
    table = README.partition("\n## Speed\n")[2].partition("\n## ")[0]
    figures = re.findall(r"\b\d+\.\d+\b", table)

    assert figures
    assert set(figures) <= set(re.findall(r"\b\d+\.\d+\b", PAGES["benchmarks.md"]))


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md", "docker/README.md", *PAGES]
)
def test_every_link_has_a_target(name):
    file = ROOT / "docs" / name if name in PAGES else ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            found = file.parent / path if path else file
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


def test_the_readmes_links_are_absolute_on_a_package_index():
    told = metadata("hotrow").get_payload()

    assert "](https://github.com/hotrow/hotrow/blob/main/docs/serving.md#grpc)" in told
    assert "](https://raw.githubusercontent.com/hotrow/hotrow/main/docs/architecture.svg)" in told
    assert all("://" in target or target.startswith("#") for target in re.findall(r"\]\(([^)\s]+)\)", told))


def anchors(file):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
