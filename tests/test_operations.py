"""docs/operations.md has a section for each alert, and a row for each WARNING and ERROR line of the server."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load((ROOT / "docker" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
LISTS = re.findall(r"^### (ERROR|WARNING) lines\n\n((?:[- ] .*\n)+)", PAGE, re.MULTILINE)
#: Entries of the lists: the level and the line, where "…" stands for what differs.
ROWS = [(level, line) for level, rows in LISTS for line in re.findall(r"^- ``? ?(.+?) ?``?: ", rows, re.MULTILINE)]
LEVELS = dict.fromkeys(["warning", "warn", "_warn"], "WARNING") | dict.fromkeys(
    ["error", "exception", "critical"], "ERROR"
)
OTHER_COMMANDS = ("importers", "planner", "dumps", "sources")
#: The rows of calls whose text other code made, by file.
MADE_ELSEWHERE = {
    "serving/lookup/cached_session.py": [
        "model …: refresh_delay and refresh_interval have no effect without a cache_refresh_percentage_per_iteration",
        "model …: gpucacheper 1 does not hold whole tables: …",
    ],
    "serving/parameter_server/opening.py": [
        "…: no effect: …",
        "persistent_db.catch_up_interval_ms: rows in RAM stay as they were loaded, …",
    ],
    "serving/storage/redis/filling.py": ["table …: … holds rows that Hotrow did not load; …"],
    "serving/storage/rocksdb/table.py": [
        "table …: … holds rows that Hotrow did not load; …",
        "…; its keys are unknown until it is back",
        "…; the table stays as it was",
    ],
    "serving/storage/memory.py": ["memory: table … has no room in RAM, so none of its rows are kept there; …"],
    "serving/repository/repository.py": ["worker …: …"],
}
SHORT = 8  # a line with fewer fixed letters says little


def fixed(line):
    """How many letters of a line are always the same."""
    return len(re.sub(r"[^A-Za-z]", "", line))


def text_of(node):
    """The text of a call's first argument, with "…" for what differs."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[-,.0-9]*[a-zA-Z]", "…", str(node.value)).replace("%%", "%")
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return "…"


@cache
def nodes():
    """The syntax of each file of the server."""
    files = sorted((ROOT / "serving").rglob("*.py"))
    return {file.relative_to(ROOT): list(ast.walk(ast.parse(file.read_text()))) for file in files}


def logged_lines():
    """Each line that the server may log: its file, its level and its text."""
    for path, of_file in nodes().items():
        if path.parts[1] in OTHER_COMMANDS:
            continue
        for node in of_file:
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
            if is_call and node.func.attr in LEVELS:
                logger = ast.unparse(node.func.value)
                if node.func.attr in {"warn", "_warn"} or logger.rpartition(".")[2] in {"_log", "logger"}:
                    yield str(path), LEVELS[node.func.attr], text_of(node.args[0])


def has_row(path, level, line):
    """Whether a row says this line; a row may leave out the line's end."""
    rows = {row for of_row, row in ROWS if of_row == level}
    if line in rows:
        return True
    if fixed(line) < SHORT:
        return set(MADE_ELSEWHERE.get(path, ["absent"])) <= rows
    return any(re.match(re.escape(row).replace("…", ".*"), line) for row in rows if fixed(row) >= SHORT)


@pytest.fixture(scope="module")
def lines():
    return sorted(set(logged_lines()))


def test_the_server_logs_lines_and_the_page_has_rows(lines):
    assert len(lines) > 80
    assert len(ROWS) > 80


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_section(alert):
    assert PAGE.count(f"\n### {alert}\n") == 1


def test_every_section_of_an_alert_is_of_an_alert():
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == set(ALERTS)


def test_every_warning_and_error_of_the_server_has_a_row(lines):
    assert [line for line in lines if not has_row(*line)] == []


def test_every_row_is_of_a_line_that_the_code_has():
    source = "".join(
        node.value
        for of_file in nodes().values()
        for node in of_file
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    source = re.sub(r"%[-,.0-9]*[a-zA-Z]", "…", source).replace("%%", "%")

    def is_in_source(row):
        return max(row.split("…"), key=len).strip(" ;:") in source

    assert [row for _, row in ROWS if not is_in_source(row)] == []


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_template_fits_githubs_schema(name):
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())

    assert form.keys() == {"name", "description", "labels", "body"}
    for field in form["body"]:
        assert field["type"] in {"input", "textarea"}
        assert field["attributes"].keys() <= {"label", "description", "render"}
    assert any(field.get("validations", {}).get("required") for field in form["body"])
