import pytest

from tests.serving.stream.logs import LOGS


@pytest.fixture(params=LOGS)
def log(request):
    """Every kind of log, empty."""
    log = LOGS[request.param](request)
    yield log
    log.close()


@pytest.fixture
def source(log):
    source = log.source()
    source.start({})
    yield source
    source.close()


@pytest.fixture
def sink(log):
    sink = log.sink()
    yield sink
    sink.close()
