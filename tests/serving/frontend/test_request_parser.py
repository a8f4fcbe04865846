"""The bytes of a connection become requests, however the network divides them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.frontend.http.request_parser import RefusedBytesError, RequestParser


class Requests:
    """Collects the requests that a parser finds: method, path, headers and body."""

    def __init__(self):
        self.found = []
        self.is_open = False

    def on_head(self, head):
        assert not self.is_open
        self.is_open = True
        self.found.append((head.method, head.path, dict(head.headers), b""))

    def on_body(self, body):
        *head, before = self.found[-1]
        self.found[-1] = (*head, before + body)

    def on_end(self):
        self.is_open = False


def parse(*pieces):
    """Return the requests in ``pieces``."""
    requests = Requests()
    parser = RequestParser(requests)
    for piece in pieces:
        begin = 0
        while begin < len(piece):
            whole = len(requests.found) - requests.is_open
            begin = parser.feed(piece, begin)
            assert len(requests.found) - requests.is_open <= whole + 1, "the parser stops at the end of each request"
    return requests.found


names = st.sampled_from(["a", "host", "x-y"])
values = st.text("abc \t:,", max_size=9).map(str.strip)
bodies = st.one_of(st.binary(max_size=40), st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]))


@st.composite
def requests(draw):
    """A request: its bytes, and what a parser finds in them."""
    headers = draw(st.dictionaries(names, values, max_size=3))
    body, form = draw(bodies), draw(st.sampled_from(["length", "chunks", "none"]))
    upgrade = draw(st.booleans())
    lines = [f"{name}: {value}".encode() for name, value in headers.items()]
    found = {name.encode(): value.encode() for name, value in headers.items()}
    if upgrade:
        lines += [b"Connection: upgrade", b"Upgrade: h2c"]
        found[b"connection"] = b"upgrade"
    sent = b""
    if form == "length":
        lines.append(b"Content-Length: %d" % len(body))
        found[b"content-length"] = b"%d" % len(body)
        sent = body
    elif form == "chunks":
        lines.append(b"Transfer-Encoding: chunked")
        found[b"transfer-encoding"] = b"chunked"
        cut = draw(st.integers(0, len(body)))
        chunks = [chunk for chunk in (body[:cut], body[cut:]) if chunk]
        sent = b"".join(b"%x;e=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n"
        sent += draw(st.sampled_from([b"", b"T: x\r\n"])) + b"\r\n"
    else:
        body = b""
    before = draw(st.sampled_from([b"", b"\r\n"]))
    lines = draw(st.permutations(lines))
    head = before + b"POST /p HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    return head + sent, ("POST", b"/p", found, body)


@given(sent=st.lists(requests(), min_size=1, max_size=4), data=st.data())
@settings(deadline=None, max_examples=30)
def test_requests_are_found_one_by_one_however_the_bytes_are_divided(sent, data):
    whole = b"".join(one for one, _ in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    assert parse(*pieces) == [expected for _, expected in sent]
    assert parse(*(bytes([one]) for one in whole)) == [expected for _, expected in sent]
    for cut in range(len(whole)):
        assert parse(whole[:cut], whole[cut:]) == [expected for _, expected in sent]


def test_trailers_are_not_headers():
    (request,) = parse(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Encoding: gzip\r\n\r\n")

    assert request == ("POST", b"/", {b"transfer-encoding": b"chunked"}, b"")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"Content-Length: 3\r\nContent-Length: 4\r\n", id="two lengths"),
        pytest.param(b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", id="a length and chunks"),
        pytest.param(b"Content-Length: 3, 3\r\n", id="a list of lengths"),
        pytest.param(b"Content-Length: " + b"9" * 30 + b"\r\n", id="a length beyond 64 bits"),
        pytest.param(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", id="chunks in chunks"),
        pytest.param(b"Transfer-Encoding: chunked, gzip\r\n", id="an end that is compressed"),
        pytest.param(b" a: b\r\n", id="a space before a name"),
        pytest.param(b"a b: c\r\n", id="a space in a name"),
        pytest.param(b"a: b\0\r\n", id="a null byte"),
    ],
)
def test_a_head_that_parsers_understand_differently_is_refused(head):
    with pytest.raises(RefusedBytesError) as refused:
        parse(b"POST / HTTP/1.1\r\n" + head + b"\r\nabcd")

    assert refused.value.code == 400


@pytest.mark.parametrize(
    "encoding",
    [b"gzip", b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked", b"identity", b", chunked"],
)
def test_a_body_in_another_transfer_encoding_than_chunks_is_refused(encoding):
    with pytest.raises(RefusedBytesError, match="Transfer-Encoding: expected chunked, got ") as refused:
        parse(b"POST / HTTP/1.1\r\nTransfer-Encoding: " + encoding + b"\r\n\r\n0\r\n\r\n")

    assert refused.value.code == 501


def test_chunks_in_http_1_0_are_refused():
    with pytest.raises(RefusedBytesError, match="expected HTTP/1\\.1, got HTTP/1\\.0") as refused:
        parse(b"POST / HTTP/1.0\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n")

    assert refused.value.code == 400


def test_a_fragment_is_refused_because_a_proxy_may_take_it_for_the_path():
    with pytest.raises(RefusedBytesError, match="the request's path has the character '#'"):
        parse(b"POST /v2/repository/models/dcn/unload#/infer HTTP/1.1\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"http://evil.com/v2", b"evil.com"),
        (b"http://user@evil.com:8000/v2", b"evil.com:8000"),
        (b"http://[::1]:80/v2", b"[::1]:80"),
        (b"/v2", b"localhost"),
    ],
)
def test_the_authority_of_an_absolute_target_replaces_the_host(target, host):
    [request] = parse(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nA: b\r\n\r\n")

    assert request == ("GET", b"/v2", {b"host": host, b"a": b"b"}, b"")
