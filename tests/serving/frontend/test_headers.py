"""Headers that a client repeats."""

import pytest

from serving.errors import RequestError
from serving.frontend.access_log import repeated_headers
from serving.frontend.http.headers import headers_of


def of(*headers):
    return headers_of({"headers": list(headers)})


@pytest.mark.parametrize(
    "name",
    [
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"host",
        b"inference-header-content-length",
        b"origin",
        b"x-envoy-expected-rq-timeout-ms",
    ],
)
def test_a_header_with_one_value_is_refused_if_it_has_two(name):
    with pytest.raises(RequestError, match=f"header {name.decode()}: expected one value, got two different values"):
        of((name, b"1"), (b"a", b"b"), (name, b"2"))

    assert of((name, b"1"), (b"a", b"b"), (name, b"1")) == {name: b"1", b"a": b"b"}


def test_the_values_of_a_header_that_is_a_list_are_joined():
    assert of((b"accept-encoding", b"br"), (b"accept-encoding", b"gzip")) == {b"accept-encoding": b"br, gzip"}
    assert of((b"accept-encoding", b"br"), (b"accept-encoding", b"br")) == {b"accept-encoding": b"br, br"}


@pytest.mark.parametrize(("second", "expected"), [(b"a", [(b"x-request-id", b"a")]), (b"b", [])])
def test_an_answer_does_not_repeat_an_id_with_several_values(second, expected):
    assert repeated_headers([(b"x-request-id", b"a"), (b"x-request-id", second)]) == expected
