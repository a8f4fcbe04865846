"""``FeatureTransform.read``: the keys of each table, of columns that samples share, against plain lists."""

import json
import struct
from itertools import accumulate, count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import FeatureTransform, numbers_in_json, read_tensors, tensor_forms

TABLES = [3, 1, 2]
# The columns of the slots: lists, numbers, a cross of the first number and the last text, texts, and a list spread over
# two slots. A list has at most 3 values; of more, the last ones.
LIST, NUMBER, TEXT, SPREAD, DENSE = range(5)
BYTES, INT64, INT32, UINT32, FP32, FP64, BOOL = range(7)  # numbers of the datatypes of tensors
FILL = 77


def made_transform(has_fill):
    made = FeatureTransform(5, sum(TABLES), 1)
    made.add_identity(NUMBER, 1, 100, 0)
    made.add_identity(LIST, 0, 0, 0)
    made.limit(3, "last")
    made.add_cross([(NUMBER, [], False), (TEXT, [], True)], 2, 0, 0)
    made.add_hash(TEXT, 3, 0, 0, "farmhash", (0, 0))
    made.add_identity(SPREAD, 4, 500, 0)
    made.limit(2, "first")
    made.spread(2)
    made.add_dense(DENSE, 0, 0, 0, False, 0, 1)
    if has_fill:
        made.fill(LIST, "integer", "", FILL, 0)
    return made


KEYS = st.integers(0, 1000)
VALUES = {
    LIST: st.lists(KEYS, max_size=5),
    NUMBER: st.none() | KEYS,
    TEXT: st.sampled_from(["", "a", "Zürich", "a text of more than sixteen bytes"]),
    SPREAD: st.lists(KEYS, max_size=4),
    DENSE: st.integers(-9, 9),
}


def typed(column, values):
    """Values as a column of arrays."""
    if column in (LIST, SPREAD):
        splits = np.array([0, *accumulate(map(len, values))], np.int64)
        return "integer", np.array([value for row in values for value in row], np.int64), None, splits
    if column == TEXT:
        texts = [value.encode() for value in values]
        ends = np.array([*accumulate(map(len, texts))], np.int64)
        return "text", np.frombuffer(b"".join(texts), np.uint8), np.append(0, ends)[:-1], ends, None, None
    if column == DENSE:
        return "float", np.array(values, np.float32), None, None
    valid = np.array([value is not None for value in values])
    return "integer", np.array([value or 0 for value in values], np.int64), None if valid.all() else valid, None


class Body:
    """The bytes of tensors, one after another."""

    def __init__(self, padding):
        self.begin, self.bytes, self.forms = padding, b"x" * padding, []

    def add(self, datatype, items, rows=0):
        """Append a tensor, and return its number."""
        if datatype == BYTES:
            data = b"".join(struct.pack("<I", len(item)) + item for item in items)
        else:
            data = np.array(items, {INT64: "<i8", INT32: "<i4", UINT32: "<u4", FP32: "<f4"}[datatype]).tobytes()
        self.bytes += data
        self.forms.append((datatype, len(items), len(data), rows))
        return len(self.forms) - 1

    def column(self, column, values, datatype):
        """Append a column, and return its form."""
        if column in (LIST, SPREAD):
            flat = self.add(datatype, [value for row in values for value in row], len(values))
            if len({len(row) for row in values}) == 1:
                return "tensor", flat, True
            return "tensor", flat, (self.add(INT32, [0, *accumulate(map(len, values))]),)
        items = [value.encode() for value in values] if column == TEXT else values
        of_column = {TEXT: BYTES, DENSE: FP32}.get(column, datatype)
        return "tensor", self.add(of_column, items), None

    def read(self):
        return read_tensors(np.array(self.forms, np.int64).reshape(-1, 4), self.bytes, self.begin)


