"""Fixtures for the tests of the host kernels."""

import pytest

from kernels import _host


@pytest.fixture(params=["avx2", "portable"], scope="module")
def reading_loops(request):
    """Run every test of a module with both compilations of the reading loops."""
    before = _host.instruction_set()
    if _host.use_avx2(request.param == "avx2") != (request.param == "avx2"):
        pytest.skip("this CPU has no AVX2")
    yield request.param
    _host.use_avx2(before == "avx2")
