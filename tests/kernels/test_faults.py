"""Every planted fault can be planted: otherwise `make mutants` shows nothing."""

import shutil

import pytest

from benchmarks import mutants
from benchmarks.mutants import read_faults
from kernels.source import CUDA_DIRECTORY

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.file}: {fault.name}" for fault in FAULTS])
def test_a_fault_changes_its_source_in_exactly_one_place(fault, tmp_path):
    shutil.copytree(CUDA_DIRECTORY, tmp_path / "cuda")

    fault.plant(tmp_path / "cuda")

    assert (tmp_path / "cuda" / fault.file).read_text() != (CUDA_DIRECTORY / fault.file).read_text()


def test_a_fault_that_no_longer_applies_is_refused(tmp_path):
    (tmp_path / FAULTS[0].file).write_text("something else")

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
