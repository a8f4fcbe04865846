"""Which keys get a slot, and which keys lose theirs: the kernels against the rule of policy.cuh, written in Python."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.cuda.device_table import LINES, DeviceTable, home_line, mix

ALL = 1 << 32


class LineModel:
    """One line, one key at a time."""

    def __init__(self, kind):
        self.kind = kind
        self.keys = [None] * kind.keys
        self.counters = [0] * kind.keys
        self.marks = set()

    def query(self, key):
        if key in self.keys:
            slot = self.keys.index(key)
            self.counters[slot] = min(3, self.counters[slot] + 1)

    def erase(self, key):
        if key in self.keys:
            slot = self.keys.index(key)
            self.keys[slot], self.counters[slot] = None, 0

    def insert(self, key, misses, salt, limit):
        """Insert a key and return the outcome."""
        if key in self.keys:
            return "held"
        if None in self.keys:
            return self._put(self.keys.index(None), key, misses, "inserted")
        lot = mix(mix(key) ^ salt)
        refused = self._refuses(key, misses) or (lot >> 32 >= limit * misses and "capped")
        if refused:
            return refused
        start = (lot % ALL) * self.kind.keys >> 32
        for slot in [*range(start, self.kind.keys), *range(start)]:
            if self.counters[slot] == 0:
                return self._put(slot, key, misses, "replaced")
        self.counters = [max(0, counter - 1) for counter in self.counters]
        return "in_use"

    def _refuses(self, key, misses):
        if self.kind.key == "u32":  # no room for marks
            return None
        mark = mix(key) % 32
        if mark in self.marks:
            return None
        if len(self.marks) >= 8:
            self.marks.clear()
        self.marks.add(mark)
        return "first_misses" if misses < 2 else None

    def _put(self, slot, key, misses, outcome):
        self.keys[slot] = key
        self.counters[slot] = int(misses >= 2)
        return outcome


def state(table, line):
    """Keys, counters and marks of a line on the device."""
    words, meta = table.words()
    keys = [None if word == table.kind.empty else int(word) for word in words[line]]
    word = int(meta[line])
    counters = [word >> 2 * slot & 3 for slot in range(table.kind.keys)]
    return keys, counters, {bit - 32 for bit in range(32, 64) if word >> bit & 1}


@pytest.mark.kernels
@settings(
    deadline=None, max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking takes minutes
@given(
    kind=st.sampled_from(list(LINES)),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["query", "insert", "insert", "insert", "erase"]),
            st.integers(0, 40),
            st.sampled_from([1, 1, 2, 5]),
            st.sampled_from([ALL, ALL // 2, ALL // 8]),
            st.integers(0, 2**64 - 1),
        ),
        min_size=30,
        max_size=60,
    ),
)
def test_every_step_leaves_the_line_as_the_rule_says(device, kind, steps):
    table, model = DeviceTable(device, kind, lines=1), LineModel(LINES[kind])
    table.insert(range(100, 100 + table.kind.keys))
    for key in range(100, 100 + table.kind.keys):
        model.insert(key, 1, 0, ALL)
    model.keys, outcomes = state(table, 0)[0], []  # the order in which one call fills a line is undefined
    before = table.counted()

    for verb, key, misses, limit, salt in steps:
        key += 90
        if verb == "query":
            table.query([key])
            model.query(key)
        elif verb == "erase":
            table.erase([key])
            model.erase(key)
        else:
            table.insert([key], misses=[misses], salt=salt, limit=limit)
            outcomes.append(model.insert(key, misses, salt, limit))
        assert state(table, 0) == (model.keys, model.counters, model.marks)

    after = table.counted()
    for outcome in ("inserted", "replaced", "first_misses", "capped", "in_use"):
        assert after[outcome] - before[outcome] == outcomes.count(outcome)
    assert after["rows"] == sum(key is not None for key in model.keys)


@pytest.mark.parametrize("kind", LINES)
def test_many_lines_at_once_follow_the_rule_line_by_line(device, kind):
    lines, rng = 12, np.random.default_rng(3)
    table, models = DeviceTable(device, kind, lines=lines), [LineModel(LINES[kind]) for _ in range(lines)]
    by_line = [[key for key in range(3000) if home_line(key, lines) == line][:40] for line in range(lines)]

    for salt in range(60):  # one key per line: no two keys of a call share a line
        keys = [int(rng.choice(of_line)) for of_line in by_line]
        misses = rng.integers(1, 3, lines).tolist()
        asked = [int(rng.choice(of_line)) for of_line in by_line]
        table.insert(keys, misses=misses, salt=salt)
        table.query(asked)
        for model, key, count, other in zip(models, keys, misses, asked, strict=True):
            model.insert(key, count, salt, ALL)
            model.query(other)

    for line, model in enumerate(models):
        assert state(table, line) == (model.keys, model.counters, model.marks)
    assert table.counted()["replaced"] > 50


def test_duplicate_keys_of_a_query_count_at_least_once(device):
    table = DeviceTable(device, lines=1)
    table.insert([1, 2])

    table.query([1] * 300)

    keys, counters, _ = state(table, 0)
    assert 1 <= counters[keys.index(1)] <= 3
    assert counters[keys.index(2)] == 0


def test_random_admission_admits_the_requested_share(device):
    table = DeviceTable(device, "15 x u32", lines=64)  # without marks, only the random draw decides
    table.insert(np.arange(2000))
    assert len(table.held()) == 64 * 15

    table.insert(np.arange(2000, 5000), limit=ALL // 4)

    spread = 5 * (3000 * 0.25 * 0.75) ** 0.5
    assert abs(table.counted()["capped"] - 0.75 * 3000) < spread


@pytest.mark.parametrize("kind", LINES)
def test_a_row_in_use_outlasts_any_number_of_keys_seen_once(device, kind):
    table = DeviceTable(device, kind, lines=1)
    table.insert([1])

    for call in range(30):
        table.query([1])
        table.insert([100 + call])

    assert table.query([1])[1].size == 0


@pytest.mark.parametrize("kind", LINES)
def test_the_keys_of_one_call_change_a_full_line_one_at_a_time(device, kind):
    table = DeviceTable(device, kind, lines=1)
    keys = list(range(table.kind.keys))
    table.insert(keys)
    for key in keys:  # one by one: simultaneous uses of one line count as one
        table.query([key])

    for call in range(3):  # each call sets marks and clears them, and lowers the counters
        table.insert(range(1000 * (call + 1), 1000 * (call + 1) + 200), misses=[1, 2] * 100)

    counted = table.counted()
    refused = sum(counted[reason] for reason in ("first_misses", "capped", "in_use"))
    assert refused + counted["replaced"] == 3 * 200
    assert len(table.held()) == len(set(table.held().tolist())) == table.kind.keys
    assert all(counter <= 1 for counter in state(table, 0)[1])


@pytest.mark.parametrize("kind", [name for name, kind in LINES.items() if kind.key != "u32"])
def test_a_locked_slots_counter_stays_zero_when_the_other_counters_go_down(device, kind):
    table = DeviceTable(device, kind, lines=1)
    keys = range(table.kind.keys)
    table.insert(list(keys))
    for key in keys[1:]:  # one by one: simultaneous uses of one line count as one
        table.query([key])

    claimed = [table.claim([100])[0] for _ in range(2)]  # its mark, then the slot of key 0
    refused = table.claim([101], misses=[2])

    assert claimed[0] == refused[0] == -1
    assert claimed[1] != -1
    _, meta = table.words()
    assert [int(meta[0]) >> 2 * slot & 3 for slot in keys] == [0] * len(keys)