def expected_of(values, rows_of, samples, users, fill):
    """The bags of each slot of each sample, the dense numbers, and how many rows each slot has."""
    transform = made_transform(False)

    def hashed(number, text):
        values = {LIST: [[]], NUMBER: [number], TEXT: [text], SPREAD: [[]], DENSE: [0]}
        columns = [typed(column, of_column) for column, of_column in values.items()]
        keys, row_ptrs, *_ = transform.run(columns, 1)  # a sample alone is the oracle of hashes
        return [keys[row_ptrs[slot] : row_ptrs[slot + 1]].tolist() for slot in (2, 3)]

    bags, dense = [], []
    for sample in range(samples):
        of_sample = {}
        for column, of_column in values.items():
            rows = rows_of[column]
            of_sample[column] = of_column[sample if rows == samples else users[sample] if rows > 1 else 0]
        listed = of_sample[LIST][-3:] or fill
        crossed, text = hashed(of_sample[NUMBER], of_sample[TEXT])
        number = [] if of_sample[NUMBER] is None else [of_sample[NUMBER] + 100]
        spread = [[key + 500] for key in of_sample[SPREAD][:2]]
        bags.append([listed, number, crossed, text, *spread, *([[]] * (2 - len(spread)))])
        dense.append([of_sample[DENSE]])
    return bags, dense


@st.composite
def requests(draw):
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    samples, users = sum(counts), np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rows_of = {column: draw(st.sampled_from(sorted({1, len(counts), samples}))) for column in VALUES}
    values = {
        column: draw(st.lists(of_value, min_size=rows_of[column], max_size=rows_of[column]))
        for column, of_value in VALUES.items()
    }
    return samples, users, rows_of, values


@settings(deadline=None, max_examples=100)
@given(
    request=requests(),
    has_fill=st.booleans(),
    datatype=st.sampled_from([None, INT64, INT32, UINT32]),
    padding=st.integers(0, 9),
)
def test_each_sample_has_the_bags_of_its_values(request, has_fill, datatype, padding):
    samples, users, rows_of, values = request
    body = Body(padding)
    if datatype is None:
        columns = [typed(column, of_column) for column, of_column in values.items()]
    else:
        values[NUMBER] = [value or 0 for value in values[NUMBER]]
        columns = [body.column(column, of_column, datatype) for column, of_column in values.items()]

    found = made_transform(has_fill).read(columns, samples, TABLES, users, body.read())

    dense, keys, row_ptrs, lengths, bags, most_keys, _, _ = found
    expected_bags, expected_dense = expected_of(values, rows_of, samples, users, [FILL] if has_fill else [])
    assert dense.tolist() == expected_dense
    slot = 0
    for slots, of_table, length, most in zip(TABLES, bags, lengths, most_keys, strict=True):
        offsets, row_ptrs = row_ptrs[:length], row_ptrs[length:]
        of_bags, keys = np.split(keys[: offsets[-1]], offsets[1:-1]), keys[offsets[-1] :]
        places = range(samples * slots) if of_table is None else of_table.tolist()
        assert [of_bags[place].tolist() for place in places] == [
            bag for of_sample in expected_bags for bag in of_sample[slot : slot + slots]
        ]
        assert offsets[0] == 0
        assert max(sum(map(len, row[slot : slot + slots])) for row in expected_bags) <= most
        assert sorted(set(places)) == list(range(length - 1))  # no bag is without samples
        slot += slots
    assert not keys.size
    assert not row_ptrs.size


