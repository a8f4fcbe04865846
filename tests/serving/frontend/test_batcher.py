"""Requests that wait for a thread are answered as one batch, and each as if it were alone."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import DeadlineError, OverloadedError, RequestError, StoreError
from serving.frontend.batcher import Batcher, Batching
from serving.frontend.exchange import Exchange
from serving.opening import Runtime
from serving.reading import read_batch
from serving.repository import ModelRepository
from tests.serving.ps_files import KEYS, write_lookup_model
from tests.tools.tiny_model import TinyModel, flatten

DEADLINE_S = 60


class Doubler:
    """A model whose answer to a list of numbers is their doubles; each batch waits until the test lets it go."""

    def __init__(self, can_merge=True, max_batchsize=100):
        self.config = SimpleNamespace(max_batchsize=max_batchsize)
        self.can_merge = can_merge
        self.batches = []
        self.may_answer = threading.Event()

    def samples(self, question):
        return len(question)

    def answer_floats(self, question):
        return len(question)

    def answer(self, questions):
        self.may_answer.wait(DEADLINE_S)
        self.batches.append([len(question) for question in questions])
        if any("poison" in question for question in questions):
            raise StoreError("redis", "m.t", "no answer")
        return [[2 * number for number in question] for question in questions]


class Numbers(Exchange):
    """An exchange of lists of numbers."""

    timeout_us = 0

    def __init__(self, numbers, timeout_us=0, deadline_s=None):
        super().__init__()
        self.numbers = numbers
        self.timeout_us = timeout_us
        self.deadline_s = deadline_s

    def read(self, _model):
        if self.numbers is None:
            raise RequestError("no numbers")
        return self.numbers

    def write(self, _model, answer):
        return f"{answer}"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def ask_all(pool, model, requests, threads=1, release_after=None, **batching):
    """Send requests at the same time; the model answers once all of them wait. Returns answers or errors."""

    async def exchange():
        batcher = Batcher(model, pool, threads, Batching(**batching))
        asked = [asyncio.ensure_future(ask(batcher, request)) for request in requests]
        await asyncio.sleep(0)  # each has begun
        await asyncio.sleep(0)
        model.may_answer.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(exchange())


async def ask(batcher, request):
    exchange = request if isinstance(request, Numbers) else Numbers(request)
    await batcher.answer(exchange)
    assert len(exchange.times_ns) == 5
    return exchange.written


def test_requests_that_wait_for_a_thread_are_answered_as_one_batch(pool):
    model = Doubler()

    answers = ask_all(pool, model, [[1], [2, 3], [4]])

    assert answers == ["[2]", "[4, 6]", "[8]"]
    assert model.batches == [[1], [2, 1]]  # the first request found an idle thread


def test_a_batch_is_counted_even_if_its_first_request_cannot_be_written(pool):
    class Unwritable(Numbers):
        def write(self, _model, answer):
            raise RequestError("the shared memory is full")

    model, exchanges = Doubler(), [Numbers([1]), Unwritable([2, 3]), Numbers([4])]

    async def ask_in_turn():
        batcher = Batcher(model, pool, 1, Batching())
        asked = [asyncio.ensure_future(batcher.answer(exchange)) for exchange in exchanges]
        await asyncio.sleep(0)
        model.may_answer.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    _, failed, _ = asyncio.run(ask_in_turn())

    assert (str(failed), exchanges[2].written) == ("the shared memory is full", "[8]")
    assert model.batches == [[1], [2, 1]]
    assert [exchange.batch_samples for exchange in exchanges] == [1, 0, 3]


def test_idle_threads_share_the_queue(pool):
    model = Doubler()

    ask_all(pool, model, [[number] for number in range(8)], threads=2)

    assert sorted(map(sum, model.batches))[:2] == [1, 1]
    assert sum(map(sum, model.batches)) == 8
    assert len(model.batches) <= 5


def test_a_batch_has_no_more_samples_than_it_may_have(pool):
    model = Doubler()

    answers = ask_all(pool, model, [[0], [1] * 3, [2] * 2, [3] * 5, [4]], max_samples=5)

    assert answers == [str([2 * n] * count) for n, count in ((0, 1), (1, 3), (2, 2), (3, 5), (4, 1))]
    assert model.batches == [[1], [3, 2], [5], [1]]


def test_a_batch_has_no_more_samples_than_the_model_takes(pool):
    model = Doubler(max_batchsize=2)

    ask_all(pool, model, [[0], [1], [2], [3]], max_samples=50)

    assert model.batches == [[1], [1, 1], [1]]


@pytest.mark.parametrize("model", [Doubler(can_merge=False), Doubler()], ids=["samples mix", "switched off"])
def test_requests_are_not_merged_if_samples_mix_or_merging_is_off(pool, model):
    answers = ask_all(pool, model, [[1], [2], [3]], max_samples=1)

    assert answers == ["[2]", "[4]", "[6]"]
    assert model.batches == [[1], [1], [1]]


def test_a_request_that_cannot_be_read_fails_alone(pool):
    model = Doubler()

    first, bad, last = ask_all(pool, model, [[1], None, [3]])

    assert (first, last) == ("[2]", "[6]")
    assert isinstance(bad, RequestError)


def test_if_a_batch_fails_each_request_is_answered_alone(pool):
    model = Doubler()

    answers = ask_all(pool, model, [[1], [2], ["poison"], [4]])

    assert [str(answer) for answer in answers] == ["[2]", "[4]", "redis: table 'm.t': no answer", "[8]"]


def test_a_request_whose_deadline_has_passed_is_not_answered(pool):
    model = Doubler()

    async def exchange():
        batcher = Batcher(model, pool, 1, Batching())
        first = asyncio.ensure_future(ask(batcher, [1]))
        late = asyncio.ensure_future(ask(batcher, Numbers([2], deadline_s=0.0)))
        short = asyncio.ensure_future(ask(batcher, Numbers([3], timeout_us=1)))
        patient = asyncio.ensure_future(ask(batcher, Numbers([4], timeout_us=10**9)))
        await asyncio.sleep(0.01)
        model.may_answer.set()
        return await asyncio.gather(first, late, short, patient, return_exceptions=True)

    first, late, short, patient = asyncio.run(exchange())

    assert (first, patient) == ("[2]", "[8]")
    assert isinstance(late, DeadlineError)
    assert isinstance(short, DeadlineError)
    assert "its timeout is 1e-06 s" in str(short)
    assert model.batches == [[1], [1]]


def test_the_first_request_waits_for_others_while_a_thread_is_idle(pool):
    model = Doubler()
    model.may_answer.set()

    assert ask_all(pool, model, [[1], [2], [3]], max_delay_s=0.2) == ["[2]", "[4]", "[6]"]
    assert model.batches == [[1, 1, 1]]


def test_a_full_batch_does_not_wait(pool):
    model = Doubler()
    model.may_answer.set()

    assert ask_all(pool, model, [[1], [2]], max_samples=2, max_delay_s=DEADLINE_S) == ["[2]", "[4]"]


def test_a_request_that_would_wait_too_long_is_refused_at_once(pool):
    model = Doubler()

    async def exchange():
        batcher = Batcher(model, pool, 1, Batching(max_wait_s=0.001))
        first = asyncio.ensure_future(ask(batcher, [1]))
        await asyncio.sleep(0.1)  # one request of 32 counts as 3 ms each
        model.may_answer.set()
        await first
        model.may_answer.clear()
        accepted = asyncio.ensure_future(ask(batcher, [2]))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=r"this request would wait \d+ ms, with 1 ahead of it; the"):
            await ask(batcher, [3])
        model.may_answer.set()
        assert await accepted == "[4]"
        return await ask(batcher, [5])

    assert asyncio.run(exchange()) == "[10]"


def test_large_requests_count_as_the_time_that_their_samples_take(pool):
    model = Doubler()

    async def exchange():
        batcher = Batcher(model, pool, 1, Batching(max_wait_s=0.001))

        async def begun(number, size_bytes):
            request = asyncio.ensure_future(batcher.answer(Numbers([number]), size_bytes))
            await asyncio.sleep(0)
            return request

        first = await begun(1, 100_000)
        await asyncio.sleep(0.1)  # one request of 32 counts as 3 ms for each request of about this size
        model.may_answer.set()
        await first
        model.may_answer.clear()
        small = await begun(2, 100)
        large = await begun(3, 90_000)
        with pytest.raises(OverloadedError, match="with 2 ahead of it"):
            await batcher.answer(Numbers([4]), 100)
        model.may_answer.set()
        await asyncio.gather(small, large)

    asyncio.run(exchange())


def test_a_slow_first_request_does_not_refuse_the_requests_after_it(pool):
    model = Doubler()

    async def exchange():
        batcher = Batcher(model, pool, 1, Batching(max_wait_s=0.5))
        first = asyncio.ensure_future(ask(batcher, [1]))
        await asyncio.sleep(0.1)
        model.may_answer.set()
        await first
        return await asyncio.gather(*(ask(batcher, [number]) for number in range(60)))

    assert asyncio.run(exchange()) == [f"[{2 * number}]" for number in range(60)]


def test_a_request_whose_client_has_gone_is_not_answered(pool):
    model = Doubler()

    async def exchange():
        batcher = Batcher(model, pool, 1, Batching())
        asked = [asyncio.ensure_future(ask(batcher, [number])) for number in range(3)]
        await asyncio.sleep(0)
        asked[1].cancel()
        await asyncio.sleep(0)
        model.may_answer.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    first, gone, last = asyncio.run(exchange())

    assert (first, last) == ("[0]", "[4]")
    assert isinstance(gone, asyncio.CancelledError)
    assert model.batches == [[1], [1]]


def test_a_request_whose_client_has_gone_makes_room_at_once(pool):
    model = Doubler()

    async def exchange():
        batcher = Batcher(model, pool, 1, Batching(max_wait_s=1.5 / 32))
        first = asyncio.ensure_future(ask(batcher, [1]))
        await asyncio.sleep(1)  # one request of 32 counts as a second / 32 each
        model.may_answer.set()
        await first
        model.may_answer.clear()
        running = asyncio.ensure_future(ask(batcher, [2]))
        await asyncio.sleep(0)
        gone = asyncio.ensure_future(ask(batcher, [3]))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await ask(batcher, [4])
        gone.cancel()
        await asyncio.sleep(0)
        last = asyncio.ensure_future(ask(batcher, [5]))
        await asyncio.sleep(0)
        model.may_answer.set()
        return await asyncio.gather(running, last)

    assert asyncio.run(exchange()) == ["[4]", "[10]"]


@settings(deadline=None, max_examples=25)
@given(
    requests=st.lists(st.lists(st.integers(0, 9) | st.just("poison"), max_size=6) | st.none(), min_size=1, max_size=12),
    threads=st.integers(1, 2),
    max_samples=st.integers(1, 9),
)
def test_every_request_gets_its_own_answer(requests, threads, max_samples):
    with ThreadPoolExecutor(2) as pool:
        answers = ask_all(pool, Doubler(), requests, threads, max_samples=max_samples)

    for request, answer in zip(requests, answers, strict=True):
        if request is None:
            assert isinstance(answer, RequestError)
        elif "poison" in request:
            assert isinstance(answer, StoreError)
        else:
            assert answer == str([2 * number for number in request])


@pytest.mark.parametrize("device", ["cpu", "runner"])
def test_batches_of_a_model_are_predicted_together_as_if_alone(tmp_path, device):
    model = TinyModel()
    model.write(tmp_path)
    rng = np.random.default_rng(0)
    with ModelRepository(tmp_path, Runtime("numpy", device=device)) as repository:
        repository.load()
        session = repository.session("tiny")
        batches, expected = [], []
        for samples in (1, 5, 3, 1, 7):
            dense, bags = model.sample_requests(samples, seed=samples)
            bags[0][0] = [key + (rng.random() < 0.5) * model.rows for key in bags[0][0]]  # some keys are unknown
            batches.append(read_batch(session.config, dense, *flatten(bags)))
            expected.append(model.probabilities(dense, bags))

        together = session.predict_batches(batches)

        for answer, batch, right in zip(together, batches, expected, strict=True):
            np.testing.assert_allclose(answer.values, right, atol=2e-6)
            assert answer.defaulted_keys == session.predict_batch(batch).defaulted_keys


@pytest.mark.parametrize("device", ["cpu", "runner"])
def test_lookups_are_answered_together_as_if_alone(tmp_path, device):
    with ModelRepository(write_lookup_model(tmp_path), Runtime(device=device)) as repository:
        repository.load()
        model = repository.loaded("hps_wdl")
        unknown = max(KEYS) + 1
        texts = ([KEYS[:2], []], [[], []], [[unknown, KEYS[1]], [unknown]], [KEYS, KEYS])
        questions = [[np.array(keys, np.int64) for keys in text] for text in texts]

        answers = model.answer(questions)

        assert [answer.defaulted_keys for answer in answers] == [0, 0, 2, 0]
        for answer, question in zip(answers, questions, strict=True):
            (alone,) = model.answer([question])
            for rows, expected in zip(answer.embeddings, alone.embeddings, strict=True):
                np.testing.assert_array_equal(rows, expected)
