"""The check that compiles every kernel without a GPU refuses every faulty kernel."""

import re
import struct
from pathlib import Path

import pytest

from kernels.check_nvrtc import ARCHITECTURES, main, specialisations, usages
from kernels.errors import KernelError
from kernels.source import read_source

CUDA_TESTS = Path(__file__).parent / "cuda"


@pytest.fixture(scope="session")
def nvrtc():
    pytest.importorskip("cupy", reason="needs the extra nvrtc: make check-nvrtc installs it")


def test_a_kernel_that_compiles_passes_and_its_registers_are_printed(nvrtc, capsys):
    assert main([str(CUDA_TESTS / "scale.cu")]) == 0

    told = capsys.readouterr().out
    assert "scale.cu sm_80" in told
    assert "scale.cu sm_90" in told
    assert "scale: " in told
    assert " registers" in told


def test_a_kernel_is_compiled_for_the_architectures_named(nvrtc, capsys):
    assert main([str(CUDA_TESTS / "scale.cu"), "--architecture=75", "--architecture=90"]) == 0

    assert re.findall(r"scale.cu sm_(\d+)", capsys.readouterr().out) == ["75", "90"]


def test_an_unknown_architecture_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--architecture=70"])

    assert "invalid choice: 70 (choose from 75, 80" in capsys.readouterr().err


def test_machine_code_is_a_whole_elf_file(nvrtc):
    from kernels.cuda_compiler import compile_cubin

    code, _ = compile_cubin(read_source(CUDA_TESTS / "scale.cu").text, 90, [])

    [programs_at] = struct.unpack_from("<Q", code, 32)
    program_bytes, programs = struct.unpack_from("<HH", code, 54)
    assert len(code) == programs_at + programs * program_bytes  # its compiler puts them last


def test_a_kernel_that_spills_registers_fails(nvrtc, capsys):
    assert main([str(CUDA_TESTS / "spills.cu")]) == 1

    assert "FAILED: spills spills" in capsys.readouterr().out


def test_a_kernel_with_an_array_in_memory_fails(nvrtc, capsys, tmp_path):
    (tmp_path / "indexed.cu").write_text(
        'extern "C" __global__ void indexed(int* out, int at) {\n'
        "  int values[256];\n"
        "  for (int i = 0; i < 256; ++i) values[out[i] & 255] = i;\n"
        "  out[0] = values[at & 255];\n"
        "}\n"
    )

    assert main([str(tmp_path / "indexed.cu")]) == 1

    assert "FAILED: indexed has 1024 bytes of stack" in capsys.readouterr().out


def test_a_kernel_that_does_not_compile_fails_with_the_compilers_message(nvrtc, capsys, tmp_path):
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong(int* out) { *out = unheard_of; }\n')

    assert main([str(tmp_path / "wrong.cu")]) == 1

    assert '"unheard_of" is undefined' in capsys.readouterr().out


def test_every_specialisation_in_a_file_is_compiled(nvrtc, capsys, tmp_path):
    (tmp_path / "two.cu").write_text(
        "// Compiled with: WIDTH=1\n"
        '// Compiled with: WIDTH="not a number"\n'
        'extern "C" __global__ void two(int* out) { *out = WIDTH; }\n'
    )

    assert main([str(tmp_path / "two.cu")]) == 1

    told = capsys.readouterr().out
    assert told.count("two: ") == len(ARCHITECTURES)  # the first; the second does not compile
    assert told.count("FAILED: does not compile") == len(ARCHITECTURES)


def test_macros_are_in_shell_syntax(tmp_path):
    (tmp_path / "forms.cu").write_text('// Compiled with: KEY=i64 FORMS="FORM(0, fp32, 16) FORM(1, int8, 64)"\n')

    found = specialisations(read_source(tmp_path / "forms.cu"))

    assert found == [{"KEY": "i64", "FORMS": "FORM(0, fp32, 16) FORM(1, int8, 64)"}]


def test_an_indented_line_continues_the_line_before(tmp_path):
    (tmp_path / "long.cu").write_text(
        '// Compiled with: KEY=i64 FORMS="FORM(0, fp32, 16)\n//   FORM(1, int8, 64)"\n'
        "// Compiled with: KEY=u32\n"
        "// A word on something else.\n"
    )

    found = specialisations(read_source(tmp_path / "long.cu"))

    assert found == [{"KEY": "i64", "FORMS": "FORM(0, fp32, 16) FORM(1, int8, 64)"}, {"KEY": "u32"}]


def test_a_file_without_specialisations_uses_those_of_its_includes(tmp_path):
    (tmp_path / "key.cuh").write_text("// Compiled with: KEY=i64\n// Compiled with: KEY=u32\n")
    (tmp_path / "silent.cu").write_text('#include "key.cuh"\n')
    (tmp_path / "outspoken.cu").write_text('#include "key.cuh"\n// Compiled with: KEY=u64\n')

    assert specialisations(read_source(tmp_path / "silent.cu")) == [{"KEY": "i64"}, {"KEY": "u32"}]
    assert specialisations(read_source(tmp_path / "outspoken.cu")) == [{"KEY": "u64"}]


def test_a_macro_without_a_value_is_refused(tmp_path):
    (tmp_path / "bare.cu").write_text("// Compiled with: FAST\n")

    with pytest.raises(KernelError, match="expected NAME=value, not 'FAST'"):
        specialisations(read_source(tmp_path / "bare.cu"))


def test_the_assemblers_log_is_read():
    log = """
ptxas info    : Compiling entry function 'pool' for 'sm_90'
ptxas info    : Function properties for pool
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 16 bytes cumulative stack size
"""

    (usage,) = usages(log)

    assert (usage.kernel, usage.registers, usage.spill_bytes, usage.stack_bytes) == ("pool", 48, 12, 16)
