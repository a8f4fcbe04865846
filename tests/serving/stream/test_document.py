"""Run docs/updates.md: its golden bytes, and the example that reads a message without Hotrow."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from serving.stream import Kind, UpdateMessage, decode, encode

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "updates.md").read_text()
read = runpy.run_path(str(ROOT / "examples" / "read_update.py"))["read"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page's Python defines, and what it printed."""
    names = {}
    with contextlib.chdir(tmp_path_factory.mktemp("updates")), contextlib.redirect_stdout(io.StringIO()) as output:
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE):
            exec(compile(block, "updates.md", "exec"), names)
    return names, output.getvalue()


def test_the_message_has_the_bytes_that_the_page_shows(page):
    [golden] = re.findall(r"^```text\n([0-9a-f\n]+)^```$", PAGE, flags=re.MULTILINE)

    assert page[0]["payload"] == bytes.fromhex(golden)
    assert page[1].startswith("{'folder': '1'}\n")
    assert "# {'folder': '1'}\n" in PAGE


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("kind", Kind)
def test_the_reader_without_hotrow_reads_every_message(kind, dtype):
    keys = np.arange(0 if kind == Kind.BARRIER else 5)
    rows = np.linspace(-2, 3, 10, dtype=np.float32).reshape(5, 2) if kind in ("upsert", "accumulate") else None
    payload = encode(UpdateMessage(kind, "dcn", "" if kind == Kind.BARRIER else "user", keys, rows, step=3), dtype)

    header, read_keys, read_rows = read(payload)
    expected = decode(payload)

    assert (header["kind"], header["step"]) == (kind, 3)
    assert read_keys.tolist() == expected.keys.tolist()
    assert (read_rows is None) == (expected.rows is None)
    assert expected.rows is None or (read_rows == expected.rows).all()
