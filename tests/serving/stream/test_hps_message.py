"""HPS's message format: golden bytes that ``struct`` writes, and everything that is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.stream import BadMessageError, Kind, decode_hps, encode_hps
from serving.stream.hps_message import hps_topic

TOPIC = "hps_et.dcn.user.v2"
KEYS = np.array([1, 2**32 - 1], np.int64)
ROWS = np.array([[1.5, -2.0], [0.25, 8.0]], np.float32)
GOLDEN = {
    8: struct.pack("<4sI q2f q2f", b"HCTR", 8, 1, 1.5, -2.0, 2**32 - 1, 0.25, 8.0),
    4: struct.pack("<4sI I2f I2f", b"HCTR", 8, 1, 1.5, -2.0, 2**32 - 1, 0.25, 8.0),
}


@pytest.mark.parametrize("key_bytes", [8, 4])
def test_messages_have_the_bytes_of_hps(key_bytes):
    assert encode_hps(KEYS, ROWS, key_bytes) == [GOLDEN[key_bytes]]

    found = decode_hps(memoryview(GOLDEN[key_bytes]), TOPIC, key_bytes, None)

    assert (found.kind, found.model, found.table) == (Kind.UPSERT, "dcn", "user.v2")
    assert (found.run, found.publisher, found.sequence) == (None, None, None)
    assert found.keys.tolist() == KEYS.tolist()
    assert found.rows.tolist() == ROWS.tolist()


def test_a_topic_is_the_tables_tag():
    assert hps_topic("dcn", "user.v2") == TOPIC


@pytest.mark.parametrize(("dim", "count"), [(1, 30_000), (1000, 100), (65_532, 2)])
def test_a_payload_has_at_most_256_kib(dim, count):
    keys = np.arange(count)
    rows = np.repeat(keys[:, None], dim, axis=1).astype(np.float32)

    payloads = encode_hps(keys, rows, 8)
    found = [decode_hps(payload, TOPIC, 8, None) for payload in payloads]

    assert max(map(len, payloads)) <= 256 * 1024
    assert np.concatenate([one.keys for one in found]).tolist() == keys.tolist()
    assert (np.concatenate([one.rows for one in found]) == rows).all()


def test_no_keys_are_no_payload():
    assert encode_hps(KEYS[:0], ROWS[:0], 8) == []


@pytest.mark.parametrize("payload", [b"", struct.pack("<4sI", b"HCTR", 8)], ids=["tombstone", "beacon"])
def test_beacons_and_tombstones_change_nothing(payload):
    assert decode_hps(payload, TOPIC, 8, None) is None


@pytest.mark.parametrize(
    ("payload", "topic", "message_key", "reason", "text"),
    [
        (GOLDEN[8], TOPIC, b"k", "format", "without a key, got a key of 1 bytes"),
        (b"HRUP" + bytes(30), TOPIC, None, "format", "begin with HCTR, got b'HRUP'"),
        (b"HCTR\0", TOPIC, None, "length", "at least 8 bytes, got 5"),
        (GOLDEN[8][:-1], TOPIC, None, "length", "pairs of 16 bytes after 8 bytes, got 31 bytes"),
        (GOLDEN[4], TOPIC, None, "length", "pairs of 16 bytes after 8 bytes, got 24 bytes"),
        (struct.pack("<4sIq", b"HCTR", 0, 1), TOPIC, None, "dim", "in fours, got 0"),
        (struct.pack("<4sIq6s", b"HCTR", 6, 1, b""), TOPIC, None, "dim", "in fours, got 6"),
        (struct.pack("<4sIq", b"HCTR", 2**32 - 4, 1), TOPIC, None, "dim", "got 4,294,967,292"),
        (struct.pack("<4sIqf", b"HCTR", 4, 2**63 - 1, 1.0), TOPIC, None, "key", "is reserved"),
        (struct.pack("<4sIqf", b"HCTR", 4, 3, np.nan), TOPIC, None, "value", "row 0, of key 3: column 0 is nan"),
        (bytes((64 << 20) + 1), TOPIC, None, "length", "at most 67,108,864 bytes"),
        (GOLDEN[8], "hotrow.dcn", None, "format", "expected a topic hps_et.<model>.<table>, got 'hotrow.dcn'"),
        (GOLDEN[8], "hps_et.dcn", None, "format", "expected a topic"),
        (GOLDEN[8], "hps_et.d/n.user", None, "format", "expected a topic"),
    ],
)
def test_other_messages_are_refused_by_name(payload, topic, message_key, reason, text):
    with pytest.raises(BadMessageError) as caught:
        decode_hps(payload, topic, 8, message_key)

    assert caught.value.reason == reason
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "rows", "key_bytes", "reason"),
    [
        ([-1], [[1.0]], 4, "key"),
        ([2**32], [[1.0]], 4, "key"),
        ([2**63 - 1], [[1.0]], 8, "key"),
        ([1], [[np.inf]], 8, "value"),
        ([1], [[]], 8, "dim"),
        ([1], [[0.0] * 65_533], 8, "dim"),
    ],
)
def test_what_hps_could_not_read_is_not_encoded(keys, rows, key_bytes, reason):
    with pytest.raises(BadMessageError) as caught:
        encode_hps(np.array(keys, np.int64), np.array(rows, np.float32), key_bytes)

    assert caught.value.reason == reason


@settings(deadline=None, max_examples=100)
@given(
    start=st.sampled_from([b"", b"HCTR", GOLDEN[8][:8]]), rest=st.binary(max_size=80), key_bytes=st.sampled_from([4, 8])
)
def test_any_bytes_are_a_message_or_a_bad_message(start, rest, key_bytes):
    try:
        found = decode_hps(start + rest, TOPIC, key_bytes, None)
    except BadMessageError:
        return

    assert found is None or encode_hps(found.keys, found.rows, key_bytes)[0] == start + rest
