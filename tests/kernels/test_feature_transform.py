"""A part of a transform is the transform of some of its features."""

import numpy as np
import pytest

from kernels.host import FeatureTransform


@pytest.fixture
def transform():
    """Three slots that add 0, 100 and 200 to the keys of three columns, and two dense numbers of the last two."""
    made = FeatureTransform(5, 3, 2)
    for slot in (2, 0, 1):  # the order of the features is not that of their slots
        made.add_identity(slot, slot, 100 * slot, 0)
    for place in range(2):
        made.add_dense(3 + place, place, 0, 0, False, 0, 1)
    return made


def integers(*values):
    return "integer", np.array(values, np.int64), None, None


def floats(*values):
    return "float", np.array(values, np.float32), None, None


COLUMNS = [integers(1, 2), integers(3, 4), integers(5, 6), floats(0.5, 1), floats(2, 3)]


def test_it_has_the_slots_and_numbers_of_its_features_in_their_order(transform):
    keys, row_ptrs, dense, *_ = transform.part([0, 1, 4]).run([COLUMNS[0], None, COLUMNS[2], None, COLUMNS[4]], 2)
    assert (keys.tolist(), row_ptrs.tolist(), dense.tolist()) == ([1, 205, 2, 206], [0, 1, 2, 3, 4], [[2], [3]])

    keys, row_ptrs, dense, *_ = transform.part([3]).run([None, None, None, COLUMNS[3], None], 2)
    assert (keys.tolist(), row_ptrs.tolist(), dense.tolist()) == ([], [0], [[0.5], [1]])


def test_all_features_are_the_whole(transform):
    for of_part, of_whole in zip(transform.part(range(5)).run(COLUMNS, 2), transform.run(COLUMNS, 2), strict=True):
        assert of_part.tolist() == of_whole.tolist()


def test_a_column_that_a_feature_reads_is_required(transform):
    with pytest.raises(ValueError, match="columns: a feature cannot read a column of this kind"):
        transform.run([None, *COLUMNS[1:]], 2)


@pytest.mark.parametrize("features", [[5], [0, 0]], ids=["no such feature", "a feature twice"])
def test_wrong_features_are_refused(transform, features):
    with pytest.raises(ValueError, match=r"expected one feature for each slot|features: there are fewer features"):
        transform.part(features).run(COLUMNS, 2)
