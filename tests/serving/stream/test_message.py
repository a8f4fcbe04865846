"""Hotrow's own message format: golden bytes, round trips, and everything that is refused."""

import json
import logging
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.stream import (
    MOST_MESSAGE_BYTES,
    BadMessageError,
    Kind,
    UpdateMessage,
    decode,
    encode,
)
from serving.stream.message import REASONS

KEYS = np.array([7, -3], np.int64)
ROWS = np.array([[1.0, -2.0, 0.5], [0.0, 4.0, 127.0]], np.float32)
STAMPS = {"run": "a1", "publisher": "p0", "sequence": 12, "version": 3, "step": 400, "time_ms": 1_795_000_000_000}
UPSERT = UpdateMessage(Kind.UPSERT, "dcn", "user", KEYS, ROWS, **STAMPS)
HEADER = {"kind": "upsert", "model": "dcn", "table": "user"} | STAMPS | {"keys": 2, "dim": 3, "dtype": "float32"}
NO_KEYS = np.empty(0, np.int64)


def message_of(header, body, *, magic=b"HRUP", number=1, zero=0, header_bytes=None, checksum=None):
    """A message, written without Hotrow."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if header_bytes is None else header_bytes
    check = zlib.crc32(text + body) if checksum is None else checksum
    return struct.pack("<4sHHII", magic, number, zero, size, check) + text + body


KEY_BYTES = struct.pack("<2q", 7, -3)
BODY = KEY_BYTES + struct.pack("<6f", *ROWS.ravel())


def fields_of(message):
    return [
        getattr(message, name)
        for name in ("kind", "model", "table", "run", "publisher", "sequence", "version", "step", "time_ms")
    ]


def assert_equal(found, expected):
    assert fields_of(found) == fields_of(expected)
    assert found.keys.dtype == np.int64
    assert found.keys.tolist() == expected.keys.tolist()
    if expected.rows is None:
        assert found.rows is None
    else:
        assert found.rows.dtype == np.float32
        assert found.rows.shape == expected.rows.shape
        assert found.rows.tobytes() == expected.rows.tobytes()


def refusal(payload):
    with pytest.raises(BadMessageError) as caught:
        decode(payload)
    assert caught.value.reason in REASONS
    return caught.value.reason, str(caught.value)


def test_a_message_has_these_bytes():
    header = (
        b'{"kind":"upsert","model":"dcn","table":"user","run":"a1","publisher":"p0","sequence":12,"version":3,'
        b'"step":400,"time_ms":1795000000000,"keys":2,"dim":3,"dtype":"float32"}'
    )
    header += b" " * (-len(header) % 8)

    assert encode(UPSERT) == message_of(header, BODY)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        ("float32", struct.pack("<6f", *ROWS.ravel())),
        ("float16", struct.pack("<6e", *ROWS.ravel())),
        ("int8", struct.pack("<2f6b", 0.25, 1.0, 4, -8, 2, 0, 4, 127)),
    ],
)
@pytest.mark.parametrize("kind", [Kind.UPSERT, Kind.ACCUMULATE])
def test_bytes_that_another_program_wrote_are_read(kind, dtype, rows):
    found = decode(memoryview(message_of(HEADER | {"kind": kind.value, "dtype": dtype}, KEY_BYTES + rows)))

    assert_equal(found, UpdateMessage(kind, "dcn", "user", KEYS, ROWS, **STAMPS))


def test_deletes_and_barriers_have_no_rows():
    delete = {"kind": "delete", "model": "dcn", "table": "user", "keys": 2}
    barrier = {"kind": "barrier", "model": "dcn", "table": "", "keys": 0, "run": "a1"}

    assert_equal(decode(message_of(delete, KEY_BYTES)), UpdateMessage(Kind.DELETE, "dcn", "user", KEYS, None))
    assert_equal(decode(message_of(barrier, b"")), UpdateMessage(Kind.BARRIER, "dcn", "", NO_KEYS, None, run="a1"))


KEY = st.integers(-(2**63) + 2, 2**63 - 3)
NAME = st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)
NUMBER = st.none() | st.integers(0, 2**63 - 1)
TEXT = st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@st.composite
def messages(draw):
    kind = draw(st.sampled_from(Kind))
    keys = np.array(draw(st.lists(KEY, max_size=0 if kind == Kind.BARRIER else 20)), np.int64)
    rows = None
    if kind in (Kind.UPSERT, Kind.ACCUMULATE):
        dim = draw(st.integers(1, 5))
        value = st.floats(width=32, allow_nan=False, allow_infinity=False)
        values = draw(st.lists(value, min_size=keys.size * dim, max_size=keys.size * dim))
        rows = np.array(values, np.float32).reshape(keys.size, dim)
    texts = {"run": draw(TEXT), "publisher": draw(TEXT)}
    numbers = {name: draw(NUMBER) for name in ("sequence", "version", "step", "time_ms")}
    table = "" if kind == Kind.BARRIER else draw(NAME)
    return UpdateMessage(kind, draw(NAME.filter("stats".__ne__)), table, keys, rows, **texts, **numbers)


@settings(deadline=None)
@given(messages())
def test_what_is_encoded_is_decoded(message):
    assert_equal(decode(encode(message)), message)


@settings(deadline=None)
@given(messages().filter(lambda message: message.rows is not None))
def test_int8_rows_are_within_half_a_step(message):
    rows = decode(encode(message, "int8")).rows

    step = np.abs(message.rows).max(axis=1, initial=0)[:, None].astype(np.float64) / 127
    # the scale is rounded to float32, whose smallest value is 2^-149
    assert (np.abs(rows.astype(np.float64) - message.rows) <= step * 0.500_1 + 127 * 2.0**-149).all()


def test_float16_rows_are_rounded_to_the_nearest():
    rows = np.array([[0.1, 65_504.0], [1e-9, -3.3]], np.float32)

    found = decode(encode(UpdateMessage(Kind.UPSERT, "dcn", "user", KEYS, rows), "float16")).rows

    assert found.tolist() == rows.astype(np.float16).astype(np.float32).tolist()


def test_the_largest_float32_survives_int8():
    rows = np.full((1, 2), np.finfo(np.float32).max)

    found = decode(encode(UpdateMessage(Kind.UPSERT, "dcn", "user", KEYS[:1], rows), "int8")).rows

    np.testing.assert_allclose(found, rows, rtol=1e-6)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300))
@example(b"")
@example(b"HRUP")
def test_any_bytes_are_a_message_or_a_bad_message(payload):
    refusal(payload)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), message=messages(), dtype=st.sampled_from(["float32", "int8"]))
def test_a_message_with_a_changed_byte_is_refused(data, message, dtype):
    payload = bytearray(encode(message, dtype))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))

    refusal(bytes(payload))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(sorted(HEADER)), JSON | st.integers(0, 3)), st.binary(max_size=100))
def test_any_header_with_a_right_checksum_is_read_or_refused(changes, body):
    payload = message_of(HEADER | changes, body)
    try:
        decode(payload)
    except BadMessageError as err:
        assert err.reason in REASONS  # noqa: PT017 - some headers are right


@pytest.mark.parametrize(
    ("payload", "reason", "text"),
    [
        pytest.param(b"HRU", "format", "got b'HRU'", id="too short for the magic"),
        pytest.param(message_of(HEADER, BODY, magic=b"HRUQ"), "format", "got b'HRUQ'", id="another magic"),
        pytest.param(b"HCTR" + bytes(20), "format", "HPS's format", id="HPS's format"),
        pytest.param(b"HRUP" + bytes(11), "length", "at least 16 bytes, got 15", id="cut before the header"),
        pytest.param(message_of(HEADER, BODY, number=2), "format", "format 1, got 2", id="a later format"),
        pytest.param(message_of(HEADER, BODY, zero=1), "format", "zero at byte 6, got 1", id="not zero"),
        pytest.param(message_of(HEADER, BODY)[:40], "length", "at most 24 bytes, got", id="cut inside the header"),
        pytest.param(message_of(HEADER, BODY, header_bytes=2**32 - 1), "length", "4,294,967,295", id="a long header"),
        pytest.param(message_of(b" " * 65_537, BODY), "length", "at most 65,536 bytes, got 65,537", id="spaces"),
        pytest.param(message_of(HEADER, BODY, checksum=1), "checksum", "expected the checksum 00000001", id="checksum"),
        pytest.param(message_of(HEADER, BODY)[:-1], "checksum", "expected the checksum", id="cut inside the rows"),
        pytest.param(bytes(MOST_MESSAGE_BYTES + 1), "length", "at most 67,108,864 bytes", id="too long"),
    ],
)
def test_damage_is_refused_by_name(payload, reason, text):
    found, message = refusal(payload)

    assert found == reason
    assert text in message


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"{}", "kind: missing"),
        (b"[1]", "expected an object"),
        (b"\xff", "not UTF-8"),
        (b"{", "header: line 1"),
        (b'{"kind":"upsert","kind":"delete"}', "appears twice"),
        (b'{"kind":' + b"[" * 60_000, "nested too deeply"),
        (HEADER | {"kind": "replace"}, 'kind: expected one of "upsert"'),
        (HEADER | {"kind": 1}, "kind: expected one of"),
        (HEADER | {"model": "a/b"}, 'model: expected a model\'s name, got "a/b"'),
        (HEADER | {"model": ""}, "model: expected a name"),
        (HEADER | {"table": ""}, "table: expected a name"),
        (HEADER | {"table": "\x1b[1m"}, 'table: expected a table\'s name, got "\\u001b[1m"'),
        (HEADER | {"run": None}, "run: expected a name, got null"),
        (HEADER | {"run": 3}, "run: expected a name, got 3"),
        (HEADER | {"sequence": -1}, "sequence: expected an integer from 0"),
        (HEADER | {"step": 1.0}, "step: expected an integer, got 1.0"),
        (HEADER | {"step": True}, "step: expected an integer, got true"),
        (HEADER | {"version": 2**63}, "version: expected an integer from 0"),
        (HEADER | {"time_ms": "now"}, "time_ms: expected an integer"),
        (HEADER | {"keys": -1}, "keys: expected an integer from 0"),
        (HEADER | {"dim": 0}, "dim: expected an integer from 1"),
        (HEADER | {"dtype": "bfloat16"}, "dtype: expected one of"),
        (HEADER | {"kind": "delete"}, "dim: a delete has no rows"),
        ({"kind": "barrier", "model": "dcn", "keys": 1}, "a barrier has neither keys nor a table"),
        ({"kind": "barrier", "model": "dcn", "keys": 0, "table": "user"}, "a barrier has neither keys nor a table"),
    ],
)
def test_a_wrong_header_is_refused_and_the_place_is_named(header, text):
    reason, message = refusal(message_of(header, BODY))

    assert reason == "header"
    assert text in message


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        ({"keys": 3}, "length", "expected 60 bytes of 3 keys"),
        ({"keys": 2**62}, "length", "expected 92,233,720,368,547,758,080 bytes"),
        ({"dim": 4}, "length", "expected 48 bytes of 2 keys"),
        ({"dim": 65_537}, "dim", "at most 65,536, got 65537"),
        ({"dim": 2**62}, "dim", "at most 65,536"),
        ({"dtype": "float16"}, "length", "expected 28 bytes"),
        ({"kind": "accumulate", "keys": 2049}, "length", "at most 2,048 keys of an accumulate, got 2,049"),
    ],
)
def test_arrays_of_another_size_are_refused_before_memory_is_taken(change, reason, text):
    found, message = refusal(message_of(HEADER | change, BODY))

    assert found == reason
    assert text in message


@pytest.mark.parametrize("key", [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1])
def test_a_reserved_key_is_refused(key):
    payload = message_of(HEADER | {"keys": 1, "dim": 1}, struct.pack("<qf", key, 1.0))

    assert refusal(payload) == (
        "key",
        f"key {key} at position 0 is reserved: expected -9223372036854775806 to 9223372036854775805",
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("dtype", "rows"), [("float32", lambda v: [0, v]), ("float16", lambda v: [0, v]), ("int8", lambda v: v)]
)
def test_a_value_that_is_no_number_is_refused(value, dtype, rows):
    if dtype == "int8":
        body = struct.pack("<qf2b", 5, value, 1, 1)
    else:
        body = struct.pack("<q", 5) + np.array(rows(value), dtype).tobytes()

    reason, text = refusal(message_of(HEADER | {"keys": 1, "dim": 2, "dtype": dtype}, body))

    assert reason == "value"
    assert "row 0, of key 5: column" in text


def test_an_int8_row_that_overflows_is_refused():
    body = struct.pack("<qfb", 5, 3e38, 127)

    assert refusal(message_of(HEADER | {"keys": 1, "dim": 1, "dtype": "int8"}, body))[0] == "value"


def test_members_of_a_later_release_are_ignored_and_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            decode(message_of(HEADER | {"color": "red"}, BODY))

    assert len(caplog.messages) == 1
    assert "ignored color" in caplog.text


def upsert(keys=KEYS, rows=ROWS, kind=Kind.UPSERT, **change):
    return UpdateMessage(kind, **({"model": "dcn", "table": "user"} | change), keys=keys, rows=rows)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (upsert(keys=KEYS.astype(np.int32)), "key"),
        (upsert(keys=KEYS[:, None]), "key"),
        (upsert(keys=np.array([0, 2**63 - 1])), "key"),
        (upsert(rows=ROWS.astype(np.float64)), "dim"),
        (upsert(rows=ROWS[0]), "dim"),
        (upsert(rows=ROWS[:1]), "dim"),
        (upsert(rows=None), "length"),
        (upsert(kind=Kind.DELETE), "length"),
        (upsert(kind=Kind.BARRIER, table="", rows=None), "header"),
        (upsert(rows=ROWS * np.nan), "value"),
        (upsert(model=""), "header"),
        (upsert(table=""), "header"),
        (upsert(run="\ud800"), "header"),
        (upsert(step=-1), "header"),
        (
            upsert(
                np.arange(2049),
                np.zeros((2049, 1), np.float32),
                Kind.ACCUMULATE,
            ),
            "length",
        ),
        (upsert(np.arange(2**18), np.zeros((2**18, 64), np.float32)), "length"),
    ],
)
def test_a_message_that_would_be_refused_is_not_encoded(message, reason):
    with pytest.raises(BadMessageError) as caught:
        encode(message)

    assert caught.value.reason == reason


def test_a_value_too_large_for_float16_is_not_encoded():
    with pytest.raises(BadMessageError, match="row 1, of key -3: column 2 is 70000, which float16 cannot hold"):
        encode(upsert(rows=np.array([[0, 0, 0], [0, 0, 70_000]], np.float32)), "float16")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="expected float32, float16 or int8, got 'bf16'"):
        encode(UPSERT, "bf16")
