"""Messages between roles, and what becomes of errors."""

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import training.persia
from serving.errors import MissingExtraError
from tests.training.persia.cluster import free_address
from training.errors import DataError
from training.persia.wire import Cluster, Message, Peer, RoleError, decode, encode, serve

DTYPES = st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint64])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_side=0, max_dims=3, max_side=4)))
FACTS = st.dictionaries(st.text(max_size=3), st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.none())


@given(sent=st.dictionaries(st.text(max_size=3), ARRAYS, max_size=4), facts=FACTS)
def test_a_message_comes_as_it_was_sent(sent, facts):
    came = decode(encode(Message(sent, facts)))

    assert came.facts == facts
    assert list(came.arrays) == list(sent)
    for name, array in sent.items():
        assert came.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(came.arrays[name], array)


def refuse(_message):
    raise DataError("a", "b")


def fail(message):
    return message.arrays["missing"]


def test_errors_of_a_role_come_back_with_its_name(caplog):
    with free_address() as address:
        server = serve(address, {"refuse": refuse, "fail": fail}, 1)
        peer = Peer("embedding worker 3", address)
        with pytest.raises(RoleError, match=r"^embedding worker 3: a: b$"):
            peer.call("refuse")
        with pytest.raises(RoleError, match=r"^embedding worker 3: KeyError: 'missing'$"):
            peer.call("fail")
        with pytest.raises(RoleError, match=r"^embedding worker 3: Method not found!$"):
            peer.call("other")
        server.stop(None).wait()
        peer.close()

    assert "fail failed" in caplog.text


def test_a_call_that_is_cut_off_is_reported():
    with free_address() as address:
        peer = Peer("NN worker", address)
        answer = peer.start("put")
        assert not answer.is_done
        peer.close()
        with pytest.raises(RoleError, match=r"^NN worker: "):
            answer.result()


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
