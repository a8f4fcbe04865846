"""Every planted fault can be planted: otherwise `make mutants` shows nothing."""

import shutil

import pytest

from tests.tools import mutants
from tests.tools.drawn_faults import launch_edits
from tests.tools.mutants import CUDA, ROOT, copy_sources, drawn_faults, read_faults

FAULTS = read_faults()


def test_each_fault_changes_its_source_in_exactly_one_place(tmp_path):
    copy_sources(tmp_path)

    for fault in FAULTS:
        fault.plant(tmp_path)
        assert (tmp_path / CUDA / fault.file).read_text() != (ROOT / CUDA / fault.file).read_text(), fault.name
        for name in (fault.file, "types.cuh"):
            shutil.copy(ROOT / CUDA / name, tmp_path / CUDA / name)


def test_drawn_faults_are_of_all_kinds_and_can_be_planted(tmp_path):
    copy_sources(tmp_path)
    drawn = drawn_faults(12, seed=1)

    for fault in drawn:
        fault.plant(tmp_path)

    kinds = {fault.name.partition(" at ")[0] for fault in drawn}
    assert kinds == {"comparison", "bound", "condition", "barrier", "atomic", "launch"}
    assert drawn_faults(12, seed=1) == drawn


def test_a_drawn_fault_of_a_launch_swaps_two_statements():
    text = "def write(stream):\n    hide(stream)\n    fill(stream)\n    done()\n"

    assert [edit[3] for edit in launch_edits(text)] == ["    fill(stream)\n    hide(stream)\n"]


def test_a_fault_that_no_longer_applies_is_refused(tmp_path):
    copy_sources(tmp_path)
    (tmp_path / CUDA / FAULTS[0].file).write_text("something else")

    with pytest.raises(ValueError, match="occurs 0 times, expected once"):
        FAULTS[0].plant(tmp_path)


def test_names_of_faults_are_unique():
    assert len({(fault.file, fault.name) for fault in FAULTS}) == len(FAULTS)


def test_a_fault_that_cannot_be_tried_is_reported_and_the_others_are_tried(monkeypatch):
    def try_fault(fault, limits_s):
        if fault is FAULTS[1]:
            raise ValueError("it does not compile")
        return "fixed order", "a test failed"

    monkeypatch.setattr(mutants, "try_fault", try_fault)
    records, errors = mutants.try_faults(FAULTS[:3], {})

    assert {record["fault"] for record in records} == {FAULTS[0].name, FAULTS[2].name}
    assert errors == ["it does not compile"]
