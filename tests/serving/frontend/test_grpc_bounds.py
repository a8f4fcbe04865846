"""What clients can make the gRPC server hold, and for how long. The clients send frames as no library would."""

import asyncio
import contextlib
import gc
import json
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.frontend.batcher import Batching
from serving.frontend.front_end import FrontEnd, Settings
from serving.frontend.grpc import GrpcServer
from serving.frontend.limits import Limits
from serving.frontend.tokens import INFER as INFER_SCOPE
from serving.frontend.tokens import Tokens, add_token
from serving.repository import ModelRepository
from serving.session import InferenceSession
from tests.e2e.kserve_requests import DATATYPES, request_of
from tests.serving.frontend.raw_http2 import INFER, PING, RST_STREAM, STREAM, RawClient, message_of
from tests.tools.tiny_model import TinyModel

MIB = 1 << 20
_ENHANCE_YOUR_CALM = 11


@pytest.fixture(scope="module")
def model():
    return TinyModel()


@pytest.fixture(scope="module")
def repository(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("repository")
    model.write(path, "tiny")
    with ModelRepository(path) as repository:
        repository.load()
        yield repository


@pytest.fixture
def serve(repository):
    """Serve with some limits, and return the address."""
    with contextlib.ExitStack() as stack:
        yield lambda tokens=None, **limits: stack.enter_context(serving(repository, Limits(**limits), tokens))[0]


@contextlib.contextmanager
def serving(repository, limits, tokens=None, **settings):
    """Serve on an event loop of its own; yield the address and the counters of requests."""
    with running(repository, limits, tokens, **settings) as (address, metrics, _):
        yield address, metrics


@contextlib.contextmanager
def running(repository, limits, tokens=None, **settings):
    """The same; also yield a function that stops the server within some seconds."""
    front = FrontEnd(repository, Settings(limits=limits, **settings))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def create():
        server = GrpcServer(front, "127.0.0.1", 0, tokens=tokens)
        await server.start()
        return server

    def stop(timeout_s):
        asyncio.run_coroutine_threadsafe(server.stop(timeout_s), loop).result(20)

    server = asyncio.run_coroutine_threadsafe(create(), loop).result(20)
    try:
        yield server.address, front.metrics, stop
    finally:
        stop(0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        front.close()


def infer_request(model, samples=1):
    request = service_pb2.ModelInferRequest(model_name="tiny")
    for name, array in request_of(model, samples)[0].items():
        request.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
        request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
    return request


@contextlib.contextmanager
def client_of(address):
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def is_answered(address, model):
    with client_of(address) as client:
        return len(client.ModelInfer(infer_request(model), timeout=10).raw_output_contents) == 1


def new_token(file, name):
    shown = []
    add_token(file, name, [INFER_SCOPE], shown.append)
    return shown[0]


class TestUnfinishedMessages:
    @pytest.mark.parametrize("path", [INFER, STREAM])
    def test_of_one_connection_are_bounded_in_all(self, serve, model, path):
        address = serve(max_body_bytes=MIB, max_arriving_bytes=4 * MIB)
        part = message_of(bytes(900_000), of_bytes=950_000)
        with RawClient(address) as client:
            calls = [client.open(path) for _ in range(20)]
            for call in calls:
                client.send(call, part)

            assert client.wait_for(lambda: sum(map(client.ended, calls)) >= 14)
            assert b"unfinished messages take more than 4,194,304 bytes" in client.text_of(calls[0])
            assert is_answered(address, model)
            assert not client.ended(calls[-1])

    def test_of_many_connections_are_bounded_in_all(self, serve, model):
        address = serve(max_body_bytes=MIB, max_arriving_bytes=4 * MIB)
        part = message_of(bytes(900_000), of_bytes=950_000)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawClient(address)) for _ in range(12)]
            calls = [client.open(INFER) for client in clients]
            for client, call in zip(clients, calls, strict=True):
                client.send(call, part)

            def ended():
                both = zip(clients, calls, strict=True)
                return sum(client.wait_for(lambda c=client, n=call: c.ended(n), 0.1) for client, call in both)

            assert clients[-1].wait_for(lambda: ended() >= 6)
            assert is_answered(address, model)

    @pytest.mark.parametrize(("size_bytes", "time"), [(1, b"0.3 s"), (3000, b"0.6 s")])
    def test_have_a_time_limit_for_each_part(self, serve, size_bytes, time):
        address = serve(body_timeout_s=0.3, body_part_bytes=2000)
        with RawClient(address) as client:
            call = client.open(INFER)
            client.send(call, message_of(bytes(size_bytes), of_bytes=5000))

            assert client.wait_for(lambda: client.ended(call))
            assert b"the message did not arrive within " + time in client.text_of(call)

    def test_are_only_those_that_are_unfinished(self, serve, model):
        address = serve(max_body_bytes=MIB, max_arriving_bytes=32 * MIB)
        request = infer_request(model)
        request.parameters["padding"].string_param = "a" * 300_000
        with client_of(address) as client, ThreadPoolExecutor(40) as pool:
            idle = client.ModelStreamInfer(iter(asked := Asked()))
            answers = list(pool.map(client.ModelInfer, [request] * 120))  # 36 MB in all

            assert len(answers) == 120
            asked.put(infer_request(model))
            assert next(idle).error_message == ""
            asked.put(None)


