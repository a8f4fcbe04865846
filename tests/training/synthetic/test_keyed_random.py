import numpy as np

from training.synthetic.keyed_random import keyed_uniform

KEYS = np.arange(-5000, 5000, dtype=np.int64)


def test_a_row_depends_only_on_its_key_and_the_seed():
    rows = keyed_uniform(KEYS, 8, seed=3)

    shuffled = np.random.default_rng(0).permutation(KEYS.size)
    np.testing.assert_array_equal(keyed_uniform(KEYS[shuffled], 8, seed=3), rows[shuffled])
    np.testing.assert_array_equal(keyed_uniform(KEYS, 4, seed=3), rows[:, :4])
    assert (keyed_uniform(KEYS, 8, seed=4) != rows).all()


def test_numbers_are_uniform_and_columns_keys_and_seeds_independent():
    rows = keyed_uniform(KEYS, 8, seed=3)

    assert rows.min() >= 0
    assert rows.max() < 1
    histogram = np.histogram(rows, bins=20, range=(0, 1))[0]
    assert abs(histogram / rows.size - 1 / 20).max() < 0.003  # 80,000 draws: 4 standard deviations
    other = keyed_uniform(KEYS, 8, seed=4)
    neighbours = [np.corrcoef(rows[:-1, 0], rows[1:, 0]), np.corrcoef(rows.ravel(), other.ravel())]
    columns = np.corrcoef(rows.T) - np.eye(8)
    assert max(abs(c[0, 1]) for c in neighbours) < 0.04
    assert abs(columns).max() < 0.04


def test_the_numbers_are_the_same_in_every_release():
    assert keyed_uniform(np.array([1], dtype=np.int64), 2, seed=0).tolist() == [GOLDEN]


def splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


GOLDEN = [(splitmix64((splitmix64(1) + column * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for column in (1, 2)]
