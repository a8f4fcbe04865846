"""The version of Hotrow."""

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    """The installed version; ``"0"`` for a source tree that was never installed."""
    try:
        return version("hotrow")
    except PackageNotFoundError:
        return "0"