class Asked:
    """The requests of a stream, which end with None."""

    def __init__(self):
        self._condition, self._given = threading.Condition(), []

    def put(self, request):
        with self._condition:
            self._given.append(request)
            self._condition.notify()

    def __iter__(self):
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._given)
                request = self._given.pop(0)
            if request is None:
                return
            yield request


class TestCalls:
    def test_that_wait_end_while_there_are_too_many(self, serve, model):
        address = serve(max_calls=20)
        with RawClient(address) as client:
            calls = [client.open(STREAM) for _ in range(30)]

            assert client.wait_for(lambda: sum(map(client.ended, calls)) == 10)
            assert b"more than 20 calls are open" in client.text_of(calls[0])
            assert not any(map(client.ended, calls[-10:]))  # about the latest
            assert is_answered(address, model)

    def test_with_one_token_count_together_whatever_their_connections(self, serve, tmp_path):
        secrets = {name: new_token(tmp_path / "tokens", name) for name in ("many", "few")}
        with (
            contextlib.closing(Tokens(tmp_path / "tokens")) as tokens,
            contextlib.ExitStack() as stack,
        ):
            address = serve(tokens, max_calls=12)
            few = stack.enter_context(RawClient(address))
            kept = [few.open(STREAM, authorization=f"Bearer {secrets['few']}") for _ in range(4)]
            many = [stack.enter_context(RawClient(address)) for _ in range(14)]
            calls = [client.open(STREAM, authorization=f"Bearer {secrets['many']}") for client in many]

            def ended():
                both = zip(many, calls, strict=True)
                return sum(client.wait_for(lambda c=client, n=call: c.ended(n), 0.05) for client, call in both)

            assert few.wait_for(lambda: ended() == 6)
            assert not any(map(few.ended, kept))

    def test_that_wait_do_not_count_as_requests_of_their_token_that_run(self, repository, model, tmp_path):
        metadata = [("authorization", f"Bearer {new_token(tmp_path / 'tokens', 'one')}")]
        limits, waits = Limits(max_inflight_per_token=1), Batching(max_delay_s=0.5)
        with (
            contextlib.closing(Tokens(tmp_path / "tokens")) as tokens,
            serving(repository, limits, tokens, batching=waits) as (address, _),
            client_of(address) as client,
        ):
            first, second = (client.ModelInfer.future(infer_request(model), 20, metadata) for _ in range(2))
            codes = {first.code(), second.code()}
            streams = []
            for _ in range(2):  # the first stream is idle while the second is answered
                asked = Asked()
                asked.put(infer_request(model))
                streams.append((asked, client.ModelStreamInfer(iter(asked), metadata=metadata)))
                assert next(streams[-1][1]).error_message == ""
            for asked, _ in streams:
                asked.put(None)

        assert codes == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}

    def test_that_wait_end_when_their_token_is_withdrawn(self, serve, tmp_path):
        given = {name: new_token(tmp_path / "tokens", name) for name in ("gone", "kept")}
        with contextlib.closing(Tokens(tmp_path / "tokens")) as tokens, contextlib.ExitStack() as stack:
            address = serve(tokens)
            health = health_pb2_grpc.HealthStub(stack.enter_context(grpc.insecure_channel(address)))
            streams, watches = {}, {}
            for name, secret in given.items():
                client = stack.enter_context(RawClient(address))
                streams[name] = client, client.open(STREAM, authorization=f"Bearer {secret}")
                metadata = [("authorization", f"Bearer {secret}")]
                watches[name] = health.Watch(health_pb2.HealthCheckRequest(), 20, metadata)
                next(watches[name])

            document = json.loads((tmp_path / "tokens").read_text())
            del document["gone"]
            (tmp_path / "tokens").write_text(json.dumps(document))

            with pytest.raises(grpc.RpcError) as caught:
                next(watches["gone"])
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            client, call = streams["gone"]
            assert client.wait_for(lambda: client.ended(call))
            assert watches["kept"].is_active()
            client, call = streams["kept"]
            assert not client.wait_for(lambda: client.ended(call), 0.05)

    def test_that_wait_have_their_token_checked_once_a_second_however_many_clients_connect(self, serve, tmp_path):
        checks = Counter()

        class CountingTokens(Tokens):
            def find(self, token):
                checks[token.decode()] += 1
                return super().find(token)

        gone, other = (new_token(tmp_path / "tokens", name) for name in ("gone", "other"))
        with contextlib.closing(CountingTokens(tmp_path / "tokens")) as tokens, contextlib.ExitStack() as stack:
            address = serve(tokens)
            client = stack.enter_context(RawClient(address))
            began_s = time.monotonic()
            call = client.open(STREAM, authorization=f"Bearer {gone}")
            until(lambda: checks[gone])

            document = json.loads((tmp_path / "tokens").read_text())
            del document["gone"]
            for connections in range(400):
                if client.wait_for(lambda: client.ended(call), 0.05):
                    break
                stack.enter_context(RawClient(address)).open(STREAM, authorization=f"Bearer {other}")
                if connections == 16:
                    (tmp_path / "tokens").write_text(json.dumps(document))

            assert client.ended(call)
            assert checks[gone] <= 3 + time.monotonic() - began_s

    def test_of_one_connection_are_bounded(self, serve):
        address = serve(max_streams=5)
        with RawClient(address) as client:
            client.wait_for(lambda: client.has_settings)
            calls = [client.open(STREAM) for _ in range(20)]

            assert client.wait_for(lambda: [client.ended(call) for call in calls] == [False] * 5 + [True] * 15)

    def test_that_watch_the_health_end_too(self, serve):
        address = serve(max_calls=5)
        with grpc.insecure_channel(address) as channel:
            watches = [health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(10)]
            for watch in watches:
                next(watch)

            # The longest waits end; which began to wait first depends on the machine.
            until(lambda: sum(not watch.is_active() for watch in watches) == 5)
            codes = {watch.code() for watch in watches if not watch.is_active()}

        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}


