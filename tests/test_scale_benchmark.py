"""The benchmark of table sizes runs, and its figures are what they are said to be."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import scale


def test_the_quick_form_measures_every_case(tmp_path):
    command = [sys.executable, "-m", "benchmarks.scale", "--quick", "--json", tmp_path / "out.json"]
    subprocess.run([*command, "--folder", tmp_path], check=True, stdout=subprocess.DEVNULL)

    records = json.loads((tmp_path / "out.json").read_text())["records"]
    names = [record["name"] for record in records]
    assert {name: names.count(name) for name in names} == {
        "scale.start": 2,
        "scale.memory": 2,
        "scale.huge_pages": 2,
        "scale.lookup": 2,
        "scale.gather": 2,
        "scale.slope": 2,
        "scale.beyond_ram.start": 1,
        "scale.beyond_ram.lookup": 4,
        "scale.beyond_ram.memory": 1,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("available", "reason"),
    [(2**40, r"of files, .* are free"), (2**30, r"takes 3\d\.\d GiB of RAM, 1\.0 are available")],
)
def test_what_does_not_fit_is_left_out_with_the_reason(tmp_path, monkeypatch, available, reason):
    monkeypatch.setattr(scale, "available_bytes", lambda: available)

    assert re.search(reason, scale.why_not(tmp_path, 128, 30_000_000))


def test_no_two_rows_have_one_key():
    keys = scale.keys_of(0, 3_000_000)

    assert len(set(keys.tolist())) == keys.size
    assert set(scale.keys_of_numbers(scale.numbers_at_random(1000, 1)).ravel().tolist()) <= set(keys[:1000].tolist())
