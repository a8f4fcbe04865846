"""Devices by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.device import open_device
from kernels.errors import DeviceUnavailableError


@pytest.fixture
def without_cupy(monkeypatch):
    """A process in which CuPy is not installed and nobody has opened a GPU."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "kernels.cuda_device", raising=False)
    monkeypatch.setattr("kernels.device._devices", {})


@pytest.mark.parametrize(
    "name", ["", "cpu", "cuda", "cuda:", "cuda:-1", "runner:", "runner:a", "Runner", "gpu:0", "auto:0"]
)
def test_an_unknown_device_name_is_refused(name):
    with pytest.raises(ValueError, match="expected 'cuda:<index>', 'runner', 'runner:<number>' or 'auto'"):
        open_device(name)


def test_a_name_always_opens_the_same_device_in_a_process():
    assert open_device("runner") is open_device("runner:0")
    assert open_device("runner:1") is open_device("runner:1")
    assert open_device("runner") is not open_device("runner:1")
    assert [open_device(name).name for name in ("runner", "runner:1")] == ["runner", "runner:1"]


@pytest.mark.parametrize("name", ["cuda:0", "auto"])
def test_without_cupy_the_error_names_the_extras_that_install_it(without_cupy, monkeypatch, name):
    with pytest.raises(
        DeviceUnavailableError, match=r"cuda:0: CuPy cannot be used .*hotrow\[cuda13\].*hotrow\[cuda12\]"
    ):
        open_device(name)


def test_a_gpu_that_does_not_exist_is_unavailable():
    with pytest.raises(DeviceUnavailableError, match=r"cuda:99: (no usable NVIDIA driver|the machine has \d+ GPUs)"):
        open_device("cuda:99")


def test_the_file_cache_counts_as_free_memory_of_the_runner(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("kernels.system_memory._MEMINFO", meminfo)
    device = open_device("runner")

    _, total_bytes = device.memory()
    unsaid_bytes, _ = device.memory()  # a system without such a file
    meminfo.write_text("MemTotal:  3000 kB\nMemFree:  10 kB\nMemAvailable:  2000 kB\nCached:  1990 kB\n")

    assert device.memory() == (2000 * 1024, total_bytes)
    assert 0 < unsaid_bytes <= total_bytes


IN_A_FORKED_CHILD = """
import os, sys
from kernels import device
from kernels.device import open_device
from kernels.errors import DeviceUnavailableError
from tests.kernels.stub_cupy import StubGpu, stub_modules

def child(act, fork=os.fork):
    number = fork()
    if number == 0:
        try:
            os._exit(bool(act()))
        except DeviceUnavailableError as err:
            os._exit(2 if "open devices after the fork" in str(err) else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))

def fork_next_to_a_thread_that_opens_a_device():
    device._devices_lock.acquire()
    number = os.fork()
    if number:
        device._devices_lock.release()
    return number

sys.modules |= stub_modules(StubGpu())
child(lambda: open_device("cuda:0"))
runner = open_device("runner")
child(lambda: open_device("runner") not in (runner, None), fork_next_to_a_thread_that_opens_a_device)
child(lambda: open_device("runner") is open_device("runner"))
child(lambda: open_device("cuda:0"))
gpu = open_device("cuda:0")
child(lambda: open_device("cuda:0"))
child(lambda: open_device("cuda:1"))
child(lambda: open_device("runner"))
print(open_device("runner") is runner, open_device("cuda:0") is gpu)
"""


def test_a_forked_child_opens_its_own_devices_and_no_gpu_after_its_parent():
    told = subprocess.run(
        [sys.executable, "-c", IN_A_FORKED_CHILD],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert told.stdout.split() == ["1"] * 4 + ["2", "2", "1"] + ["True"] * 2, told.stderr
