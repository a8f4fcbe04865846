"""A model that answers most keys with default values is reported once in the log."""

import pytest

from serving.opening import load_model

UNKNOWN = 123_456_789


@pytest.fixture
def session(write_model):
    """A model with two tables of one slot each and no dense features."""
    model = write_model(*[write_model.table(slots=1, max_keys=100)] * 2, features=0)
    with load_model(model.config_file, engine="numpy") as session:
        session.known = [next(iter(rows)) for rows in model.tables]
        yield session


def ask(session, unknown=(0, 0), known=(0, 0), times=1):
    """Ask for one sample with so many unknown and known keys of each table."""
    bags = [[UNKNOWN] * u + [key] * k for u, k, key in zip(unknown, known, session.known, strict=True)]
    for _ in range(times):
        session.predict(None, [*bags[0], *bags[1]], [0, len(bags[0]), len(bags[0]) + len(bags[1])])


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if "default values" in record.getMessage()]


def test_a_model_whose_keys_are_mostly_unknown_is_reported_once(session, caplog):
    ask(session, unknown=(20, 40), known=(40, 0), times=9)
    ask(session, unknown=(20, 79), times=1)

    assert warnings_in(caplog) == []  # 999 keys
    ask(session, unknown=(1, 0), times=1_500)
    [warning] = warnings_in(caplog)
    assert "model 'model': 640 of its first 1,000 keys were answered with default values, most of them in" in warning
    assert "table 'table1'; are the keys hashed or encoded as in training?" in warning


def test_half_of_the_keys_unknown_is_not_reported_until_there_is_one_more(session, caplog):
    ask(session, unknown=(50, 0), known=(0, 50), times=20)

    assert warnings_in(caplog) == []
    ask(session, unknown=(1, 0))
    assert "1,001 of its first 2,001 keys" in warnings_in(caplog)[0]


def test_a_model_that_is_loaded_again_is_reported_again(write_model, caplog):
    model = write_model(features=0)
    for _ in range(2):
        with load_model(model.config_file, engine="numpy") as session:
            slots = session.config.tables[0].slots
            for _ in range(1_000):
                session.predict(None, [UNKNOWN], [0] + [1] * slots)

    assert len(warnings_in(caplog)) == 2
