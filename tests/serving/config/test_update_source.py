"""``update_source`` of a ``ps.json``: HPS's own form, the other sources, and what is refused."""

import traceback

import pytest

from serving.config import read_ps_config
from serving.errors import ConfigError
from tests.serving.config.conftest import in_ram, in_shared_ram
from tests.serving.ps_files import write_ps

KAFKA = {"type": "kafka_message_queue", "brokers": "127.0.0.1:9092"}
REDIS = {"type": "redis_stream", "address": "127.0.0.1:7000"}


def test_the_configuration_of_hps_is_read(read):
    source = read(
        {
            "update_source": {
                "type": "kafka_message_queue",
                "brokers": "127.0.0.1:9092;[::1]:9093",
                "metadata_refresh_interval_ms": 30000,
                "receive_buffer_size": 262144,
                "poll_timeout_ms": 500,
                "max_batch_size": 8192,
                "failure_backoff_ms": 50,
                "max_commit_interval": 32,
            },
            "volatile_db": {"type": "hash_map", "update_filters": [".+"]},
            "persistent_db": {"type": "rocks_db", "path": "db", "update_filters": [".+"]},
        }
    ).update_source
    assert (source.type, source.brokers) == ("kafka_message_queue", "127.0.0.1:9092,[::1]:9093")


@pytest.mark.parametrize("kind", ["kafka_mq", "kafka"])
def test_the_other_spellings_of_kafka_mean_the_same(read, kind):
    assert read({"update_source": KAFKA | {"type": kind}}).update_source == read({"update_source": KAFKA}).update_source


def test_settings_of_librdkafka_are_kept_by_their_names(read):
    settings = {"security.protocol": "SASL_SSL", "fetch.min.bytes": 1, "enable.ssl.certificate.verification": False}
    assert read({"update_source": KAFKA | {"kafka": settings}}).update_source.kafka == settings


def test_a_password_is_not_shown(read):
    source = read({"update_source": REDIS | {"password": "hidden-1"}}).update_source
    assert source.password.get_secret_value() == "hidden-1"
    assert "hidden-1" not in repr(source)


def test_secrets_may_be_in_the_environment_or_in_a_file(read, tmp_path, monkeypatch):
    monkeypatch.setenv("KAFKA_PASSWORD", "hidden-1")
    (tmp_path / "hidden").write_text("hidden-2\r\n")
    places = {"env": "KAFKA_PASSWORD"}, {"file": str(tmp_path / "hidden")}
    texts = []
    for place, text in zip(places, ("hidden-1", "hidden-2"), strict=True):
        config = read({"update_source": KAFKA | {"kafka": {"sasl.password": place, "log_level": 3}}})
        assert config.update_source.kafka["sasl.password"].get_secret_value() == text
        texts.append(repr(config))
        config = read({"update_source": REDIS | {"password": place}})
        assert config.update_source.password.get_secret_value() == text
        texts.append(repr(config))
        redis = {"type": "redis_cluster", "password": place}
        config = read({"volatile_db": redis, "persistent_db": {"type": "rocks_db", "path": "db"}})
        assert config.volatile_db.password.get_secret_value() == text
        texts.append(repr(config))
    assert "hidden-" not in "".join(texts)


def test_a_file_of_a_secret_is_looked_for_next_to_the_configuration(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "hidden").write_text("hidden-2")
    source = KAFKA | {"kafka": {"sasl.password": {"file": "hidden"}}}
    config = read_ps_config(write_ps(tmp_path / "folder", update_source=source))
    assert config.update_source.kafka["sasl.password"].get_secret_value() == "hidden-2"


def test_settings_of_librdkafka_are_in_no_repr(read):
    assert "hidden-1" not in repr(read({"update_source": KAFKA | {"kafka": {"sasl.password": "hidden-1"}}}))


EXPECTED = 'expected text, {"env": "<variable>"} or {"file": "<path>"}'
NO_SECRETS = [
    ({"env": "HOTROW_ABSENT"}, "the variable HOTROW_ABSENT is not set"),
    ({"env": "HOTROW_EMPTY"}, "the variable HOTROW_EMPTY is empty"),
    ({"file": "absent"}, "absent cannot be read: No such file or directory"),
    ({"file": "empty"}, "the file empty is empty"),
    ({"file": "bytes"}, "expected text in UTF-8"),
    ({"file": "nul"}, "expected text without the character NUL"),
    ({"file": "long"}, "cannot be read: expected at most 65,536 bytes, found 65,537"),
    ({"file": "."}, "cannot be read: "),
    ({"env": "A", "file": "hidden-3"}, EXPECTED),
    ({"environment": "hidden-3"}, EXPECTED),
    ({"env": ["hidden-3"]}, EXPECTED),
    ({"file": ""}, EXPECTED),
]


