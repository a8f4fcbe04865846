"""Reading a body: whole, in chunks, compressed, too large, cut short, too slow."""

import asyncio
import gzip
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import OverloadedError, PayloadTooLargeError, RequestError, UnsupportedEncodingError
from serving.frontend.http.body import Arriving, ClientDisconnectedError, decompress, read_body
from serving.frontend.limits import Limits

LIMITS = Limits(max_body_bytes=100, body_timeout_s=5)


def read(chunks, headers=None, limits=LIMITS, end=None):
    """Feed ``chunks`` to read_body, and then ``end``; a chunk of None stands for a client that goes away."""
    messages = [
        {"type": "http.disconnect"}
        if chunk is None
        else {"type": "http.request", "body": chunk, "more_body": end is not None or index + 1 < len(chunks)}
        for index, chunk in enumerate(chunks)
    ]

    async def receive():
        return messages.pop(0) if messages else end or await asyncio.Event().wait()

    body = asyncio.run(read_body(receive, headers or {}, limits, Arriving(limits)))
    return decompress(body, headers or {}, limits.max_body_bytes)


@given(chunks=st.lists(st.binary(max_size=9), min_size=1, max_size=9))
@settings(deadline=None, max_examples=30)
def test_chunks_become_one_body(chunks):
    assert read(chunks) == b"".join(chunks)


def test_a_body_of_exactly_the_limit_is_accepted():
    assert read([b"x" * 100], {b"content-length": b"100"}) == b"x" * 100


@pytest.mark.parametrize("declared", [b"101", b"9" * 30])
def test_a_declared_length_beyond_the_limit_is_refused_before_anything_is_read(declared):
    with pytest.raises(PayloadTooLargeError, match="the server accepts 100"):
        read([], {b"content-length": declared})


def test_a_body_without_a_declared_length_is_refused_as_soon_as_it_is_beyond_the_limit():
    with pytest.raises(PayloadTooLargeError):
        read([b"x" * 60, b"x" * 60, b"never asked for", b""])


def test_one_chunk_beyond_the_limit_is_refused():
    with pytest.raises(PayloadTooLargeError):
        read([b"x" * 101])


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
class TestCompression:
    def test_a_compressed_body_is_decompressed(self, encoding, compress):
        assert read([compress(b"y" * 100)], {b"content-encoding": encoding}) == b"y" * 100

    def test_the_limit_holds_for_the_decompressed_body(self, encoding, compress):
        with pytest.raises(PayloadTooLargeError, match="once decompressed"):
            read([compress(b"y" * 101)], {b"content-encoding": encoding})

    def test_a_bomb_is_not_unpacked(self, encoding, compress):
        bomb = compress(bytes(10_000_000))
        with pytest.raises(PayloadTooLargeError, match="once decompressed"):
            read([bomb], {b"content-encoding": encoding}, Limits(max_body_bytes=len(bomb)))

    def test_a_truncated_stream_is_refused(self, encoding, compress):
        with pytest.raises(RequestError, match="ends too early"):
            read([compress(b"abc")[:-1]], {b"content-encoding": encoding})

    def test_bytes_after_the_stream_are_refused(self, encoding, compress):
        with pytest.raises(RequestError, match="bytes follow its end"):
            read([compress(b"abc") + b"!"], {b"content-encoding": encoding})

    def test_plain_bytes_are_refused(self, encoding, compress):
        with pytest.raises(RequestError, match=f"not {encoding.decode()}"):
            read([b"plain"], {b"content-encoding": encoding})


@given(parts=st.lists(st.binary(max_size=20), min_size=1, max_size=4), level=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_a_gzip_body_may_have_several_members(parts, level):
    body = b"".join(gzip.compress(part, level) for part in parts)

    assert decompress(body, {b"content-encoding": b"gzip"}, 80) == b"".join(parts)


@pytest.mark.parametrize("size", [4095, 4096, 4097, 100_000])
def test_a_compressed_body_of_many_pieces_is_decompressed(size):
    plain = random.Random(size).randbytes(size)

    assert decompress(gzip.compress(plain, 0) * 2, {b"content-encoding": b"gzip"}, 2 * size) == 2 * plain


def test_the_limit_holds_for_all_members_together():
    body = gzip.compress(b"y" * 50) + gzip.compress(b"y" * 51)

    with pytest.raises(PayloadTooLargeError, match="once decompressed"):
        read([body], {b"content-encoding": b"gzip"})


def test_a_truncated_second_member_is_refused():
    with pytest.raises(RequestError, match="ends too early"):
        read([gzip.compress(b"abc") + gzip.compress(b"def")[:-1]], {b"content-encoding": b"gzip"})


def test_deflate_has_no_second_member():
    with pytest.raises(RequestError, match="bytes follow its end"):
        read([zlib.compress(b"abc") * 2], {b"content-encoding": b"deflate"})


@given(stream=st.binary(max_size=60), encoding=st.sampled_from([b"gzip", b"deflate"]))
@settings(deadline=None, max_examples=30)
def test_random_bytes_are_not_a_compressed_stream(stream, encoding):
    with pytest.raises(RequestError):
        read([stream], {b"content-encoding": encoding})


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"gzip, deflate", b"\xff"])
def test_another_encoding_is_refused_before_anything_is_read(encoding):
    with pytest.raises(UnsupportedEncodingError, match="expected gzip, deflate or identity"):
        read([], {b"content-encoding": encoding})


