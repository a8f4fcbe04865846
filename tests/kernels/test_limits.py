"""The memory and cores of this process, as the system and made-up containers bound them."""

import os
import subprocess
import sys

import numpy as np
import pytest

from kernels import cgroups, system_memory
from kernels.errors import SharedMemoryError
from kernels.host import HostTable
from kernels.shared import SharedTable
from kernels.system_cores import usable_cores
from kernels.system_memory import available_memory_bytes, check_memory, huge_page_advice

GB = 10**9
V1 = "4:memory:/a/b\n2:cpu,cpuacct:/a/b\n1:name=systemd:/a\n"
V2 = "0::/a/b\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Call it with what the files of the system contain; the machine has 8 GB and 16 cores."""

    def make(membership="", **files):
        (tmp_path / "membership").write_text(membership)
        for name, text in {"meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n", **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(system_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return make


def v2(folder, limit, current, cache=0):
    folder, active = f"cgroup/{folder}", cache // 3
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.stat": f"anon 5\nfile {cache}\ninactive_file {cache - active}\nactive_file {active}\n",
    }


def v1(folder, limit, usage, cache=0):
    folder = f"cgroup/memory/{folder}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"cache 7\ninactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n",
    }


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        pytest.param("", {}, 8192000000, id="no container"),
        pytest.param(V2, v2("a/b", 3 * GB, GB), 2 * GB, id="version 2"),
        pytest.param(V2, v2("a/b", 3 * GB, GB, cache=GB // 2), 5 * GB // 2, id="its file cache is available"),
        pytest.param(V2, v2("a/b", "max", GB) | v2("a", 2 * GB, GB), GB, id="the limit of an outer group"),
        pytest.param(V2, v2("a/b", 2 * GB, GB) | v2("a", 3 * GB, 5 * GB // 2), GB // 2, id="the least of two limits"),
        pytest.param(V2, v2("", 3 * GB, GB), 2 * GB, id="a container that sees itself as the root"),
        pytest.param(V2, v2("a/b", 64 * GB, GB), 8192000000, id="a limit above the machine's memory"),
        pytest.param(V2, v2("a/b", GB, GB + 5), 1, id="a container that is full"),
        pytest.param(V1, v1("a/b", 3 * GB, GB), 2 * GB, id="version 1"),
        pytest.param(V1, v1("a/b", 3 * GB, GB, cache=GB // 2), 5 * GB // 2, id="version 1 and its file cache"),
        pytest.param(V1, v1("", 3 * GB, GB), 2 * GB, id="version 1 in a container that sees itself as the root"),
        pytest.param(V1, v1("a/b", 2**63 - 4096, GB), 8192000000, id="version 1 without a limit"),
        pytest.param(V2 + V1, v1("a/b", 3 * GB, GB), 2 * GB, id="both versions"),
    ],
)
def test_available_memory_is_the_least_that_system_and_container_leave(machine, membership, files, expected):
    machine(membership, **files)

    assert available_memory_bytes() == expected


def test_a_system_that_does_not_say_refuses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(system_memory, "_MEMINFO", tmp_path / "missing")
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "missing")

    assert available_memory_bytes() == 0
    check_memory(2**60)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        pytest.param("", {}, 16, id="no container"),
        pytest.param(V2, {"cgroup/a/b/cpu.max": "max 100000\n"}, 16, id="version 2 without a quota"),
        pytest.param(V2, {"cgroup/a/b/cpu.max": "250000 100000\n"}, 2, id="whole cores"),
        pytest.param(V2, {"cgroup/a/b/cpu.max": "50000 100000\n"}, 1, id="at least one"),
        pytest.param(
            V2, {"cgroup/a/b/cpu.max": "max 1\n", "cgroup/a/cpu.max": "30 10\n"}, 3, id="an outer group's quota"
        ),
        pytest.param(V2, {"cgroup/a/b/cpu.max": "9900 100\n"}, 16, id="a quota beyond the affinity"),
        pytest.param(V2, {"cgroup/cpu.max": "40 10\n"}, 4, id="a container that sees itself as the root"),
        pytest.param(
            V1,
            {"cgroup/cpu/a/b/cpu.cfs_quota_us": "200000\n", "cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n"},
            2,
            id="version 1",
        ),
        pytest.param(
            V1,
            {"cgroup/cpu/a/b/cpu.cfs_quota_us": "-1\n", "cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n"},
            16,
            id="version 1 without a quota",
        ),
    ],
)
def test_usable_cores_follow_affinity_and_quota(machine, membership, files, expected):
    machine(membership, **files)

    assert usable_cores() == expected


BOUND_TO_ONE_CORE = """
import os
os.environ.pop("HOTROW_LOOKUP_THREADS", None)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from kernels.host import lookup_threads
print(lookup_threads())
"""


def test_a_process_that_is_bound_to_one_core_uses_one_thread():
    result = subprocess.run([sys.executable, "-c", BOUND_TO_ONE_CORE], capture_output=True, text=True, timeout=120)

    assert result.stdout == "1\n", result.stderr


MOUNT = "25 24 {device} / /the/mount rw,relatime shared:3 - {kind} none rw,size=1k{option}"
REMOUNT = "mount -o remount,huge=advise /the/mount"


@pytest.mark.parametrize(
    ("setting", "kind", "option", "advice"),
    [
        pytest.param("never", "tmpfs", "", REMOUNT, id="the default"),
        pytest.param("never", "tmpfs", ",huge=never", REMOUNT, id="never"),
        pytest.param("advise", "tmpfs", "", REMOUNT, id="the setting is for other memory"),
        pytest.param("never", "tmpfs", ",huge=advise", "", id="advise"),
        pytest.param("never", "tmpfs", ",huge=within_size,inode64", "", id="within_size"),
        pytest.param("never", "tmpfs", ",huge=always", "", id="always"),
        pytest.param("deny", "tmpfs", ",huge=advise", "echo never > {setting}", id="denied for all"),
        pytest.param("force", "tmpfs", "", "", id="forced for all"),
        pytest.param("never", "ext4", "", "", id="a disk"),
        pytest.param(None, "tmpfs", "", "", id="a kernel without huge pages"),
    ],
)
def test_an_operator_reads_what_to_run_for_huge_pages(tmp_path, monkeypatch, setting, kind, option, advice):
    file, mounts, device = tmp_path / "shmem_enabled", tmp_path / "mountinfo", tmp_path.stat().st_dev
    if setting is not None:
        file.write_text("always within_size advise never deny force\n".replace(setting, f"[{setting}]"))
    ours = MOUNT.format(device=f"{os.major(device)}:{os.minor(device)}", kind=kind, option=option)
    mounts.write_text(f"{MOUNT.format(device='0:0', kind='tmpfs', option=',huge=advise')}\n{ours}\n")
    monkeypatch.setattr(system_memory, "_SHARED_HUGE_PAGES", file)
    monkeypatch.setattr(system_memory, "_MOUNTS", mounts)

    assert huge_page_advice(tmp_path) == advice.format(setting=file)


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(system_memory, "available_memory_bytes", lambda: 50_000_000)


@pytest.mark.usefixtures("little_memory")
def test_a_table_beyond_the_available_memory_is_refused_before_it_takes_any():
    needed = f"{HostTable.memory_bytes(64, 1_000_000):,}"

    with pytest.raises(MemoryError, match=f"^{needed} bytes of memory are needed, but 50,000,000 are available$"):
        HostTable(64, 1_000_000)


@pytest.mark.usefixtures("little_memory")
def test_a_table_within_the_available_memory_is_made():
    table = HostTable(64, 100_000)

    table.insert(np.array([1]), np.ones((1, 64), np.float32))
    assert len(table) == 1


@pytest.mark.usefixtures("little_memory")
def test_a_shared_table_beyond_the_available_memory_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(
        SharedMemoryError, match=r"table: [0-9,]+ bytes of memory are needed, but 50,000,000 are available$"
    ):
        SharedTable.create(tmp_path / "table", 64, 1_000_000)

    assert not list(tmp_path.iterdir())


def test_memory_that_the_system_refuses_is_named(monkeypatch):
    monkeypatch.setattr("kernels.host.check_memory", lambda _: None)

    with pytest.raises(MemoryError, match=r"^the system refused [0-9,]+ bytes of memory$"):
        HostTable(65_536, 3_500_000_000)
