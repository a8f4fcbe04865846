"""A model with caches on a device is unloaded while clients send requests."""

import asyncio
import json
import threading

import httpx
import numpy as np
import pytest

from serving.frontend.front_end import FrontEnd, Settings
from serving.frontend.http.app import create_app
from serving.opening import Runtime
from serving.repository import ModelRepository
from tests.tools.tiny_model import TinyModel

KEYS = [[[1], [2], [3]], [[900], [2, 5], [3]], [[7], [], [2000]]]
ENDS = {
    "close": ModelRepository.close,
    "unload": lambda repository: repository._loader.server.unload_model("tiny"),
    "erase": lambda repository: repository._loader.server.erase_model("tiny"),
}


@pytest.fixture
def repository(tmp_path, device):
    TinyModel(rows=100).write(tmp_path)
    (tmp_path / "ps.json").write_text(json.dumps({"supportlonglong": True}))
    with ModelRepository(tmp_path, Runtime(device=device.name)) as repository:
        repository.load()
        yield repository


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_each_client_gets_the_right_answer_or_404(repository, end):
    app = create_app(FrontEnd(repository, Settings(threads=3)))
    ending = threading.Thread(target=end, args=(repository,))

    async def ask(client, number, answers):
        keys = KEYS[number % len(KEYS)]
        while True:
            response = await client.post("/predict/tiny", json={"samples": [{"dense": [1, 2, 3], "keys": keys}]})
            answers.append((keys, response))
            if response.status_code != 200:
                return
            if len(answers) == 10:
                ending.start()

    async def exchange():
        answers = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            await asyncio.gather(*(ask(client, number, answers) for number in range(6)))
            answers.append(([], await client.get("/metrics")))
        return answers

    *answers, (_, metrics) = asyncio.run(exchange())
    ending.join()

    assert metrics.status_code == 200
    assert [response.status_code for _, response in answers if response.status_code != 200] == [404] * 6
    for keys, response in answers:
        if response.status_code == 200:
            expected = TinyModel(rows=100).probabilities([[1, 2, 3]], [keys])
            np.testing.assert_allclose(response.json()["predictions"], expected, atol=2e-6)


@pytest.mark.parametrize("has_next", [True, False], ids=["swap", "unload"])
def test_a_request_whose_version_goes_before_its_body_has_come_gets_the_next_version_or_404(tmp_path, has_next):
    old, new = TinyModel(seed=1), TinyModel(seed=2)
    old.write(tmp_path, version=1)
    with ModelRepository(tmp_path, control="explicit", startup=["tiny"]) as repository:
        repository.load()
        new.write(tmp_path, version=2)
        end = repository.load_model if has_next else repository.unload_model

        async def body():
            yield b'{"samples": [{"dense": [1, 2, 3], '
            await asyncio.to_thread(end, "tiny")
            yield b'"keys": [[1], [2], [3]]}]}'

        async def exchange():
            app = create_app(FrontEnd(repository, Settings()))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
                return await client.post("/predict/tiny", content=body())

        response = asyncio.run(exchange())

    assert response.status_code == (200 if has_next else 404)
    if has_next:
        expected = new.probabilities([[1, 2, 3]], [[[1], [2], [3]]])
        np.testing.assert_allclose(response.json()["predictions"], expected, atol=2e-6)
