"""``update_source`` of a ``ps.json``: HPS's own form, the other sources, and what is refused."""

import pytest

from serving.errors import ConfigError
from tests.serving.config.conftest import in_ram, in_shared_ram

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
    (KAFKA | {"max_staleness_s": -1}, "update_source.max_staleness_s", "greater than or equal to 0"),
    (REDIS | {"tls_client_key": "k"}, "update_source", "tls_client_key: needs enable_tls"),
]


@pytest.mark.parametrize(("source", "path", "reason"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_wrong_source_is_refused(read, source, path, reason):
    with pytest.raises(ConfigError) as error:
        read({"update_source": source})
    assert error.value.path == path
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("tiers", "kind"),
    [
        pytest.param(in_shared_ram(), "multi_process_hash_map", id="shared RAM"),
        pytest.param({"volatile_db": {"type": "redis_cluster"}, "persistent_db": ...}, "redis_cluster", id="Redis"),
    ],
)
def test_a_last_tier_that_several_processes_write_is_refused(read, tiers, kind):
    with pytest.raises(ConfigError, match=rf"update_source\.type: updates need .* one process writes, and {kind}"):
        read(tiers | {"persistent_db": ..., "update_source": KAFKA})


def test_the_filters_of_the_last_tier_decide(read):
    with pytest.raises(ConfigError, match=r"volatile_db\.update_filters: \['a'\], but persistent_db has \['b'\]"):
        read(
            in_ram(update_filters=["a"]) | {"persistent_db": {"type": "rocks_db", "path": "d", "update_filters": ["b"]}}
        )


def test_a_filter_must_be_a_regular_expression(read):
    with pytest.raises(ConfigError, match=r"update_filters: '\(' is not a regular expression"):
        read({"persistent_db": {"type": "rocks_db", "path": "d", "update_filters": ["("]}})
