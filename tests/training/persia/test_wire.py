"""Messages between roles, and what becomes of errors."""

import importlib
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import training.persia
from serving.errors import MissingExtraError
from tests.training.persia.cluster import free_address
from training.errors import DataError, SessionError
from training.persia.wire import NOTHING, Cluster, Message, Peer, RoleError, Server, decode, encode

DTYPES = st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint64])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_side=0, max_dims=3, max_side=4)))
FACTS = st.dictionaries(st.text(max_size=3), st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.none())


@given(sent=st.dictionaries(st.text(max_size=3), ARRAYS, max_size=4), facts=FACTS)
def test_a_message_comes_as_it_was_sent(sent, facts):
    came, subject = decode(encode(Message(sent, facts), "put"))

    assert subject == "put"
    assert came.facts == facts
    assert list(came.arrays) == list(sent)
    for name, array in sent.items():
        assert came.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(came.arrays[name], array)


def segments():
    """How many segments of shared memory this process has."""
    paths = Path("/proc/self/fd").iterdir()
    return sum("hotrow-persia" in os.readlink(path) for path in list(paths) if path.is_symlink())


def test_memory_is_used_again_only_when_all_arrays_of_a_message_are_gone():
    kept = [decode(encode(Message({"a": np.full(5, number), "b": np.zeros(0)}, {})))[0] for number in range(3)]
    before = segments()
    for number in range(20):
        del kept[0]
        arrays = decode(encode(Message({"a": np.full(5, number), "b": np.arange(number)}, {})))[0].arrays
        kept.append(arrays)
        assert [one["a"][0] for one in kept[2:]] == [number]

    assert segments() == before
    assert kept[-1]["b"].tolist() == list(range(19))


def test_memory_of_a_process_that_is_gone_is_reported():
    data = encode(NOTHING).replace(b"null]", b"[4194305, 3, 64]]")

    with pytest.raises(SessionError, match=r"cannot map the memory of process 4194305: .*No such file"):
        decode(data)


def refuse(_message):
    raise DataError("a", "b")


def fail(message):
    return message.arrays["missing"]


def test_errors_of_a_role_come_back_with_its_name(caplog):
    with free_address() as address:
        server = Server(address, {"refuse": refuse, "fail": fail})
        peer = Peer("embedding worker 3", address)
        with pytest.raises(RoleError, match=r"^embedding worker 3: a: b$"):
            peer.call("refuse")
        with pytest.raises(RoleError, match=r"^embedding worker 3: KeyError: 'missing'$"):
            peer.call("fail")
        with pytest.raises(RoleError, match="expected one of the methods refuse, fail, got other"):
            peer.call("other")
        server.stop()
        peer.close()

    assert "fail failed" in caplog.text


def test_calls_of_one_peer_run_at_the_same_time():
    first_waits = threading.Barrier(2)
    with free_address() as address:
        server = Server(address, {"meet": lambda message: (first_waits.wait(30), message)[1]})
        peer = Peer("NN worker", address)
        answers = [peer.start("meet", {"a": np.full(3, number)}) for number in range(2)]

        assert [answer.result().arrays["a"].tolist() for answer in answers] == [[0] * 3, [1] * 3]
        server.stop()
        peer.close()


def test_a_call_that_is_cut_off_is_reported():
    called, released = threading.Event(), threading.Event()
    with free_address() as address:
        server = Server(address, {"put": lambda message: (called.set(), released.wait(30), message)[2]})
        peer = Peer("NN worker", address)
        answer = peer.start("put")
        assert called.wait(30)
        assert not answer.is_done
        peer.close()
        with pytest.raises(RoleError, match=r"^NN worker: the call was cancelled$"):
            answer.result()
        with pytest.raises(RoleError, match=r"^NN worker: the call was cancelled$"):
            peer.call("put")
        another = Peer("NN worker", address)
        answer = another.start("put")
        server.stop()
        with pytest.raises(RoleError, match=r"^NN worker: "):
            answer.result()
        released.set()
        another.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x02\0\0\0{}", b"\x05"])
def test_what_is_no_message_ends_only_its_connection(data):
    with free_address() as address:
        server = Server(address, {"echo": lambda message: message})
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(data)
            with suppress(OSError):  # the server may have ended the connection
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        peer = Peer("NN worker", address)
        assert peer.call("echo", number=3).facts == {"number": 3}
        server.stop()
        peer.close()


def test_a_cluster_passes_through_the_environment(monkeypatch):
    cluster = Cluster(7, "e.yml", "g.yml", ("a:1", "a:2"), ("a:3",), "a:4", None)
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)

    assert Cluster.from_environment() == cluster


def test_a_missing_package_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "yaml" else name)
    with pytest.raises(
        MissingExtraError, match=r"training\.persia needs the package 'yaml': pip install 'hotrow\[persia\]'"
    ):
        importlib.reload(training.persia)
