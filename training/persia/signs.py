"""Signs: the uint64 numbers that name rows. They become the keys of a table, and decide which server has a row."""

import numpy as np
from numpy.typing import NDArray

from training.persia.config import Feature

Signs = NDArray[np.uint64]
Keys = NDArray[np.int64]

_K2 = np.uint64(0x9AE16A3B2F90404F)
_MULTIPLIER = np.uint64(0x9AE16A3B2F90404F + 16)
#: Keys are signed. With this shift no key is one of the four that tables reserve; see ``EmbeddingConfig``.
_SHIFT = np.uint64(1 << 63)


def farmhash64(signs: Signs) -> Signs:
    """Return FarmHash's 64-bit hash of the eight little-endian bytes of each sign."""
    a = signs + _K2
    c = _rotated(signs, 37) * _MULTIPLIER + a
    d = (_rotated(a, 25) + signs) * _MULTIPLIER
    c = (c ^ d) * _MULTIPLIER
    c ^= c >> np.uint64(47)
    d = (d ^ c) * _MULTIPLIER
    d ^= d >> np.uint64(47)
    hashed: Signs = d * _MULTIPLIER
    return hashed


def _rotated(numbers: Signs, bits: int) -> Signs:
    return (numbers >> np.uint64(bits)) | (numbers << np.uint64(64 - bits))


def row_signs(feature: Feature, signs: Signs) -> Signs:
    """Return the signs of the rows that a feature reads for each of N signs, uint64[N * rows_per_sign].

    With a hash stack these are the numbers of buckets. They are below ``feature.spacing``, and have no prefix yet.
    """
    if feature.hash_stack_rounds:
        size, hashed, buckets = np.uint64(feature.hash_stack_size), signs, []
        for number in range(feature.hash_stack_rounds):
            hashed = farmhash64(hashed)
            buckets.append(hashed % size + np.uint64(number) * size)
        signs = np.stack(buckets, axis=1).reshape(-1)
    return signs % np.uint64(feature.spacing)


def table_keys(feature: Feature, signs: Signs) -> Keys:
    """Return the keys of those rows in a server's tables, where features with different prefixes never share a row."""
    return keys_of_group(feature, row_signs(feature, signs))


def keys_of_group(feature: Feature, signs: Signs) -> Keys:
    """Return the keys of the rows of a feature's group, from their signs without prefix."""
    return ((signs + np.uint64(feature.prefix)) ^ _SHIFT).view(np.int64)


def signs_of_group(feature: Feature, keys: Keys) -> tuple[NDArray[np.bool_], Signs]:
    """Return which keys are of a feature's group, and the signs without prefix of those that are."""
    signs = prefixed_signs(keys) - np.uint64(feature.prefix)
    is_of_group = signs < np.uint64(feature.spacing)  # a smaller sign has wrapped around
    return is_of_group, signs[is_of_group]


def prefixed_signs(keys: Keys) -> Signs:
    """Undo the last step of ``table_keys``: return signs with their prefixes."""
    return keys.view(np.uint64) ^ _SHIFT


def servers_of(keys: Keys, servers: int) -> NDArray[np.int64]:
    """Return the number of the server that has the row of each key."""
    return (farmhash64(prefixed_signs(keys)) % np.uint64(servers)).astype(np.int64)


def request_keys(feature: Feature, signs: Signs) -> Keys:
    """Return the keys that a request to the served model has for the signs of a sample.

    Args:
        feature: of the checkpoint's or the file's ``EmbeddingConfig``.
        signs: uint64[N].

    Returns:
        int64[N], or int64[N * rounds] with a hash stack. A sign below ``feature.spacing`` is its own key.
    """
    return row_signs(feature, signs).view(np.int64)
