"""The pages of large tables: huge where they are allowed, on all memory nodes, and taken by several threads."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

# Answers as a machine with more memory nodes, and prints what is asked of it.
NODES = r"""
#include <dlfcn.h>
#include <errno.h>
#include <linux/mempolicy.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>

long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_get_mempolicy && (a[4] & MPOL_F_MEMS_ALLOWED)) {
    ((unsigned long*)a[1])[0] = strtoul(getenv("NODES"), NULL, 16);
    return 0;
  }
  if (number == SYS_get_mempolicy && a[0]) {
    *(int*)a[0] = atoi(getenv("POLICY"));
    return 0;
  }
  if (number == SYS_mbind && a[2] == MPOL_INTERLEAVE) {  // NumPy's OpenBLAS asks for another policy
    fprintf(stderr, "%s spread over nodes %lx\n", a[1] > 8 << 20 ? "rows" : "index", *(unsigned long*)a[3]);
    errno = EPERM;
    return -1;
  }
  static long (*next)(long, ...);
  if (!next) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""

MAKE_TABLE = """
import numpy as np
from kernels.host import HostTable
table = HostTable(32, 100_000)
table.insert(np.arange(10), np.ones((10, 32), np.float32))
print(len(table))
"""


@pytest.fixture(scope="module")
def many_nodes(tmp_path_factory):
    if not sys.platform.startswith("linux") or shutil.which("gcc") is None:
        pytest.skip("needs Linux and gcc")
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "nodes.c").write_text("#define _GNU_SOURCE\n" + NODES)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "nodes.c", "-o", folder / "nodes.so", "-ldl"], check=True)
    return folder / "nodes.so"


@pytest.mark.parametrize(
    ("nodes", "policy", "expected"),
    [
        pytest.param("b", 0, ["index spread over nodes b", "rows spread over nodes b"], id="three nodes"),
        pytest.param("2", 0, [], id="one node"),
        pytest.param("3", 2, [], id="a policy that the operator chose"),
    ],
)
def test_a_large_table_is_spread_over_the_nodes_and_works_if_the_system_refuses(many_nodes, nodes, policy, expected):
    made = subprocess.run(
        [sys.executable, "-c", MAKE_TABLE],
        env={**os.environ, "LD_PRELOAD": str(many_nodes), "NODES": nodes, "POLICY": str(policy)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert made.stdout == "10\n", made.stderr
    assert made.stderr.splitlines() == expected


TAKE_PAGES = """
import os
from pathlib import Path
from kernels.host import HostTable, set_lookup_threads
set_lookup_threads(3)
HostTable(32, 1000)
small = len(os.listdir("/proc/self/task"))
table = HostTable(32, 1_000_000)
taken = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
print(len(os.listdir("/proc/self/task")) - small, taken > table.stats().memory_bytes)
"""


def test_the_pages_of_a_large_table_are_taken_at_once_by_several_threads():
    made = subprocess.run([sys.executable, "-c", TAKE_PAGES], capture_output=True, text=True, timeout=120)

    assert made.stdout == "2 True\n", made.stderr


SHARE_TABLE = """
import re, sys
import numpy as np
from kernels.shared import SharedTable

def huge_bytes(of):
    parts = open("/proc/self/smaps").read().split(of)
    return sum(1024 * int(re.search(r"ShmemPmdMapped: +([0-9]+) kB", part)[1]) for part in parts[1:])

table = SharedTable.create(sys.argv[1], 32, 100_000)
keys, rows = np.arange(100_000), np.random.default_rng(0).random((100_000, 32), dtype=np.float32)
table.insert(keys, rows)
of_writer = huge_bytes(sys.argv[1])
attached = SharedTable.attach(sys.argv[1], writes=False)
out = np.empty_like(rows)
assert attached.fetch(keys, out).all() and (out == rows).all()
size = table.stats().memory_bytes
print(of_writer >= size, huge_bytes(sys.argv[1]) >= 2 * size)
"""


@pytest.mark.parametrize(("option", "is_huge"), [("never", False), ("advise", True), ("within_size", True)])
def test_shared_memory_has_huge_pages_where_its_file_system_allows_them(tmp_path, option, is_huge):
    mount = f"mount -t tmpfs -o huge={option},size=256m none {tmp_path}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "sh", "-c", mount]).returncode:
        pytest.skip("this user cannot mount a file system, or the kernel has no huge pages in memory files")
    share = f'{mount} && exec "$0" -c "$1" {tmp_path}/table'

    shared = subprocess.run(
        ["unshare", "-m", "sh", "-c", share, sys.executable, textwrap.dedent(SHARE_TABLE)],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert shared.stdout == f"{is_huge} {is_huge}\n", shared.stderr
