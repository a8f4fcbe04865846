"""Settings of all tests, and fixtures for tests of devices.

`make test-gpu` sets HOTROW_REQUIRE_GPU. Then a skipped test fails, unless only its real data is absent.
"""

import functools
import gc
import os
from pkgutil import resolve_name

import pytest
from hypothesis import HealthCheck, settings

from kernels.device import open_device
from kernels.errors import DeviceUnavailableError
from tests.tools import warm

# The time that a machine takes for an example says nothing about the tested code. Each run draws other examples.
settings.register_profile("any machine", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# Nor may a server that a test starts refuse a request because the machine is busy.
os.environ["HOTROW_MAX_QUEUE_WAIT_MS"] = "60000"
# To start the threads of NumPy's BLAS takes as long as to import NumPy, in each of the processes that tests start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# PyTorch's threads spin while they wait for each other, and several are slower on tiny products. One is deterministic.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure():
    """Have one process that forks for the processes of ``pytest -n``."""
    warm.start_server()


def pytest_unconfigure():
    warm.end_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Keep modules and tests out of the garbage collector's walks, which would take a third of a second each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Mark the tests of PyTorch's exporter."""
    for item in items:
        if "exporter" in getattr(item, "fixturenames", ()):
            item.add_marker("exporter")


@pytest.fixture(scope="session")
def exporter():
    """PyTorch's exporter lists its operators once, not for each export, which would take half of the export's time."""
    of_onnx = "torch.onnx._internal.exporter._registration.ONNXRegistry.from_torchlib"
    of_pytorch = "torch._export.utils._materialize_cpp_cia_ops"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_onnx, staticmethod(functools.cache(resolve_name(of_onnx))))
        patch.setattr(of_pytorch, functools.cache(resolve_name(of_pytorch)))
        yield


@pytest.fixture(scope="session", autouse=True)
def known_cache_seeds():
    """Make caches place keys the same way in every run, so a failure can be repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_cache.embedding_cache.randbits", lambda bits: 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Keep what a module leaves in memory out of later walks, too: some tests and loads of models collect garbage."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["runner", pytest.param("cuda:0", marks=pytest.mark.gpu)], scope="session")
def device(request):
    """Every device of this machine; a missing device is a skip with its reason, never a pass."""
    try:
        return open_device(request.param)
    except DeviceUnavailableError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="session")
def runner():
    """The CPU runner, for tests of behaviour that only the runner shows."""
    try:
        return open_device("runner")
    except DeviceUnavailableError as err:
        pytest.skip(str(err))


def refuse_skip(report):
    if report.skipped and os.environ.get("HOTROW_REQUIRE_GPU") and "HOTROW_TEST_DATA" not in str(report.longrepr):
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return refuse_skip((yield))