class TestConnections:
    def test_that_do_nothing_lock_nobody_out(self, serve, model):
        address = serve(max_connections=8)
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(RawClient(address))
            time.sleep(1.2)

            assert is_answered(address, model)

    def test_whose_client_does_not_say_hello_are_closed(self, serve):
        address = serve(head_timeout_s=0.3)
        with RawClient(address, says_hello=False) as client:
            assert client.wait_for(lambda: client.is_closed)

    def test_without_calls_are_closed(self, serve):
        address = serve(idle_timeout_s=1.0)
        with RawClient(address) as client:
            assert client.wait_for(lambda: client.goodbye is not None)

    def test_may_be_pinged_now_and_then(self, serve):
        address = serve()
        with RawClient(address) as client:
            for count in range(6):
                client.frame(PING, 0, 0, bytes(8))
                assert client.wait_for(lambda count=count: client.pongs > count)
                time.sleep(0.25)

            assert client.goodbye is None

    def test_may_not_be_flooded_with_pings(self, serve):
        address = serve()
        with RawClient(address) as client:
            for _ in range(100):
                client.frame(PING, 0, 0, bytes(8))

            assert client.wait_for(lambda: client.goodbye == _ENHANCE_YOUR_CALM)

    @pytest.mark.parametrize("limits", [{"answer_timeout_s": 1.5}, {"max_unread_bytes": 10, "max_answer_bytes": 4}])
    def test_whose_client_takes_no_answer_are_cut(self, serve, model, limits):
        address = serve(**limits)
        with RawClient(address, window=0) as client:
            call = client.open(INFER)
            client.send(call, message_of(infer_request(model).SerializeToString()), is_last=True)

            assert client.wait_for(lambda: client.is_closed)

    def test_that_are_cut_and_calls_that_are_ended_each_have_a_line_in_the_log(self, serve, model, caplog):
        address = serve(max_calls=3, max_unread_bytes=10, max_answer_bytes=4)
        with RawClient(address) as client:
            calls = [client.open(STREAM) for _ in range(6)]
            assert client.wait_for(lambda: sum(map(client.ended, calls)) == 3)
        with RawClient(address, window=0) as client:
            client.send(client.open(INFER), message_of(infer_request(model).SerializeToString()), is_last=True)
            assert client.wait_for(lambda: client.is_closed)

        kinds = [record.getMessage().partition(":")[0] for record in caplog.records if record.name == "hotrow.grpc"]
        assert kinds == ["ended a gRPC call", "cut a gRPC connection"]


