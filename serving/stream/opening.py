"""Opens an update log by its URL.

- ``kafka://host:9092[,host:port]/topic?name=value``: librdkafka's settings by name;
- ``redis://[user:password@]host:port/database/stream?name=value``, or ``rediss://`` for TLS, with ``ssl_ca_certs``,
  ``ssl_certfile`` and ``ssl_keyfile``;
- a folder's path, or a ``file://`` URL.

Errors never show passwords. ``settings`` may hold what should not be in a URL, such as ``sasl.password`` or
``password``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from serving.errors import ConfigError, did_you_mean
from serving.model.strict_json import Fields, read_json
from serving.stream.folder import FolderSink, FolderSource
from serving.stream.kafka import KafkaSink, KafkaSource
from serving.stream.redis_stream import RedisAddress, RedisStreamSink, RedisStreamSource
from serving.stream.source import UpdateSink, UpdateSource

_SCHEMES = ("kafka", "redis", "rediss", "file")
_REDIS_SETTINGS = ("username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_REDIS_PORT = 6379


def open_source(url: str, topics: Sequence[str] = (), settings: Mapping[str, str] | None = None) -> UpdateSource:
    """Open a log for reading. Kafka and Redis are not asked yet.

    Args:
        url: see the module.
        topics: Kafka's topics, or Redis's streams; without any, that of the URL. A folder has none.
        settings: more settings, which win over those of the URL.

    Raises:
        ConfigError: the URL or a setting cannot be used.
        MissingExtraError: the client's package is not installed.
    """
    if (parts := _parts(url)) is None:
        return FolderSource(url)
    if parts.scheme == "file":
        return FolderSource(_folder(parts))
    topic, options = _topic(parts), _options(parts, settings)
    chosen = list(topics) or ([topic] if topic else [])
    if not chosen:
        raise ConfigError(_shown(parts), "", "expected a topic or a stream at the end of the URL")
    if parts.scheme == "kafka":
        return KafkaSource(_brokers(parts), chosen, options)
    return RedisStreamSource(_redis(parts, options), chosen)


def open_sink(url: str, settings: Mapping[str, str] | None = None) -> UpdateSink:
    """Open a log for writing; see ``open_source``. The topic of the URL is for messages that name none.

    Raises:
        ConfigError: the URL or a setting cannot be used.
        MissingExtraError: the client's package is not installed.
        SinkError: the folder cannot be used.
    """
    if (parts := _parts(url)) is None:
        return FolderSink(url)
    if parts.scheme == "file":
        return FolderSink(_folder(parts))
    topic, options = _topic(parts), _options(parts, settings)
    if parts.scheme == "kafka":
        return KafkaSink(_brokers(parts), topic, options)
    return RedisStreamSink(_redis(parts, options), topic)


def read_settings(path: Path) -> dict[str, str]:
    """Read settings for ``open_sink`` from a JSON file of names and texts, so that no command line shows a password.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    fields = Fields(read_json(path), str(path), "")
    return {name: fields.text(name) for name in fields}


def _parts(url: str) -> SplitResult | None:
    """Take a URL apart; None for the path of a folder."""
    if "://" not in url:
        return None
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        hint = did_you_mean(scheme, _SCHEMES)
        raise ConfigError(f"{scheme}://...", "", f"expected a folder, or a URL of kafka, redis, rediss or file{hint}")
    try:
        parts = urlsplit(url)
    except ValueError as err:
        raise ConfigError(f"{scheme}://...", "", "not a URL") from err
    if parts.fragment:
        raise ConfigError(f"{scheme}://...", "", "write # in a URL as %23")
    return parts


def _shown(parts: SplitResult) -> str:
    """Return the URL without user, password and settings."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _folder(parts: SplitResult) -> str:
    if parts.netloc not in ("", "localhost") or parts.query or not parts.path:
        raise ConfigError(_shown(parts), "", "expected file:///absolute/path")
    return unquote(parts.path)


def _options(parts: SplitResult, settings: Mapping[str, str] | None) -> dict[str, str]:
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as err:
        raise ConfigError(_shown(parts), "", "expected ?name=value&name=value after the path") from err
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(_shown(parts), "", "a setting appears twice")
    return options | dict(settings or {})


def _topic(parts: SplitResult) -> str | None:
    path = parts.path.removeprefix("/")
    if parts.scheme != "kafka":
        path = path.partition("/")[2]
    return unquote(path) or None


def _brokers(parts: SplitResult) -> str:
    if "@" in parts.netloc:
        raise ConfigError(_shown(parts), "", "Kafka's user and password are the settings sasl.username, sasl.password")
    if not parts.netloc:
        raise ConfigError(_shown(parts), "", "expected kafka://host:port/topic")
    return parts.netloc


def _redis(parts: SplitResult, options: dict[str, str]) -> RedisAddress:
    for name in options:
        if name not in _REDIS_SETTINGS:
            raise ConfigError(_shown(parts), name, f"unknown setting{did_you_mean(name, _REDIS_SETTINGS)}")
    database = parts.path.removeprefix("/").partition("/")[0] or "0"
    try:
        host, port = parts.hostname, parts.port or _REDIS_PORT
    except ValueError:
        host, port = None, 0
    if not host or not (database.isascii() and database.isdigit()):
        raise ConfigError(_shown(parts), "", f"expected {parts.scheme}://host:port/database/stream")
    of_url = {"username": parts.username, "password": parts.password}
    named = {name: unquote(value) for name, value in of_url.items() if value}
    return RedisAddress(host, port, int(database), parts.scheme == "rediss", named | options)
