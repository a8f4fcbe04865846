"""JSON documents with one wrong value."""

import copy

from hypothesis import strategies as st


@st.composite
def with_odd_value(draw, documents, values):
    """One of ``documents`` with one value replaced by one of ``values``."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    *parents, last = draw(st.sampled_from(list(_places(document))))
    node = document
    for step in parents:
        node = node[step]
    node[last] = draw(st.sampled_from(values))
    return document


def _places(node, path=()):
    """Yield the path to every value inside a document."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from _places(value, (*path, key))
