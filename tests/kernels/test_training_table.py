"""TrainingTable against dicts: which keys have rows, and what is in them."""

import re
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ReservedKeyError
from kernels.host import TrainingTable, look_up_bags

pytestmark = pytest.mark.usefixtures("reading_loops")

KEYS = st.lists(st.one_of(st.integers(-6, 12), st.integers(-(2**63) + 2, 2**63 - 3)), max_size=12)
CALLS = st.lists(st.tuples(st.booleans(), KEYS), max_size=10)


def array(keys):
    return np.array(keys, dtype=np.int64)


def look_up(table, keys, trains=True):
    """Look keys up as bags of one key each, and return their vectors."""
    [(_, vectors)] = look_up_bags([table], [array(keys)], [None], ["sum"], [None], [1], [trains])
    return vectors


def rows_of(table):
    keys, vectors, *_ = table.read(table.changed_rows())
    return dict(zip(keys.tolist(), vectors, strict=True))


def states_of(table, key):
    return table.read(table.find(array([key])))[2][0].tolist()


@settings(deadline=None)
@given(calls=CALLS)
def test_a_key_has_a_row_from_the_first_training_call_on(calls):
    table, model = TrainingTable("t", 3, default_value=0.5, seed=4), {}
    for trains, keys in calls:
        vectors = look_up(table, keys, trains)
        if trains:
            model |= {key: vector for key, vector in zip(keys, vectors, strict=True) if key not in model}
        for key, vector in zip(keys, vectors, strict=True):
            np.testing.assert_array_equal(vector, model.get(key, np.full(3, 0.5, np.float32)))
        assert len(table) == len(model)
        assert list(rows_of(table)) == list(model)
        assert table.find(array(keys)).tolist() == [list(model).index(key) if key in model else -1 for key in keys]


@settings(deadline=None)
@given(calls=CALLS, admit_after=st.integers(2, 4))
def test_a_key_gets_its_row_after_some_sightings(calls, admit_after):
    table, counts = TrainingTable("t", 2, admit_after=admit_after, default_value=9), {}
    for trains, keys in calls:
        for key in keys if trains else []:
            counts[key] = counts.get(key, 0) + 1
        admitted = {key for key, count in counts.items() if count >= admit_after}

        vectors = look_up(table, keys, trains)

        assert [key in admitted for key in keys] == (vectors[:, 0] != 9).tolist()
        assert set(rows_of(table)) == admitted
        waiting = {key: count for key, count in counts.items() if count < admit_after}
        assert dict(zip(*(part.tolist() for part in table.sightings()), strict=True)) == waiting


def test_equal_tables_list_their_sightings_in_equal_order():
    keys = np.random.default_rng(0).permutation(1000)
    tables = [TrainingTable("t", 1, admit_after=3) for _ in range(2)]
    for table in tables:
        look_up(table, keys)

    first, second = (table.sightings() for table in tables)

    assert first[0].tolist() == second[0].tolist() == list(range(1000))
    assert first[1].tolist() == [1] * 1000


@settings(deadline=None)
@given(calls=st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=40), spare=st.integers(0, 8))
def test_a_new_row_replaces_the_row_that_was_read_least_recently(calls, spare):
    table, model = TrainingTable("t", 2, max_rows=6 + spare), OrderedDict()
    for keys in calls:
        missing = [key for key in keys if key not in model]
        for key in [key for key in keys if key in model]:  # a call reads rows before it makes rows
            model.move_to_end(key)
        for key in missing:
            if key not in model and len(model) == 6 + spare:
                model.popitem(last=False)
            model[key] = True
            model.move_to_end(key)

        look_up(table, keys)

        assert list(rows_of(table)) == list(model), "the row that was read least recently comes first"
    copy = TrainingTable("t", 2, max_rows=6 + spare)
    copy.write(*table.read(table.changed_rows()))
    for one in (table, copy):
        look_up(one, range(100, 103))
    assert list(rows_of(copy)) == list(rows_of(table)), "a copy replaces the same rows"


