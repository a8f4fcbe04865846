"""What a benchmark's result says of its machine."""

import pytest

from benchmarks import report

ZEN_3 = """processor\t: 0
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 vaes

processor\t: 1
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 vaes
"""
ZEN_4 = ZEN_3.replace("model\t\t: 1", "model\t\t: 17").replace("vaes", "vaes avx512f avx512_vnni")


@pytest.fixture
def told(monkeypatch):
    """Have the system tell this text of its processors."""
    return lambda text: monkeypatch.setattr(
        report, "_lines", lambda path: text.splitlines() if path == "/proc/cpuinfo" else []
    )


@pytest.mark.parametrize(
    ("text", "model", "instruction_sets"),
    [
        pytest.param(ZEN_3, "1", ["avx2"], id="without AVX-512"),
        pytest.param(ZEN_4, "17", ["avx2", "avx512_vnni", "avx512f"], id="with AVX-512"),
    ],
)
def test_two_processors_of_one_name_are_told_apart(told, text, model, instruction_sets):
    told(text)

    hardware = report.hardware()

    assert hardware["cpu"] == "AMD EPYC"
    assert (hardware["cpu_family"], hardware["cpu_model"]) == ("25", model)
    assert hardware["instruction_sets"] == instruction_sets


def test_a_system_that_tells_nothing_of_its_processor_is_no_error(told):
    told("")

    hardware = report.hardware()

    assert hardware["cpu_model"] is None
    assert hardware["instruction_sets"] == []
