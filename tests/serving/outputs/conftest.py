"""The models of these tests, loaded once: towers with five outputs, a graph with two heads, and graphs with one."""

import pytest

import hotrow
from serving.frontend.decoders import Decoders
from serving.frontend.front_end import FrontEnd
from serving.frontend.grpc import _InferExchange
from serving.frontend.http.app import create_app
from serving.protocol.bounds import DEFAULT_BOUNDS
from serving.protocol.messages import MessageDecoder, read_message
from serving.protocol.shared_memory import SharedMemory
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.tools.tiny_model import Heads, NamedModel, TinyModel
from tests.tools.two_towers import write_towers


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_towers(folder)
    TinyModel().write(folder)
    Heads().write(folder, "heads")
    NamedModel(names=("user", "item", "id"), dense_names=("age", "price", "size")).write(folder, "with_id")
    return folder


@pytest.fixture(scope="session")
def session(folder):
    with hotrow.load_model(folder / "towers") as session:
        yield session


@pytest.fixture(scope="session")
def models(folder):
    with ModelRepository(folder) as models:
        models.load()
        yield models


@pytest.fixture(scope="session")
def client(models):
    return Client(create_app(FrontEnd(models)))


@pytest.fixture(scope="session")
def over_grpc(models):
    """Return the towers' answer to a ``ModelInferRequest``."""
    decoders = Decoders(MessageDecoder, SharedMemory(), DEFAULT_BOUNDS)

    def answer_of(message):
        model = models.loaded("towers")
        exchange = _InferExchange(read_message(message.SerializeToString()), decoders)
        exchange.question = exchange.read(model)
        (answer,) = model.answer([exchange.question])
        return exchange.write(model, answer)

    return answer_of