def test_a_replaced_row_begins_again():
    table = TrainingTable("t", 2, max_rows=2, rule="ada_grad", initial_states=[0.25])
    first = look_up(table, [1, 2])
    keys, vectors, states, _, slots = table.read(table.changed_rows())
    table.write(keys, vectors + 1, states + 1, array([5, 5]), slots)

    look_up(table, [3])
    look_up(table, [1])

    assert list(rows_of(table)) == [3, 1]
    _, vectors, states, last_steps, _ = table.read(table.find(array([1])))
    np.testing.assert_array_equal(vectors[0], first[0])
    assert states.tolist() == [[0.25, 0.25]]
    assert last_steps.tolist() == [0]


def test_a_call_with_more_distinct_keys_than_rows_is_refused():
    table = TrainingTable("small", 2, max_rows=3)
    look_up(table, [1, 2, 3])

    with pytest.raises(ValueError, match="table 'small': one call has more distinct keys than max_rows, 3"):
        look_up(table, [1, 4, 5, 6])
    assert 1 in rows_of(table), "a row of the call is never replaced"


def test_lookups_of_one_call_do_not_replace_each_others_rows():
    table = TrainingTable("t", 2, max_rows=3)
    look_up(table, [7, 8, 9])

    one, other = (
        pooled
        for _, pooled in look_up_bags(
            [table] * 2, [array([7]), array([1, 2])], [None] * 2, ["sum"] * 2, [None] * 2, [1, 1], [True] * 2
        )
    )

    assert set(rows_of(table)) == {7, 1, 2}
    np.testing.assert_array_equal(one[0], rows_of(table)[7])
    np.testing.assert_array_equal(other[1], rows_of(table)[2])


def test_fixed_rows_exist_and_other_keys_are_refused():
    table = TrainingTable("ids", 3, fixed_rows=5, seed=1)

    assert list(rows_of(table)) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(look_up(table, [4, 0]), [rows_of(table)[4], rows_of(table)[0]])
    for key in (5, -1):
        for trains in (True, False):
            with pytest.raises(IndexError, match=f"table 'ids': expected keys from 0 to 4, got {key} at position 1"):
                look_up(table, [0, key], trains)
    rows = (np.ones((1, 3), np.float32), np.ones((1, 0), np.float32), array([1]), np.zeros(1, np.uint64))
    table.write(array([2]), *rows)
    assert rows_of(table)[2].tolist() == [1, 1, 1]
    table.clear()
    assert len(table) == 5
    assert rows_of(table)[2].tolist() != [1, 1, 1]


@pytest.mark.parametrize(("rows", "processes"), [(7, 3), (2, 3), (6, 1)])
def test_processes_share_fixed_rows(rows, processes):
    whole = TrainingTable("ids", 2, fixed_rows=rows)
    shares = [TrainingTable("ids", 2, fixed_rows=rows, shard=(rank, processes)) for rank in range(processes)]

    for rank, share in enumerate(shares):
        assert list(rows_of(share)) == list(range(rank, rows, processes))
        for key, row in rows_of(share).items():
            np.testing.assert_array_equal(row, rows_of(whole)[key])
        with pytest.raises(IndexError):
            look_up(share, [rows])
        if processes > 1:
            with pytest.raises(IndexError):
                look_up(share, [rank + 1])


def test_rows_survive_growth_and_their_weights_do_not_depend_on_their_order():
    keys = np.random.default_rng(0).permutation(100_000) << 20
    grown, other = TrainingTable("t", 5, seed=3), TrainingTable("t", 5, seed=3)
    for part in np.split(keys, 100):
        look_up(grown, part)
    look_up(other, keys[::-1])

    np.testing.assert_array_equal(look_up(grown, keys, trains=False), look_up(other, keys, trains=False))
    np.testing.assert_array_equal(grown.find(keys), np.arange(100_000))
    assert (look_up(TrainingTable("t", 5, seed=4), keys[:1000]) != look_up(other, keys[:1000])).any(axis=1).all()