def counted(metrics):
    """How many requests were counted, by code, and how many are in flight."""
    samples = list(metrics.samples())
    codes = {dict(sample.labels)["code"]: sample.value for sample in samples if sample.name == "hotrow_requests"}
    return codes, next(sample.value for sample in samples if sample.name == "hotrow_requests_in_flight")


class TestCancelledRequests:
    def test_are_counted_and_are_no_longer_in_flight(self, repository, model):
        waits = Batching(max_delay_s=60)
        with serving(repository, Limits(), batching=waits) as (address, metrics), client_of(address) as client:
            future = client.ModelInfer.future(infer_request(model))
            until(lambda: counted(metrics) == ({}, 1))
            future.cancel()

            until(lambda: counted(metrics) == ({"499": 1}, 0))

    def test_whose_message_has_not_arrived_are_counted_too(self, repository):
        with serving(repository, Limits(body_timeout_s=0.3)) as (address, metrics), RawClient(address) as client:
            client.frame(RST_STREAM, 0, client.open(INFER), b"\0\0\0\x08")
            until(lambda: counted(metrics) == ({"499": 1}, 0))
            client.send(client.open(INFER), message_of(b"a", of_bytes=9))

            until(lambda: counted(metrics) == ({"499": 1, "504": 1}, 0))


def until(condition):
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def abort_errors():
    return [get_object for get_object in gc.get_objects() if issubclass(type(get_object), grpc.aio.AbortError)]