def test_the_bags_of_slots_with_fewer_rows_come_first():
    made = FeatureTransform(3, 3, 0)
    for slot in (2, 0, 1):  # the order of the features is not that of their slots
        made.add_identity(slot, slot, 100 * slot, 0)
    columns = [typed(NUMBER, [1, 2, 3]), typed(NUMBER, [4]), typed(NUMBER, [5, 6])]
    _, keys, row_ptrs, lengths, bags, most_keys, *_ = made.read(columns, 3, [3], np.array([0, 1, 1], np.int32))
    assert (keys.tolist(), row_ptrs.tolist(), lengths) == ([104, 205, 206, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [7])
    assert (bags[0].reshape(3, 3).tolist(), most_keys) == ([[3, 0, 1], [4, 0, 2], [5, 0, 2]], [3])


def test_without_shared_columns_it_has_the_keys_of_run_table_by_table():
    made = FeatureTransform(2, 2, 0)
    for slot in range(2):
        made.add_identity(slot, slot, 100 * slot, 0)
    columns = [typed(NUMBER, [1, 2]), typed(NUMBER, [3, 4])]
    assert made.run(columns, 2)[0].tolist() == [1, 103, 2, 104]
    _, keys, row_ptrs, lengths, bags, *_ = made.read(columns, 2, [1, 1], None)
    assert (keys.tolist(), row_ptrs.tolist(), lengths, bags) == ([1, 2, 103, 104], [0, 1, 2] * 2, [3, 3], [None, None])


def test_no_samples_have_no_keys():
    columns = [typed(column, []) for column in VALUES]
    dense, keys, row_ptrs, lengths, *_ = made_transform(True).read(columns, 0, TABLES, None)
    assert (dense.shape, keys.size, row_ptrs.tolist(), lengths) == ((0, 1), 0, [0] * 3, [1] * 3)


NUMBERS = [typed(NUMBER, [1, 2])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([None], 2, [1], None), "columns: a feature cannot read a column of this kind"),
        ((NUMBERS * 2, 2, [1], None), "columns: expected as many as the transform has"),
        ((NUMBERS, 3, [1], None), "values: expected one for each sample, for each user or for all, or splits"),
        ((NUMBERS, 3, [1], np.zeros(3, np.int32)), "values: expected one for each sample"),
        ((NUMBERS, 0, [1], None), "values: expected one for each sample"),
        ((NUMBERS, 2, [2], None), "tables: expected the slots of the transform"),
        ((NUMBERS, 2, [1], np.zeros(3, np.int32)), "users: expected int32.B. of shape .2., got int32.3."),
        ((NUMBERS, 2, [1], np.array([0, 2], np.int32)), "users: expected 0, and then steps of 0 or 1"),
        ((NUMBERS, 2, [1], np.array([-1, 0], np.int32)), "users: expected 0, and then steps of 0 or 1"),
        (([(*NUMBERS[0][:-1], np.array([0, 2, 1, 2]))], 3, [1], None), "splits: expected offsets"),
        (([(*NUMBERS[0][:-1], np.array([], np.int64))], 3, [1], None), "splits: expected at least"),
    ],
)
def test_columns_that_do_not_fit_are_refused(arguments, message):
    made = FeatureTransform(1, 1, 0)
    made.add_identity(0, 0, 0, 0)
    with pytest.raises(ValueError, match=message):
        made.read(*arguments)


def tensors_of(content, *forms, begin=0):
    forms = [(*form, form[1]) if len(form) == 3 else form for form in forms]
    return read_tensors(np.array(forms, np.int64).reshape(-1, 4), content, begin)


@pytest.mark.parametrize(
    ("forms", "begin", "message"),
    [
        ([(INT64, 3, 24)], 0, "forms: the body has fewer bytes"),
        ([(INT64, 1, 8)], 0, "forms: the body has more bytes"),
        ([(INT64, 2, 16), (INT64, 1, 8)], 0, "forms: the body has fewer bytes"),
        ([(INT64, 2, 16)], 17, "begin: expected a place in the body"),
        ([(INT64, 1, 16)], 0, "forms: the items need another number of bytes"),
        ([(INT32, 2, 16)], 0, "forms: the items need another number of bytes"),
        ([(INT64, 2**61 + 2, 16)], 0, "forms: the items need another number of bytes"),
        ([(INT64, -1, 16)], 0, "forms: expected numbers of items"),
        ([(INT64, 2, 16, -1)], 0, "forms: expected numbers of items"),
        ([(INT64, 2, -16)], 0, "forms: the body has fewer bytes"),
        ([(7, 2, 16)], 0, "datatype: expected another number"),
        ([(-1, 2, 16)], 0, "datatype: expected another number"),
    ],
)
def test_tensors_that_do_not_fit_the_body_are_refused(forms, begin, message):
    with pytest.raises(ValueError, match=message):
        tensors_of(bytes(16), *forms, begin=begin)