def test_first_weights_follow_their_distribution():
    keys = np.arange(20_000)
    uniform = look_up(TrainingTable("t", 4, initializer=("uniform", -0.1, 0.3)), keys)
    normal = look_up(TrainingTable("t", 4, initializer=("normal", 2, 0.5)), keys)
    constant = look_up(TrainingTable("t", 4, initializer=("constant", 13, 0)), keys)

    assert -0.1 <= uniform.min() < -0.099
    assert 0.299 < uniform.max() <= 0.3
    assert abs(uniform.mean() - 0.1) < 0.002  # the standard error is 0.0004
    assert abs(normal.mean() - 2) < 0.01  # the standard error is 0.002
    assert abs(normal.std() - 0.5) < 0.01
    assert abs((np.abs(normal - 2) < 0.5).mean() - 0.6827) < 0.01
    assert abs(np.corrcoef(normal.T)[0, 1]) < 0.03
    assert (constant == 13).all()


@pytest.mark.parametrize(("row_dtype", "bits"), [("fp16", 11), ("bf16", 8)])
def test_narrow_rows_are_rounded_and_states_are_not(row_dtype, bits):
    table = TrainingTable("t", 3, row_dtype=row_dtype, rule="ada_grad", initial_states=[0.1])
    written = np.array([[1 / 3, -1e-3, 70_000]], np.float32)
    states = np.array([[1 / 3, 2 / 3, 1e-9]], np.float32)
    table.write(array([7]), written, states, array([1]), np.zeros(1, np.uint64))

    vector = rows_of(table)[7]

    assert states_of(table, 7) == states[0].tolist()
    np.testing.assert_allclose(vector[:2], written[0, :2], rtol=2.0**-bits)
    assert vector[0] != written[0, 0]
    assert vector[2] == (np.inf if row_dtype == "fp16" else np.float32(70_144))
    np.testing.assert_array_equal(look_up(table, [7])[0], vector)


def test_other_states_replace_those_of_all_rows():
    table = TrainingTable("t", 2, rule="ada_grad", initial_states=[0.5])
    before = look_up(table, [3, 4])

    for rule, values, states in (
        ("adam", [1.0, 2.0], [1, 1, 2, 2]),
        ("row_wise_ada_grad", [3.0], [3]),
        ("sgd", [], []),
    ):
        table.set_states(rule, values)
        np.testing.assert_array_equal(look_up(table, [3, 4]), before)
        assert states_of(table, 4) == table.first_states.tolist() == states
        look_up(table, [len(table) + 5])
        assert states_of(table, len(table) + 4) == states
        assert (table.rule, table.initial_states) == (rule, values)


def test_a_table_that_grows_never_takes_the_memory_of_two():
    script = """
import re
import numpy as np
from kernels.host import TrainingTable, look_up_bags
def peak_and_now():
    status = open("/proc/self/status").read()
    return [int(re.search(name + r":\\s+(\\d+)", status)[1]) >> 10 for name in ("VmHWM", "VmRSS")]
table, keys = TrainingTable("t", 1), np.arange(40_000)
for _ in range(28):  # the index has just grown, as it does at each power of two
    look_up_bags([table], [keys], [None], ["sum"], [None], [1], [True])
    keys += len(keys)
print(*peak_and_now())
table.set_states("adam", [0.0, 0.0])
print(*peak_and_now())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    for line in done.stdout.splitlines():
        peak_mib, now_mib = map(int, line.split())
        assert peak_mib - now_mib < 10  # the index alone takes 54 MiB, and half of that before it has grown


def test_states_that_do_not_fit_into_memory_leave_the_table_as_it_is():
    script = """
import resource, sys
import numpy as np
from kernels.host import TrainingTable, look_up_bags
table, keys = TrainingTable("t", 64), np.arange(50_000)
def look_up():
    return look_up_bags([table], [keys], [None], ["sum"], [None], [1], [True])[0][1]
before = look_up()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (20 << 20),) * 2)
try:
    table.set_states("adam", [0.0] * 2)
except MemoryError:
    pass