class TestStop:
    def test_refuses_requests_and_cancels_none(self, repository, model):
        with running(repository, Limits()) as (address, _, stop), ThreadPoolExecutor(8) as pool:
            loops = [pool.submit(first_error, address, infer_request(model)) for _ in range(8)]
            time.sleep(0.2)
            stop(10)

            assert {loop.result(20).code() for loop in loops} == {grpc.StatusCode.UNAVAILABLE}

    def test_answers_what_runs(self, repository, model):
        waits = Batching(max_delay_s=0.5)
        with running(repository, Limits(), batching=waits) as (address, metrics, stop), client_of(address) as client:
            future = client.ModelInfer.future(infer_request(model))
            until(lambda: counted(metrics) == ({}, 1))
            stop(10)

            assert len(future.result(20).raw_output_contents) == 1

    def test_ends_streams_that_were_answered_meanwhile(self, repository, model):
        waits = Batching(max_delay_s=0.5)
        with running(repository, Limits(), batching=waits) as (address, metrics, stop), client_of(address) as client:
            asked = Asked()
            asked.put(infer_request(model))
            answers = client.ModelStreamInfer(iter(asked))
            until(lambda: counted(metrics) == ({}, 1))
            began_s = time.monotonic()
            stop(20)

            assert time.monotonic() - began_s < 10
            assert next(answers).error_message == ""
            with pytest.raises(grpc.RpcError, match="the server is stopping"):
                next(answers)
            asked.put(None)


def first_error(address, request):
    """Send requests one after another until one fails."""
    with client_of(address) as client:
        while True:
            try:
                client.ModelInfer(request, timeout=20)
            except grpc.RpcError as err:
                return err


def field_five(content):
    """A field that has the number 5 and this content: a tensor of a request, and the contents of a tensor."""
    size = len(content)
    return bytes([0x2A, size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + content


def test_a_watch_of_an_unknown_service_searches_no_similar_names(serve, monkeypatch):
    def fail(*_arguments, **_options):
        raise AssertionError("each second, this would take the event loop's time")

    monkeypatch.setattr("serving.errors.get_close_matches", fail)
    with grpc.insecure_channel(serve()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="tinny"), timeout=20)

        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class TestMessages:
    @pytest.mark.parametrize("part", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x22\x00", b"\x08\x01", b"\x42\x00"])
    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_with_many_fields_are_refused_before_they_are_parsed(self, serve, model, part, depth):
        message = 10_001 * part
        for _ in range(depth):
            message = field_five(message)
        with grpc.insecure_channel(serve()) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(INFER)(message)

        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "more than the 10,000 fields" in caught.value.details()

    def test_may_have_many_bytes(self, serve, model):
        request = infer_request(model)
        request.id = "a" * MIB
        with client_of(serve()) as client:
            assert client.ModelInfer(request, timeout=20).id == request.id

    def test_that_are_cut_off_are_invalid(self, serve, model):
        tensor = field_five(b"\x0a\x80\x80\x01" + bytes(1 << 14) + bytes(1 << 20))  # its name is 16 KiB of zeros
        with grpc.insecure_channel(serve()) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(INFER)(tensor[: -1 << 20])

        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    def test_that_predict_nothing_are_bounded(self, serve):
        request = service_pb2.TraceSettingRequest()
        request.settings["trace_rate"].value.append("1" * MIB)
        with client_of(serve()) as client, pytest.raises(grpc.RpcError, match="the server accepts 262,144") as caught:
            client.TraceSetting(request)

        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


class TestErrors:
    def test_say_that_memory_is_too_small(self, serve, model, monkeypatch):
        def fail(*_):
            raise MemoryError

        monkeypatch.setattr(InferenceSession, "predict_batch", fail)
        with client_of(serve()) as client, pytest.raises(grpc.RpcError, match="too little free memory") as caught:
            client.ModelInfer(infer_request(model))

        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    @pytest.mark.parametrize("bad", [b"\xff\xff", None])
    def test_keep_nothing_of_the_call(self, serve, model, bad):
        address = serve()
        request = infer_request(model)
        request.model_name = "none"
        data = request.SerializeToString() if bad is None else bad
        gc.collect()
        earlier = len(abort_errors())
        gc.disable()
        try:
            with grpc.insecure_channel(address) as channel:
                infer = channel.unary_unary(INFER)
                for _ in range(5):
                    with pytest.raises(grpc.RpcError):
                        infer(data)
            until(lambda: len(abort_errors()) - earlier <= 2)  # the server's loop keeps the latest calls
            errors = abort_errors()
        finally:
            gc.enable()

        held = [frame.f_locals for error in errors for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert not {"context", "stream", "message", "data", "call"} & set().union(*held)
