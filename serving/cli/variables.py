"""The variables of the environment that set options: HOTROW_GRPC_PORT sets --grpc-port."""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from serving.cli.client import TOKEN_VARIABLE
from serving.cli.numbers import VariableText
from serving.errors import ConfigError, did_you_mean

_PREFIX = "HOTROW_"
#: The options of `hotrow serve` that variables set.
SERVE_OPTIONS = (
    "copy_to",
    "copy_max_bytes",
    "host",
    "http_port",
    "grpc_port",
    "uds",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "tokens",
    "workers",
    "threads",
    "engine",
    "calibration",
    "tolerance",
    "device",
    "model_control_mode",
    "repository_poll_secs",
    "load_model",
    "max_body_bytes",
    "max_answer_bytes",
    "max_inflight",
    "max_inflight_per_token",
    "max_connections",
    "max_batch_size",
    "max_queue_delay_ms",
    "max_queue_wait_ms",
    "max_candidates",
    "shutdown_delay_s",
    "drain_timeout_s",
    "log_level",
    "log_format",
    "access_log",
    "traces",
    "record",
    "log_requests",
    "log_max_bytes",
    "log_without",
    "sample",
    "warm_up_from",
    "rejected",
    "max_staleness_s",
)
#: The same options by variable.
VARIABLES = {f"{_PREFIX}{option.upper()}": option for option in SERVE_OPTIONS}
#: Variables that are no options, and those that Kubernetes sets in every container for a service ``hotrow``.
_OTHERS = re.compile(
    rf"({TOKEN_VARIABLE}|HOTROW_(WORKER|PERSIA|LOOKUP_THREADS|DISABLE_AVX2|REQUIRE_GPU|(RUNNER|TRITON|TEST)_\w+))=.*"
    r"|\w+_SERVICE_(HOST|PORT(_\w+)?)=.*|\w+_PORT=\w+://.*|\w+_PORT_\d+_\w+=.*",
    re.DOTALL,
)
_log = logging.getLogger("hotrow.server")


def from_environment(options: Iterable[str]) -> dict[str, str]:
    """Return the values of ``options`` that the environment sets, as defaults for argparse; the command line wins."""
    of_options = {f"{_PREFIX}{option.upper()}": option for option in options}
    return {
        option: VariableText.of(name, os.environ[name]) for name, option in of_options.items() if name in os.environ
    }


def warn_of_misspelt_variables() -> None:
    """Warn of variables without effect that look like options."""
    for name in sorted(os.environ.keys() - VARIABLES.keys()):
        if name.startswith(_PREFIX) and not _OTHERS.fullmatch(f"{name}={os.environ[name]}"):
            _log.warning("the variable %s has no effect%s", name, did_you_mean(name, VARIABLES))


@contextmanager
def naming_variables() -> Iterator[None]:
    """Have errors that name an option name the variable too if the environment sets it."""
    try:
        yield
    except ConfigError as err:
        variable = _PREFIX + err.source.partition(" ")[0].removeprefix("--").replace("-", "_").upper()
        if not err.source.startswith("--") or variable not in VARIABLES or variable not in os.environ:
            raise
        raise ConfigError(f"{variable} or {err.source}", err.path, err.reason) from err
