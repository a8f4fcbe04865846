"""In what precision a GPU multiplies the matrices of a dense network, as configurations say it."""

from pydantic import AfterValidator, ValidationInfo

from serving.dense.device_arithmetic import Precision

_HALF_KEYS = ("use_mixed_precision", "mixed_precision")


def _beside_no_half(is_tf32: bool, info: ValidationInfo) -> bool:
    said = next((key for key in _HALF_KEYS if info.data.get(key)), None)
    if is_tf32 and said is not None:
        raise ValueError(f"true, but {said} asks for half precision, and TF32 is of products of float32: expected one")
    return is_tf32


ONE_PRECISION = AfterValidator(_beside_no_half)
"""Refuses an ``enable_tf32_compute`` beside keys, which stand before it, that ask for half precision."""


def precision_of(is_half: bool, is_tf32: bool) -> Precision:
    """The precision of a network's products; not both are true."""
    return "fp16" if is_half else "tf32" if is_tf32 else "fp32"