@pytest.mark.parametrize(
    ("forms", "fault"),
    [
        ([(BYTES, 2, 8), (BYTES, 1, 8)], (1, 2)),
        ([(BYTES, 4, 15), (BYTES, 0, 1)], (0, 3)),
        ([(BYTES, 2**62, 16)], (0, 4)),
        ([(BYTES, 4, 16), (BYTES, 1, 0)], (1, 0)),
    ],
)
def test_wrong_texts_are_faults_of_their_tensor(forms, fault):
    assert tensors_of(bytes(16), *forms) == fault


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (("tensor", 8, None), "tensor: there are fewer tensors"),
        (("tensor", 0), "column: expected a tensor, and tensors"),
        (("tensor", 5, True), "lists: expected rows of the same length"),
        (("tensor", 6, True), "lists: expected rows of the same length"),
        (("tensor", 0, (1,)), "offsets: expected at least one integer"),
        (("tensor", 0, (2,)), "offsets: expected at least one integer"),
        (("tensor", 0, (8,)), "tensor: there are fewer tensors"),
        (("tensor", 0, ()), "tensor: there are fewer tensors"),
        (("tensor", 1, None), "columns: a feature cannot read a column of this kind"),
        (("tensor", 4, None), "tensor: has another datatype"),
        (("tensor", 7, None), "tensor: has another datatype"),
    ],
)
def test_columns_that_do_not_fit_the_tensors_are_refused(column, message):
    numbers = (INT64, 2, 16), (FP32, 2, 8), (INT32, 0, 0), (INT32, 0, 0), (BOOL, 1, 1)
    forms = *numbers, (INT64, 2, 16, 0), (INT64, 2, 16, 3), (FP64, 1, 8)
    made = FeatureTransform(1, 1, 0)
    made.add_identity(0, 0, 0, 0)
    with pytest.raises(ValueError, match=message):
        made.read([column], 2, [1], None, tensors_of(bytes(65), *forms))
    with pytest.raises(ValueError, match="column: expected a tensor, and tensors"):
        made.read([("tensor", 0, None)], 2, [1], None)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 2], [1, 2, 2, 2], [0, 0, 0, 3], [0, 2**31 - 1, -1, 2]])
def test_wrong_offsets_are_a_fault_of_their_column(offsets):
    made = FeatureTransform(1, 1, 0)
    made.add_identity(0, 0, 0, 0)
    body = Body(0)
    numbers = body.add(INT64, [1, 2])
    column = "tensor", numbers, (body.add(INT32, offsets),)
    assert made.read([column], 3, [1], None, body.read()) == (0, 0, 2, "offsets")


@settings(deadline=None, max_examples=100)
@given(content=st.binary(max_size=40), counts=st.lists(st.integers(0, 9), max_size=3), data=st.data())
def test_texts_are_those_of_the_bytes_or_a_fault(content, counts, data):
    forms, left = [], len(content)
    for texts in counts:
        size = data.draw(st.integers(0, left))
        forms.append((BYTES, texts, size))
        left -= size
    found = tensors_of(content, *forms, begin=left)

    end, wanted = left, []
    for number, (_, items, size) in enumerate(forms):
        at, end, texts = end, end + size, []
        while at + 4 <= end and len(texts) < items and at + 4 + struct.unpack_from("<I", content, at)[0] <= end:
            (length,) = struct.unpack_from("<I", content, at)
            texts.append((at + 4, at + 4 + length))
            at += 4 + length
        if len(texts) < items or at < end:
            assert isinstance(found, tuple)
            assert found[0] == number
            assert found[1] != items
            return
        wanted.append([(begin - (end - size), stop - (end - size)) for begin, stop in texts])
    assert [[*zip(*map(np.ndarray.tolist, found.texts(number)), strict=True)] for number in range(len(forms))] == wanted


INT31 = 2**31 - 1


@pytest.mark.parametrize(
    ("datatype", "numbers", "form"),
    [
        (INT64, [3, 24], [3, 24, 3]),
        (FP32, [3, 2, 24], [6, 24, 3]),
        (BOOL, [3, 0, 7, 0], [0, 0, 3]),
        (FP64, [0, 0], [0, 0, 0]),
        (BYTES, [2, 99], [2, 99, 2]),
        (BYTES, [INT31, 0, 5], [0, 5, INT31]),
        (UINT32, [INT31, 4 * INT31], [INT31, 4 * INT31, INT31]),
        (BYTES, [INT31 + 1, 0], None),
        (BYTES, [2**16, 2**15, 0], None),
        (BYTES, [2**16, 0, 2**15, 0], None),
        (BYTES, [INT31] * 9, None),
        (INT32, [3, 13], None),
        (INT32, [3, 11], None),
        (BYTES, [-1, 0], None),
        (BYTES, [1, -1], None),
    ],
)
def test_forms_of_tensors_have_the_limits_of_requests(datatype, numbers, form):
    places, size = np.array([[datatype, 2, len(numbers) - 1, 1]]), numbers[-1]
    found = tensor_forms(places, np.array([7, size, *numbers[:-1], 7]), max(size, 0))
    assert (None if found is None else found.tolist()) == (form and [[datatype, *form]])
    assert tensor_forms(places, np.array([7, size, *numbers[:-1], 7]), max(size, 0) + 1) is None


