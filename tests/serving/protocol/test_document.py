"""JSON documents of clients: no object may repeat a key, because a proxy may read another value than the server."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import RequestError
from serving.protocol.bounds import Bounds
from serving.protocol.document import parse_document


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"id": "a", "inputs": [], "id": "b"}', "id"),
        ('{"inputs": [{"name": "DES"}, {"name": "DES", "name": "CATCOLUMN"}]}', "inputs[1].name"),
        ('{"samples": [{"keys": {"user": [1], "item": [2], "user": [3]}}]}', "samples[0].keys.user"),
        ('{"parameters": {"a": {"b": [[0], [{"c": 1, "c": 1}]]}}}', "parameters.a.b[1][0].c"),
        ('{"id": "a", "i\\u0064": "b"}', "id"),
        ('{"id": "\\u003a", "a": 1, "a": 2}', "a"),
        ('{"a": {"b": 1, "b": 2}, "a": 3}', "a"),
        ('{"a": "x:y", "b": 1, "b": 2}', "b"),
        ('{"": 1, "": 2}', ""),
        (f'{{"a": {"9" * 300}, "b": 1, "b": 2}}', "b"),
    ],
)
def test_a_repeated_key_is_refused_with_its_path(text, path):
    with pytest.raises(RequestError) as refused:
        parse_document(text.encode(), Bounds())

    assert str(refused.value) == f"{path}: came twice"


_NAMES = st.text('ab:\\"', max_size=2)
_VALUES = st.recursive(
    st.one_of(st.integers(0, 9), _NAMES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.tuples(_NAMES, inner), max_size=3).map(lambda members: ("object", members)),
    ),
    max_leaves=12,
)


def text_of(value):
    """JSON text; an object is a tuple, and may have a key twice."""
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, tuple):
        members = (f"{json.dumps(name)}: {text_of(item)}" for name, item in value[1])
        return f"{{{', '.join(members)}}}"
    return json.dumps(value)


def has_repeated_keys(value):
    if isinstance(value, tuple):
        names = [name for name, _ in value[1]]
        return len(set(names)) < len(names) or any(has_repeated_keys(item) for _, item in value[1])
    return isinstance(value, list) and any(map(has_repeated_keys, value))


@given(members=st.lists(st.tuples(_NAMES, _VALUES), max_size=4))
@settings(deadline=None, max_examples=100)
def test_documents_without_repeated_keys_are_read_and_others_are_refused(members):
    text = text_of(("object", members))
    if has_repeated_keys(("object", members)):
        with pytest.raises(RequestError, match=": came twice"):
            parse_document(text.encode(), Bounds())
    else:
        assert parse_document(text.encode(), Bounds()) == json.loads(text)