@pytest.mark.parametrize(("place", "reason"), NO_SECRETS, ids=[str(place) for place, _ in NO_SECRETS])
def test_a_secret_that_cannot_be_read_is_refused_and_never_shown(tmp_path, monkeypatch, place, reason):
    monkeypatch.setenv("HOTROW_EMPTY", "")
    contents = {"empty": b"", "bytes": b"hidden-3\xff", "nul": b"hidden-3\0", "long": b"h" * 65_537}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for source, path in [
        (KAFKA | {"kafka": {"sasl.password": place}}, "update_source.kafka"),
        (REDIS | {"password": place}, "update_source.password"),
    ]:
        with pytest.raises(ConfigError) as error:
            read_ps_config(write_ps(tmp_path, update_source=source))
        shown = "".join(traceback.format_exception(error.value))
        assert error.value.path == path
        assert reason in str(error.value)
        assert "hidden-3" not in shown


@pytest.mark.parametrize("settings", ["sasl.password=hidden-3", ["hidden-3"], 5])
def test_a_wrong_object_of_settings_is_not_shown(read, settings):
    with pytest.raises(ConfigError, match=r"update_source\.kafka: expected an object") as error:
        read({"update_source": KAFKA | {"kafka": settings}})
    assert "hidden-3" not in str(error.value)


def test_the_headroom_is_a_quarter_with_updates_and_a_sixteenth_without(read):
    sources = {}, {"update_source": KAFKA}, {"update_source": KAFKA | {"update_headroom_ratio": 0.5}}
    assert [read(source).headroom_ratio for source in sources] == [1 / 16, 0.25, 0.5]


OWN = {"kafka": {"auto.offset.reset": "latest"}}
REFUSED = [
    ({"type": "kafka"}, "update_source", "brokers is required if the type is kafka_message_queue"),
    ({"type": "redis_stream"}, "update_source", "address is required if the type is redis_stream"),
    ({"type": "folder"}, "update_source", "path is required if the type is folder"),
    ({"type": "kafca"}, "update_source.type", "did you mean 'kafka'"),
    (KAFKA | {"brokers": "here"}, "update_source.brokers", "expected <host>:<port>"),
    (KAFKA | {"path": "f"}, "update_source", "path: only a folder has it, but the type is kafka_message_queue"),
    (REDIS | {"kafka": {}}, "update_source", "kafka: only a kafka_message_queue has it"),
    (
        KAFKA | {"kafka": {"auto.offset.reset": "latest"}},
        "update_source.kafka",
        "auto.offset.reset: Hotrow sets it itself",
    ),
    (REDIS | {"address": "127.0.0.1:1;127.0.0.1:2"}, "update_source", "address: expected the address of one server"),
    (KAFKA | {"kafka": {"debug": ["all"]}}, "update_source.kafka", "debug: expected text, a number or a boolean"),
    (KAFKA | {"broker": "127.0.0.1:9092"}, "update_source.broker", "did you mean 'brokers'"),
    (KAFKA | {"update_headroom_ratio": -0.1}, "update_source.update_headroom_ratio", "greater than or equal to 0"),
    (KAFKA | {"update_headroom_ratio": 101}, "update_source.update_headroom_ratio", "less than or equal to 100"),
    (KAFKA | {"max_staleness_s": -1}, "update_source.max_staleness_s", "greater than or equal to 0"),
    (REDIS | {"tls_client_key": "k"}, "update_source", "tls_client_key: needs enable_tls"),
]


@pytest.mark.parametrize(("source", "path", "reason"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_wrong_source_is_refused(read, source, path, reason):
    with pytest.raises(ConfigError) as error:
        read({"update_source": source})
    assert error.value.path == path
    assert reason in str(error.value)


@pytest.mark.parametrize("tiers", [in_shared_ram(), {"volatile_db": {"type": "redis_cluster"}}])
def test_every_tier_may_be_the_last(read, tiers):
    assert read(tiers | {"persistent_db": ..., "update_source": KAFKA}).update_source.type == KAFKA["type"]


def test_the_filters_of_the_last_tier_decide(read):
    with pytest.raises(ConfigError, match=r"volatile_db\.update_filters: \['a'\], but persistent_db has \['b'\]"):
        read(
            in_ram(update_filters=["a"]) | {"persistent_db": {"type": "rocks_db", "path": "d", "update_filters": ["b"]}}
        )


def test_a_filter_must_be_a_regular_expression(read):
    with pytest.raises(ConfigError, match=r"update_filters: '\(' is not a regular expression"):
        read({"persistent_db": {"type": "rocks_db", "path": "d", "update_filters": ["("]}})