def test_forms_of_several_tensors_have_the_bytes_of_all():
    places, numbers = np.array([[INT32, 0, 2, 2], [BYTES, 3, 1, 4]]), np.array([2, 3, 24, 5, 30])
    assert tensor_forms(places, numbers, 54).tolist() == [[INT32, 6, 24, 2], [BYTES, 5, 30, 5]]
    assert tensor_forms(places, numbers, 53) is None
    assert tensor_forms(places, numbers, 23) is None


@pytest.mark.parametrize(
    "place", [(-1, 1, 0), (0, 0, 0), (3, 1, 0), (2, 2, 0), (0, 4, 0), (2**62, 2**62, 0), (0, 1, 3), (0, 1, -1)]
)
def test_places_outside_of_the_numbers_are_refused(place):
    with pytest.raises(ValueError, match="places: expected places of numbers"):
        tensor_forms(np.array([[INT64, *place]]), np.zeros(3, np.int64), 0)


@pytest.mark.parametrize(
    ("text", "form", "numbers"),
    [
        ('{"a": 12, "b9": [0, -3, 4.5, 1e5, 6]}', '{"a": 0, "b9": [0, -3, 4.5, 1e5, 0]}', [12, 0, 6]),
        (r'["7\"8", 9, "\\", 1, "\u0031"]', r'["7\"8", 0, "\\", 0, "\u0031"]', [9, 1]),
        ("01 999999999999999999 1000000000000000000", "01 0 1000000000000000000", [10**18 - 1]),
        ('"unfinished 1', '"unfinished 1', []),
        ('"\\', '"\\', []),
        ("", "", []),
        ("42", "0", [42]),
    ],
)
def test_the_numbers_of_a_text_are_those_outside_of_its_strings(text, form, numbers):
    found = numbers_in_json(text.encode())
    assert (found[0].decode(), found[1].tolist()) == (form, numbers)


VALUES_OF_JSON = st.recursive(
    st.integers(-5, 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(['1"', "\\2", True, None]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
)


@settings(deadline=None, max_examples=100)
@given(value=VALUES_OF_JSON, is_ascii=st.booleans())
def test_a_numbered_form_is_the_same_text_with_other_numbers(value, is_ascii):
    text = json.dumps(value, ensure_ascii=is_ascii)
    form, numbers = numbers_in_json(text.encode(), True)

    def renamed(one):
        if type(one) is int and 0 <= one < 10**18:
            assert numbers[next(order)] == one
            return next(names)
        if isinstance(one, list):
            return [renamed(item) for item in one]
        return {key: renamed(item) for key, item in one.items()} if isinstance(one, dict) else one

    order, names = count(), count()
    assert json.loads(form) == renamed(value)
    assert numbers_in_json(text.encode())[0] == numbers_in_json(form)[0]


def test_weights_need_keys_a_limit_and_places():
    made = FeatureTransform(2, 1, 3)
    made.add_identity(0, 0, 0, 0)
    with pytest.raises(ValueError, match="feature: expected one with keys"):
        made.weigh(0)  # the last feature is not dense
    made.add_dense(1, 0, 0, 0, False, 0, 1)
    for most, feature in ((3, 1), (3, 2), (4, 0)):
        made.limit(most, "")
        with pytest.raises(ValueError, match="feature: expected one with keys, and a limit"):
            made.weigh(feature)
    made.limit(3, "")
    made.weigh(0)
    weights, splits = np.array([0.5, 2.0, 1.0], np.float32), np.array([0, 2, 2, 3])
    for keys in (splits, np.array([0, 2, 3, 3])):
        columns = [("integer", np.arange(3), None, keys), ("float", weights, None, splits)]
        found = made.read(columns, 3, [1], None)
        if keys is splits:
            assert found[0].tolist() == [[0.5, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
        else:
            assert found == (1, 1, 1, "has another number of keys")
