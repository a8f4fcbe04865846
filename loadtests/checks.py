"""Checks of a load test's options."""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from serving.config import ModelConfig
from serving.errors import ServingError


def refuse_remote(host: str) -> None:
    """Raise ServingError unless a URL or ``HOST:PORT`` names this machine."""
    name = urlsplit(host if "//" in host else f"//{host}").hostname or ""
    try:
        is_local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise ServingError(f"{host!r} is not this machine; --allow-remote sends load to other machines")


def choose_model(models: Sequence[ModelConfig], name: str | None) -> ModelConfig:
    """Return the newest version of the model of this name, or of the only model.

    Args:
        models: as ``read_repository`` returns them: versions newest first.
        name: None for the only model.

    Raises:
        ServingError: no model has this name, or there are several models and no name.
    """
    by_name: dict[str, ModelConfig] = {}
    for model in models:
        by_name.setdefault(model.name, model)
    served = ", ".join(by_name)
    if name is None and len(by_name) > 1:
        raise ServingError(f"there are several models: choose one of {served} with --model")
    if name is not None and name not in by_name:
        raise ServingError(f"there is no model {name!r}; expected {served}")
    return by_name[served if name is None else name]
