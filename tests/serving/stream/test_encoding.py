"""Changes as messages: keys of one group, bounded messages, numbers, and what a format cannot hold."""

import numpy as np
import pytest

from serving.stream import BadMessageError, Kind, MessageEncoder, decode, decode_hps, key_groups

KEYS = np.arange(-3000, 30_000)
ROWS = np.random.default_rng(0).normal(size=(KEYS.size, 3)).astype(np.float32)


def test_a_message_has_keys_of_one_group_in_order_and_at_most_8192():
    encoder = MessageEncoder("dcn", run="r", publisher="p", sequence=7)
    group_of = dict(zip(KEYS.tolist(), key_groups(KEYS).tolist(), strict=True))

    encoded = list(encoder.upserts("user", KEYS, ROWS, step=5, time_ms=9))
    messages = [decode(one.payload) for one in encoded]

    assert [one.sequence for one in messages] == list(range(7, 7 + len(messages)))
    assert encoder.sequence == 7 + len(messages)
    found = {}
    for one, message in zip(encoded, messages, strict=True):
        assert {group_of[key] for key in message.keys.tolist()} == {one.key_group}
        assert message.keys.size <= 8192
        assert (message.keys[1:] > message.keys[:-1]).all()
        assert (message.kind, message.model, message.table) == (Kind.UPSERT, "dcn", "user")
        assert (message.run, message.publisher, message.step, message.time_ms) == ("r", "p", 5, 9)
        assert one.topic is None
        found |= dict(zip(message.keys.tolist(), message.rows.tolist(), strict=True))
    assert found == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1757), ("float16", 3435), ("int8", 6569)])
def test_messages_of_long_rows_stay_below_a_megabyte(dtype, most):
    keys, rows = np.flatnonzero(key_groups(np.arange(60_000)) == 0), np.ones((60_000, 125), np.float32)

    encoded = list(MessageEncoder("dcn", dtype=dtype).upserts("user", keys, rows[: keys.size]))

    assert max(len(one.payload) for one in encoded) < 1_000_000
    assert max(decode(one.payload).keys.size for one in encoded) == most
    assert decode(encoded[0].payload).sequence is None


def test_deletes_have_keys_and_no_rows():
    messages = [decode(delete.payload) for delete in MessageEncoder("dcn", sequence=1).deletes("user", KEYS, step=2)]

    assert {message.kind for message in messages} == {Kind.DELETE}
    assert sorted(np.concatenate([message.keys for message in messages])) == KEYS.tolist()


@pytest.mark.parametrize("key_bytes", [4, 8])
def test_hps_messages_name_the_table_by_their_topic_and_have_at_most_256_kib(key_bytes):
    keys, rows = KEYS[KEYS >= 0], ROWS[KEYS >= 0]
    encoded = list(MessageEncoder("dcn", "hps", key_bytes=key_bytes).upserts("user", keys, rows))

    assert {one.topic for one in encoded} == {"hps_et.dcn.user"}
    assert max(len(one.payload) for one in encoded) <= 256 << 10
    messages = [decode_hps(one.payload, one.topic, key_bytes) for one in encoded]
    found = {
        key: row for message in messages for key, row in zip(message.keys.tolist(), message.rows.tolist(), strict=True)
    }
    assert found == dict(zip(keys.tolist(), rows.tolist(), strict=True))


def test_hps_messages_cannot_delete():
    with pytest.raises(ValueError, match="HPS's format cannot delete keys"):
        list(MessageEncoder("dcn", "hps").deletes("user", KEYS))


@pytest.mark.parametrize(
    ("options", "key", "value", "expected"),
    [
        ({}, 5, np.nan, "table user: row 0, of key 5: column 1 is nan"),
        ({"dtype": "float16"}, 5, 7e4, "table user: row 0, of key 5: column 1 is 70000, which float16 cannot hold"),
        ({"message_format": "hps", "key_bytes": 4}, -5, 1, "table user: key -5 at position 0 is not a uint32"),
        ({}, 2**63 - 1, 1, "table user: key 9223372036854775807 at position 0 is reserved"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_with_the_table(options, key, value, expected):
    with pytest.raises(BadMessageError, match=expected):
        list(MessageEncoder("dcn", **options).upserts("user", np.array([key]), np.array([[0, value]], np.float32)))
