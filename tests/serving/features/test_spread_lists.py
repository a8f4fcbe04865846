"""The spread of a list over slots, against a loop."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.features import FeatureDefinition, FeatureReader, SlotOfTable


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=6), st.none() | st.integers(0, 99)), min_size=1),
    target_is_first=st.booleans(),
)
def test_the_values_of_a_list_are_in_the_first_slots_in_their_order(rows, target_is_first):
    history, target = ("item[1:5]", "item[0]") if target_is_first else ("item[0:4]", "item[4]")
    features = [
        {"name": "item", "kind": "identity", "size": 100, "slot": target},
        {"name": "seen", "kind": "identity", "size": 100, "shares": "item", "slot": history},
        {"name": "user", "kind": "identity"},
    ]
    features[1]["list"] = {"most": 4, "keep": "last"}
    slots = [*(SlotOfTable(f"item[{at}]", "item") for at in range(5)), SlotOfTable("user", "user")]
    reader = FeatureReader(FeatureDefinition(format=1, features=features), slots, 0, "features.json")
    values = {"item": [item for _, item in rows], "seen": [seen for seen, _ in rows], "user": list(range(len(rows)))}

    found = reader(values, len(rows))

    expected = []
    for number, (seen, item) in enumerate(rows):
        kept = [[key] for key in seen[-4:]] + [[]] * (4 - len(seen[-4:]))
        of_target = [[] if item is None else [item]]
        expected += [*of_target, *kept, [number]] if target_is_first else [*kept, *of_target, [number]]
    assert [bag.tolist() for bag in np.split(found.keys, found.row_ptrs[1:-1])] == expected
    assert reader.of_slots == (*(["item"] + ["seen"] * 4 if target_is_first else ["seen"] * 4 + ["item"]), "user")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slot": "item[0:9]"}, "features[1].slot: expected slots of item, which has 5, got 'item[0:9]'"),
        ({"slot": "item[3:3]"}, "features[1].slot: expected slots of item, which has 5, got 'item[3:3]'"),
        ({"slot": "item[0:3]"}, "features[1].slot: needs a list with most at most 3, one value per slot"),
        ({"list": None}, "features[1].slot: needs a list with most at most 4"),
        ({"slot": "item[1:5]"}, "no feature gives the keys of the slot 'item[0]'"),
    ],
)
def test_slots_that_do_not_fit_a_list_are_refused(change, text):
    features = [
        {"name": "item", "kind": "identity", "size": 100, "slot": "item[4]"},
        {"name": "seen", "kind": "identity", "size": 100, "shares": "item", "slot": "item[0:4]", "list": {"most": 4}},
    ]
    features[1] |= change
    slots = [SlotOfTable(f"item[{at}]", "item") for at in range(5)]
    with pytest.raises(ConfigError, match=re.escape(text)):
        FeatureReader(FeatureDefinition(format=1, features=features), slots, 0, "features.json")