@pytest.mark.parametrize("encoding", [b"identity", b" GZIP "])
def test_the_encodings_name_is_read_as_http_says(encoding):
    body = gzip.compress(b"z") if b"GZIP" in encoding else b"z"
    assert read([body], {b"content-encoding": encoding}) == b"z"


def test_a_body_cut_short_is_refused_with_the_size_that_arrived():
    with pytest.raises(ClientDisconnectedError, match="cut short after 3 of 90 bytes"):
        read([b"a", b"bc"], {b"content-length": b"90"}, end={"type": "http.disconnect"})


@pytest.mark.parametrize("chunks", [[None], [b"a", None]])
def test_a_client_that_goes_away_ends_the_wait(chunks):
    with pytest.raises(ClientDisconnectedError):
        read([*chunks, b""] if len(chunks) == 1 else [b"a", None, b""])


@pytest.mark.parametrize("sent", [[], [b"a"]], ids=["never begins", "never ends"])
def test_a_body_that_does_not_arrive_is_given_up(sent):
    chunks = list(sent)

    async def receive():
        if chunks:
            return {"type": "http.request", "body": chunks.pop(), "more_body": True}
        return await asyncio.Event().wait()

    async def stalled():
        async with asyncio.timeout(30):
            limits = Limits(body_timeout_s=0.01)
            await read_body(receive, {b"content-length": b"9"}, limits, Arriving(limits))

    with pytest.raises(RequestError, match=r"did not arrive within 0\.01 s"):
        asyncio.run(stalled())


def test_each_part_of_a_large_body_has_the_time_of_a_body():
    parts = [bytes(100), bytes(150)]

    async def receive():
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": True}
        return await asyncio.Event().wait()

    limits = Limits(body_timeout_s=0.01, body_part_bytes=100)
    with pytest.raises(RequestError, match=r"did not arrive within 0\.03 s"):
        asyncio.run(read_body(receive, {}, limits, Arriving(limits)))


class TestArriving:
    """Bodies of at most 100 bytes; together they may hold 200 while they arrive."""

    limits = Limits(max_body_bytes=100, max_arriving_bytes=200)

    def read_all(self, *bodies, arriving=None):
        """Read bodies, each a list of chunks, at the same time; return the outcome of each."""
        arriving = arriving or Arriving(self.limits)

        async def read_one(chunks):
            left = list(chunks)

            async def receive():
                await asyncio.sleep(0)  # let the others run
                chunk = left.pop(0)
                if chunk is None:
                    return {"type": "http.disconnect"}
                return {"type": "http.request", "body": chunk, "more_body": bool(left)}

            return await read_body(receive, {}, self.limits, arriving)

        async def read_them():
            return await asyncio.gather(*map(read_one, bodies), return_exceptions=True)

        return asyncio.run(read_them())

    def test_bodies_that_together_hold_no_more_than_the_limit_arrive(self):
        first, second = self.read_all([b"a" * 50, b"b" * 50], [b"c" * 50, b"d" * 50])

        assert (len(first), len(second)) == (100, 100)

    def test_the_body_that_has_been_arriving_longest_makes_room_for_others(self):
        slow = [b"a" * 90, *[b""] * 9, b"b"]

        outcomes = self.read_all(slow, slow, [b"c" * 90, b"d"])

        assert [type(outcome) for outcome in outcomes] == [OverloadedError, bytes, bytes]
        assert str(outcomes[0]) == "more than 200 bytes of bodies are arriving; this body has been arriving longest"

    @pytest.mark.parametrize(
        "ends",
        [[b"a" * 60, b"b"], [b"a" * 60, None], [b"a" * 60, b"b" * 60, b"never read"], [b"a" * 201, b"b"]],
        ids=["there", "the client goes away", "too large", "no room"],
    )
    def test_a_body_frees_its_capacity_however_it_ends(self, ends):
        arriving = Arriving(self.limits)
        for _ in range(9):
            self.read_all(ends, arriving=arriving)

        outcomes = self.read_all(*[[b"a" * 50, b"b" * 50]] * 2, arriving=arriving)

        assert outcomes == [b"a" * 50 + b"b" * 50] * 2
