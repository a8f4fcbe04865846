"""docs/tensorflow.md."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tensorflow.md").read_text()


@pytest.mark.filterwarnings("ignore")  # of the exporter of Keras
def test_the_examples_print_what_the_page_shows(fresh, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))

    exec(compile(code, "docs/tensorflow.md", "exec"), {"__name__": "page"})

    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)", code, flags=re.MULTILINE)
