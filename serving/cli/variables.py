"""The variables of the environment that set options: HOTROW_GRPC_PORT sets --grpc-port."""

import logging
import os
from collections.abc import Iterable

from serving.cli.client import TOKEN_VARIABLE
from serving.cli.numbers import VariableText
from serving.errors import nearest

_PREFIX = "HOTROW_"
#: The options of `hotrow serve` that variables set.
SERVE_OPTIONS = (
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
_ALMOST = 0.85  # how similar a misspelt variable is to the right one
_log = logging.getLogger("hotrow.server")


def from_environment(options: Iterable[str]) -> dict[str, str]:
    """Return the values of ``options`` that the environment sets, as defaults for argparse; the command line wins."""
    of_options = {f"{_PREFIX}{option.upper()}": option for option in options}
    return {option: VariableText.of(name, os.environ[name]) for name, option in of_options.items() if name in os.environ}


def warn_of_misspelt_variables() -> None:
    """Warn of variables that are almost options. Kubernetes sets others, such as HOTROW_SERVICE_HOST."""
    for name in sorted(os.environ.keys() - VARIABLES.keys() - {TOKEN_VARIABLE}):
        close = nearest(name, VARIABLES, cutoff=_ALMOST)
        if name.startswith(_PREFIX) and close:
            _log.warning("the variable %s has no effect; did you mean %s?", name, close[0])