else:
    sys.exit("no MemoryError")
resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
assert table.initial_states == []
assert (look_up() == before).all()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_row_keeps_the_slot_in_which_its_key_was_first_seen():
    table = TrainingTable("t", 2)
    row_ptrs = array([0, 2, 2, 3, 4, 6, 6])  # two samples of three slots

    look_up_bags([table], [array([9, 5, 5, 6, 7, 9])], [row_ptrs], ["sum"], [None], [3], [True])
    look_up_bags([table], [array([8, 9])], [None], ["sum"], [None], [2], [True])
    look_up_bags([table], [array([8, 4])], [None], ["sum"], [None], [array([7, 5])], [True])

    keys, *_, slots = table.read(table.changed_rows())
    assert dict(zip(keys.tolist(), slots.tolist(), strict=True)) == {9: 0, 5: 0, 6: 0, 7: 1, 8: 0, 4: 5}


def test_a_cleared_table_is_empty():
    table = TrainingTable("t", 2, admit_after=2)
    look_up(table, [1, 1, 2])

    table.clear()

    assert len(table) == 0
    assert table.sightings()[0].size == 0
    assert table.find(array([1])).tolist() == [-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim: expected 1 to 65536, got 0"),
        ({"row_dtype": "int8"}, "row_dtype: training needs 'fp32', 'fp16' or 'bf16', got 'int8'"),
        ({"rule": "rmsprop"}, "rule: expected one of 'sgd'"),
        ({"rule": "adam", "initial_states": [0.0]}, "initial_states: expected 2 for the rule 'adam', got 1"),
        ({"row_dtype": "double"}, "row_dtype: expected one of 'fp32'"),
        ({"initializer": ("zeros", 0, 0)}, "initializer: expected one of 'uniform', 'normal', 'constant', got 'zeros'"),
        ({"fixed_rows": 0}, "fixed_rows: expected 1 to"),
        ({"max_rows": 0}, "max_rows: expected 1 to"),
        ({"admit_after": 0}, "admit_after: expected 1 to"),
        ({"fixed_rows": 5, "max_rows": 5}, "a table with fixed rows has no max_rows"),
        ({"fixed_rows": 5, "admit_after": 2}, "and no admit_after"),
        ({"shard": (1, 1)}, "shard: expected a process and the number of processes, got (1, 1)"),
        ({"max_norm": 0.0}, "max_norm: expected a number above 0, got 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainingTable("t", **{"dim": 2, **options})


def test_wrong_rows_and_keys_are_refused():
    table = TrainingTable("t", 2, rule="ada_grad", initial_states=[0.0])
    look_up(table, [1])
    one, slots, floats = array([1]), np.zeros(1, np.uint64), np.zeros((1, 2), np.float32)

    with pytest.raises(ReservedKeyError, match="at position 1"):
        look_up(table, [1, 2**63 - 1])
    with pytest.raises(ReservedKeyError):
        table.find(array([-(2**63)]))
    with pytest.raises(IndexError, match="rows: expected numbers below 1, got 1 at position 0"):
        table.read(one)
    with pytest.raises(
        ValueError, match=re.escape("vectors: expected float32[N, D] of shape [1, 2], got float32[1, 1]")
    ):
        table.write(one, floats[:, :1].copy(), floats, one, slots)
    with pytest.raises(
        ValueError, match=re.escape("states: expected float32[N, S] of shape [1, 2], got float32[1, 1]")
    ):
        table.write(one, floats, floats[:, :1].copy(), one, slots)
    with pytest.raises(ValueError, match=re.escape("last_steps: expected int64[N] of shape [1]")):
        table.write(one, floats, floats, array([]), slots)
    with pytest.raises(ValueError, match="last_steps: expected 0 to 2147483647, got -1 at position 0"):
        table.write(one, floats, floats, array([-1]), slots)
    with pytest.raises(TypeError, match=re.escape("slots: expected uint64[N], got int64[1]")):
        table.write(one, floats, floats, one, one)
    assert len(table) == 1
