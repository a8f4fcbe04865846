"""Opens a log of updates by its URL: a folder's path or ``file://`` URL."""

from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from serving.errors import ConfigError
from serving.stream.folder import FolderSink, FolderSource
from serving.stream.source import UpdateSink, UpdateSource


def open_source(url: str, topics: Sequence[str] = ()) -> UpdateSource:
    """Open a log for reading.

    Args:
        url: a folder's path or ``file://`` URL.
        topics: the topics of a model; a folder has none.

    Raises:
        ConfigError: the URL cannot be used.
    """
    return FolderSource(_folder(url))


def open_sink(url: str) -> UpdateSink:
    """Open a log for writing; see ``open_source``.

    Raises:
        ConfigError: the URL cannot be used.
        SinkError: the log cannot be used.
    """
    return FolderSink(_folder(url))


def _folder(url: str) -> str:
    if "://" not in url:
        return url
    parts = urlsplit(url)
    if parts.scheme != "file":
        raise ConfigError(f"{parts.scheme}://...", "", "expected a folder or a URL with file")
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise ConfigError("file://...", "", "expected file:///absolute/path")
    return unquote(parts.path)
