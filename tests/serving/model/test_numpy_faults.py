"""The errors that NumPy raises for impossible headers."""

import io

import numpy as np
import pytest

from serving.model.numpy_faults import UNREADABLE

TYPES = [
    "()",
    "('f4',)",
    "[('a', [('b', ())])]",
    "[()]",
    "{1: 2}",
    "'f4,,'",
    "None",
    "('f4', -1)",
    "'M8[x]'",
    "[",
    "'O'",
]


@pytest.mark.parametrize("shape", ["(1,)", "(-1,)", f"({2**70},)", "(True, 4)"])
@pytest.mark.parametrize("dtype", TYPES)
def test_an_impossible_header_is_a_known_fault(dtype, shape):
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)

    with pytest.raises(UNREADABLE):
        np.load(io.BytesIO(content), allow_pickle=False)
