"""What every kind of log does: order, positions, loss that is an error, outages."""

import threading
import time

import pytest

from serving.errors import PositionLostError, SourceUnreachableError
from serving.stream.source import check_sum

WAIT_S = 20.0


def send(sink, payloads, key_group=0):
    for payload in payloads:
        sink.send(payload, key_group)
    return sink.flush()


def read(source, count):
    """The next ``count`` records, and no more."""
    records = []
    deadline = time.monotonic() + WAIT_S
    while len(records) < count and time.monotonic() < deadline:
        records += source.poll(1.0)
    assert len(records) == count
    return records


def numbered(count, begin=0):
    return [b"message %d" % number for number in range(begin, begin + count)]


def test_messages_arrive_in_order_from_the_earliest(log, sink, source):
    before_ms = time.time() * 1000
    end = send(sink, numbered(20))

    records = read(source, 20)

    assert [record.payload for record in records] == numbered(20)
    assert {record.partition for record in records} == {log.partition}
    assert end == {log.partition: records[-1].position}
    assert all(before_ms - 1000 < record.time_ms < before_ms + 60_000 for record in records)
    assert {record.message_key for record in records} == {None}


def test_reading_goes_on_from_any_position(log, sink, source):
    send(sink, numbered(5))
    records = read(source, 5)

    for index, record in enumerate(records):
        source.start({log.partition: record.position})
        send(sink, [b"next %d" % index])

        rest = read(source, 5 - index + index)

        assert [one.payload for one in rest][: 4 - index] == numbered(4 - index, index + 1)
        assert [one.payload for one in rest][4 - index :] == [b"next %d" % after for after in range(index + 1)]


def test_the_position_of_flush_is_that_of_the_next_message(log, sink, source):
    end = send(sink, numbered(3))
    source.start(end)
    send(sink, [b"later"])

    assert [record.payload for record in read(source, 1)] == [b"later"]


def test_a_sink_that_sent_nothing_has_no_positions(sink):
    assert sink.flush() == {}


def test_another_sink_goes_on_where_the_first_ended(log, sink, source):
    send(sink, numbered(2))
    sink.close()
    other = log.sink()
    send(other, numbered(2, 2))
    other.close()

    assert [record.payload for record in read(source, 4)] == numbered(4)


def test_any_bytes_arrive_as_they_are(sink, source):
    payloads = [bytes(range(256)), b"\0", b"\r\n" * 10, bytes(900_000)]
    send(sink, payloads)

    assert [record.payload for record in read(source, 4)] == payloads


def test_positions_of_other_logs_are_ignored(log, sink, source):
    source.start({"another log": "77", "another/0": "3"})
    send(sink, numbered(2))

    assert [record.payload for record in read(source, 2)] == numbered(2)


def test_poll_returns_nothing_when_nothing_came(log, sink, source):
    source.start(send(sink, numbered(1)))

    begin = time.monotonic()
    assert source.poll(0.05) == []
    assert time.monotonic() - begin < WAIT_S


def test_a_waiting_poll_gets_a_new_message(log, sink, source):
    source.start(send(sink, numbered(1)))
    source.poll(0.0)
    received = []
    waiting = threading.Thread(target=lambda: received.extend(read(source, 1)))
    waiting.start()

    send(sink, [b"new"])

    waiting.join(WAIT_S)
    assert [record.payload for record in received] == [b"new"]


def test_lag_counts_what_was_not_polled(log, sink, source):
    send(sink, numbered(3))
    records = read(source, 3)

    assert source.lag()[log.partition] == 0

    source.start({log.partition: records[0].position})
    assert source.lag().get(log.partition, 2) == 2
    read(source, 2)
    assert source.lag()[log.partition] == 0


def test_a_position_whose_next_records_are_gone_is_an_error_until_another_is_given(log, sink, source):
    send(sink, numbered(6))
    records = read(source, 6)
    log.lose(sink)
    send(sink, [b"after"])
    source.start({log.partition: records[0].position})

    for _ in range(2):
        with pytest.raises(PositionLostError, match="are gone") as caught:
            read(source, 1)
        assert caught.value.partition == log.partition
        assert caught.value.wanted == records[0].position

    source.start({})
    found = []
    while not found or found[-1].payload != b"after":
        found += source.poll(1.0)


def test_a_log_that_is_shorter_than_the_position_is_an_error(log, sink, source):
    send(sink, numbered(2))
    source.start({log.partition: log.beyond})

    for _ in range(2):
        with pytest.raises(PositionLostError, match="are gone") as caught:
            read(source, 1)
        assert caught.value.wanted == log.beyond


def test_reading_goes_on_after_the_record_that_was_read(log, sink, source):
    end = send(sink, numbered(3))
    source.start(end, {log.partition: check_sum(b"message 2")})
    send(sink, [b"later"])

    assert [record.payload for record in read(source, 1)] == [b"later"]


def test_a_log_that_was_emptied_is_an_error_even_if_it_has_grown_again(log, sink, source):
    end = send(sink, numbered(2))
    source.close()
    log.empty()
    source = log.source()
    source.start(end)

    with pytest.raises(PositionLostError, match="are gone"):
        read(source, 1)

    other = log.sink()
    send(other, numbered(4, begin=10))
    other.close()
    source.start(end, {log.partition: check_sum(b"message 1")})

    for _ in range(2):
        with pytest.raises(PositionLostError, match=r"was recreated|are gone"):
            read(source, 1)
    source.close()


@pytest.mark.parametrize("text", ["", "x", "-5", "1.5", "٣"])
def test_a_text_that_is_no_position_is_an_error(log, source, text):
    with pytest.raises(PositionLostError, match="after position"):
        source.start({log.partition: text})


def test_a_log_that_is_away_is_an_error_and_reading_goes_on_when_it_is_back(log, sink):
    send(sink, numbered(2))
    source = log.source(impatient=True)
    source.start({})
    records = read(source, 2)
    log.go_away()

    for _ in range(2):
        with pytest.raises(SourceUnreachableError):
            read(source, 1)

    log.come_back()
    other = log.sink()
    send(other, [b"after"])
    other.close()
    found = []
    deadline = time.monotonic() + WAIT_S
    while not found and time.monotonic() < deadline:
        try:
            found = source.poll(0.5)
        except SourceUnreachableError:  # the client has not noticed yet
            continue
    assert [record.payload for record in found] == [b"after"]
    assert found[0].position > records[-1].position
    source.close()


def test_close_ends_a_waiting_poll(source):
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(source.poll(WAIT_S)))
    begin = time.monotonic()
    waiting.start()

    source.close()

    waiting.join(WAIT_S)
    assert ended == [[]]
    assert time.monotonic() - begin < WAIT_S / 2
    source.close()
    assert source.poll(1.0) == []


def test_commit_changes_nothing_that_is_read(log, sink, source):
    end = send(sink, numbered(3))
    source.commit(end)

    assert [record.payload for record in read(source, 3)] == numbered(3)
    source.commit({"another/0": "3"})
