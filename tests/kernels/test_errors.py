"""The attributes of the lowest layer's errors."""

import pickle

import pytest

from kernels.errors import ReservedKeyError, RowValueError, TableFullError


@pytest.mark.parametrize(
    "error",
    [ReservedKeyError(-(2**63), 3), RowValueError("fp16", 70000.0, 3, 1, 17), TableFullError(10, 9, 2)],
    ids=lambda e: type(e).__name__,
)
def test_an_error_can_be_pickled(error):
    arrived = pickle.loads(pickle.dumps(error))

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
