"""Reading a kernel's source: its includes, and the parameters of its kernels."""

import os
import subprocess
import sys

import numpy as np
import pytest

from kernels.errors import KernelError
from kernels.source import Parameter, macro_options, read_source

READ_ALL = """
import locale, sys
from pathlib import Path
from kernels.check_nvrtc import specialisations
from kernels.runner.compiler import Compiler
from kernels.source import CUDA_DIRECTORY, read_source

assert locale.getencoding() != "UTF-8"
for file in (*sorted(CUDA_DIRECTORY.glob("*.cu")), Path(sys.argv[1])):
    assert specialisations(read_source(file))
library = Compiler().kernels("arrow", read_source(sys.argv[1]).text, [])
assert "a \\u2192 b".encode() in library.read_bytes()
"""


@pytest.fixture
def read(tmp_path):
    def read(text, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.cuh").write_text(content)
        (tmp_path / "kernel.cu").write_text(text)
        return read_source(tmp_path / "kernel.cu")

    return read


def test_pointers_and_values_are_distinguished(read):
    source = read(
        'extern "C" __global__ void __launch_bounds__(256, 2)\n'
        "    probe(const Table* __restrict__ tables, float *out, Key const * const keys, u32 count, const i64 first,\n"
        "          unsigned long long seed, bool last) {}\n"
    )

    assert source.parameters("probe") == (
        Parameter("tables", None),
        Parameter("out", None),
        Parameter("keys", None),
        Parameter("count", np.dtype("u4")),
        Parameter("first", np.dtype("i8")),
        Parameter("seed", np.dtype("u8")),
        Parameter("last", np.dtype("?")),
    )


@pytest.mark.parametrize("declared", ["", "void", " "])
def test_a_kernel_may_have_no_parameters(read, declared):
    assert read(f'extern "C" __global__ void idle({declared}) {{}}').parameters("idle") == ()


def test_comments_are_not_read_as_parameters_or_kernels(read):
    source = read(
        '// extern "C" __global__ void gone(int x) {}\n'
        'extern "C" __global__ void probe(int x /* of the row, (left) */, // columns\n  float y) {}\n'
    )

    assert list(source.signatures) == ["probe"]
    assert [parameter.name for parameter in source.parameters("probe")] == ["x", "y"]


@pytest.mark.parametrize("declared", ["Table table", "Key key", "long count", "float4 value"])
def test_a_value_of_unknown_width_is_refused(read, declared):
    with pytest.raises(KernelError, match=f"kernel.cu: probe: parameter '{declared.split()[1]}' has type"):
        read(f'extern "C" __global__ void probe({declared}) {{}}')


def test_each_file_is_included_once_and_lines_keep_their_numbers(read):
    source = read(
        '#include "one.cuh"\n#include "two.cuh"\nint third_line;\n',
        one="#pragma once\nint in_one;\n",
        two='#pragma once\n#include "one.cuh"\nint in_two;\n',
    )

    assert source.text.count("int in_one;") == 1
    lines = source.text.splitlines()
    assert lines[lines.index("int third_line;") - 1] == '#line 3 "kernel.cu"'
    assert lines[lines.index("int in_two;") - 1] == '#line 3 "two.cuh"'
    assert not any("pragma once" in line for line in lines)


def test_a_missing_include_is_named_with_the_line_of_its_directive(read):
    with pytest.raises(KernelError, match=r'kernel\.cu:2: no file "nowhere\.cuh" next to it or in'):
        read('\n#include "nowhere.cuh"\n')


def test_a_missing_file_is_named():
    with pytest.raises(KernelError, match=r"no_such_kernel\.cu: No such file"):
        read_source("no_such_kernel.cu")


def test_macros_become_options_sorted_by_name():
    assert macro_options({"WIDTH": 4, "FORMS": "FORM(0, fp32, 16)"}) == ["-DFORMS=FORM(0, fp32, 16)", "-DWIDTH=4"]


def test_sources_are_utf_8_in_any_locale(tmp_path):
    # NVRTC 12.0 to 12.4 sets the codeset of a process that was started with LANG=C.UTF-8 to ASCII.
    file = tmp_path / "arrow.cu"
    file.write_text('extern "C" const char* arrow() { return "a → b"; }\n', encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "XDG_CACHE_HOME": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(file)], capture_output=True, text=True, env=os.environ | ascii_only
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
