"""``hotrow serve``: serve the models of a repository, or of HugeCTR's configuration files, over HTTP and gRPC."""

import argparse
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.system_cores import usable_cores
from serving.cli.address_options import DEFAULT_HOST, DEFAULT_PORT, add_address_options
from serving.cli.bucket import local_repository, repository_place
from serving.cli.engine_options import add_engine_options, checked_tolerance
from serving.cli.log import LOG_FORMATS, LOG_LEVELS, process_log
from serving.cli.numbers import is_on, memory_size, names_variable, number, one_of, ratio, whole_number
from serving.cli.outcome import outcome
from serving.cli.progress import load_progress
from serving.cli.threads import end_process_after, in_thread
from serving.cli.variables import SERVE_OPTIONS, from_environment, naming_variables, warn_of_misspelt_variables
from serving.errors import (
    ConfigError,
    MissingExtraError,
    ModelFileError,
    ServingError,
    told,
)
from serving.frontend.http.early import EarlyAnswers
from serving.frontend.limits import ENVELOPE_BYTES, Limits
from serving.frontend.tls import Tls
from serving.frontend.worker_place import WorkerPlace
from serving.option_values import CONTROL_MODES, MAX_CANDIDATES, check_device_name

if TYPE_CHECKING:
    from serving.frontend.grpc import GrpcServer
    from serving.frontend.recorder import Recorder
    from serving.repository import ModelRepository
    from serving.request_log import RequestLog

_log = logging.getLogger("hotrow.server")
_MOST_WORKERS = 64  # as many processes as can read shared RAM
_MOST_THREADS = 1024
_MOST_INFLIGHT = 65536
_LONGEST_POLL_S = 86400
_MOST_SAMPLES = 2**31 - 1
_MOST_CANDIDATES = 1 << 20
_LONGEST_DELAY_MS = 1000
_LONGEST_STALENESS_S = 10 * 365 * 86_400
_LONGEST_WAIT_MS = 3_600_000
_LARGEST_MESSAGE_BYTES = (2 << 30) - 1 - ENVELOPE_BYTES  # gRPC counts a message's bytes in 31 bits
_MOST_CONNECTIONS = 1 << 20
#: The defaults of options that go with some options only. They are filled in once that is checked.
_DEFAULTS = {
    "host": DEFAULT_HOST,
    "http_port": DEFAULT_PORT,
    "repository_poll_secs": 15,
    "max_inflight_per_token": Limits().max_inflight_per_token,
    "sample": 0.01,
    "log_max_bytes": 10 << 30,
    "log_without": (),
}
#: The default of --drain-timeout-s. Container engines send SIGKILL ten seconds after SIGTERM.
_DRAIN_TIMEOUT_S = 8
_LONGEST_STOP_S = 3600
# A request that waits for Python's global lock gets it after so long; Python's own 5 ms is longer than most requests.
_SWITCH_S = 0.0005
#: How long after a stop should be over the process ends, even if a thread hangs.
_LAST_RESORT_S = 1


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        description="Serve every model of a repository over HTTP and, with --grpc-port, over gRPC.",
    )
    limits = Limits()
    parser.add_argument(
        "repository",
        type=repository_place,
        metavar="REPO",
        help="a model repository, its URL in a bucket such as s3://bucket/models, a ps.json, a v3.0 inference JSON, or "
        "the folder of one model",
    )
    parser.add_argument(
        "--copy-to",
        type=Path,
        metavar="DIR",
        help="the local folder for the versions of a repository in a bucket; needs the extra s3 or gs",
    )
    parser.add_argument(
        "--copy-max-bytes",
        type=memory_size,
        metavar="SIZE",
        help="maximum size of all copies (default: what the disk has)",
    )
    add_address_options(parser)
    parser.add_argument(
        "--grpc-port",
        type=whole_number(0, 65535),
        metavar="N",
        help="also answer gRPC on this port; 0 takes a free port; needs the extra grpc",
    )
    parser.add_argument(
        "--ssl-ca-certs",
        type=Path,
        metavar="FILE",
        help="clients must present a certificate that these authorities signed (PEM)",
    )
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="clients must send a token of this file, which `hotrow token` writes (default: no tokens; loading, log "
        "settings and shared memory then work only on loopback and on a Unix socket)",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1, _MOST_WORKERS),
        default=1,
        metavar="N",
        help="processes that answer on the same ports; they share the tables in RAM (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1, _MOST_THREADS),
        metavar="N",
        help=f"requests that run at the same time in each worker (default: the usable cores, {usable_cores()} here, "
        "divided by the workers)",
    )
    add_engine_options(parser, "auto", "what runs the dense network (default: %(default)s)")
    parser.add_argument(
        "--device",
        type=_device,
        default="auto",
        metavar="NAME",
        help="where embeddings are cached and, with --engine auto, the dense network runs: cpu; cuda:0; cuda: the "
        "GPUs of each model's deployed_device_list; auto: cuda if there is a GPU, else cpu; runner: an emulated GPU, "
        "for tests (default: %(default)s)",
    )
    parser.add_argument(
        "--model-control-mode",
        type=one_of(*CONTROL_MODES),
        default="none",
        metavar="MODE",
        help="none: serve the models found at startup; poll: follow the repository's changes; explicit: load and "
        "unload models as clients ask (default: %(default)s)",
    )
    parser.add_argument(
        "--repository-poll-secs",
        type=whole_number(1, _LONGEST_POLL_S),
        metavar="N",
        help=f"seconds between checks of the repository in poll mode (default: {_DEFAULTS['repository_poll_secs']})",
    )
    parser.add_argument(
        "--load-model",
        type=_names,
        action=_Names,
        default=(),
        metavar="NAME",
        help="in explicit mode, load this model at startup; repeat the option or separate names by commas; * loads all",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=whole_number(1, _LARGEST_MESSAGE_BYTES),
        default=limits.max_body_bytes,
        metavar="N",
        help="largest request body (default: %(default)s)",
    )
    parser.add_argument(
        "--max-answer-bytes",
        type=whole_number(1, _LARGEST_MESSAGE_BYTES),
        default=limits.max_answer_bytes,
        metavar="N",
        help="largest answer to a predict request (default: %(default)s)",
    )
    parser.add_argument(
        "--max-inflight",
        type=whole_number(1, _MOST_INFLIGHT),
        default=limits.max_inflight,
        metavar="N",
        help="maximum predict requests in flight in each worker, counted once their bodies have arrived (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--max-inflight-per-token",
        type=whole_number(1, _MOST_INFLIGHT),
        metavar="N",
        help=f"the same for all clients with one token (default: {_DEFAULTS['max_inflight_per_token']})",
    )
    parser.add_argument(
        "--max-connections",
        type=whole_number(1, _MOST_CONNECTIONS),
        default=limits.max_connections,
        metavar="N",
        help="maximum HTTP connections, and maximum gRPC connections (default: %(default)s)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=whole_number(1, _MOST_SAMPLES),
        metavar="N",
        help="maximum samples of requests that are answered as one batch; 1: never merge requests (default: the "
        "model's max_batch_size)",
    )
    parser.add_argument(
        "--max-queue-delay-ms",
        type=number(_LONGEST_DELAY_MS, "milliseconds"),
        default=0,
        metavar="MS",
        help="how long a request may wait for others while a thread is idle (default: %(default)s)",
    )
    parser.add_argument(
        "--max-queue-wait-ms",
        type=number(_LONGEST_WAIT_MS, "milliseconds"),
        default=500,
        metavar="MS",
        help="refuse a request at once if it would wait longer than this for a thread (default: %(default)s)",
    )
    parser.add_argument(
        "--max-candidates",
        type=whole_number(1, _MOST_CANDIDATES),
        default=MAX_CANDIDATES,
        metavar="N",
        help="maximum candidates of a request; the model's max_batch_size if that is more (default: %(default)s)",
    )
    parser.add_argument(
        "--shutdown-delay-s",
        type=number(_LONGEST_STOP_S, "seconds"),
        default=0,
        metavar="S",
        help="after SIGTERM, keep answering for this long but report not ready, so that load balancers stop sending "
        "requests (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=number(_LONGEST_STOP_S, "seconds"),
        default=_DRAIN_TIMEOUT_S,
        metavar="S",
        help="then, maximum time for clients to send their requests and receive their answers (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        type=one_of(*LOG_LEVELS),
        default="info",
        metavar="LEVEL",
        help=f"minimum severity of log lines: {', '.join(LOG_LEVELS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        type=one_of(*LOG_FORMATS),
        default="text",
        metavar="FORMAT",
        help=f"{' or '.join(LOG_FORMATS)}: one JSON object per line (default: %(default)s)",
    )
    access_log = parser.add_argument("--access-log", action="store_true", help="log one line per request")
    access_log.type = names_variable(is_on)  # for HOTROW_ACCESS_LOG
    traces = parser.add_argument(
        "--traces",
        action="store_true",
        help="send traces of requests to OpenTelemetry, configured by the variables OTEL_*; needs the extra otel",
    )
    traces.type = names_variable(is_on)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the keys of sampled requests to this .jsonl file, for `hotrow plan`; if it already has records, to "
        "NAME.1.jsonl, NAME.2.jsonl and so on",
    )
    parser.add_argument(
        "--log-requests",
        type=Path,
        metavar="DIR",
        help="write the features and answers of sampled requests to Parquet files in this folder; needs the extra "
        "features",
    )
    parser.add_argument(
        "--log-max-bytes",
        type=memory_size,
        metavar="SIZE",
        help="delete the oldest files of --log-requests beyond this size (default: 10GiB)",
    )
    parser.add_argument(
        "--log-without",
        type=_names,
        action=_Names,
        metavar="NAME",
        help="leave this feature out of --log-requests; repeat the option or separate names by commas",
    )
    parser.add_argument(
        "--sample",
        type=ratio,
        metavar="RATIO",
        help=f"the fraction of requests that --record and --log-requests write (default: {_DEFAULTS['sample']})",
    )
    parser.add_argument(
        "--warm-up-from",
        type=Path,
        metavar="DIR",
        help="warm up each version with the newest requests of this folder, which --log-requests wrote",
    )
    parser.add_argument(
        "--rejected",
        type=Path,
        metavar="FILE",
        help="append rejected update messages to this file, one JSON object per line; overrides rejected_file in the "
        "ps.json's update_source",
    )
    parser.add_argument(
        "--max-staleness-s",
        type=number(_LONGEST_STALENESS_S, "seconds"),
        metavar="S",
        help="report a model as not ready if its rows are older than this while updates wait; overrides "
        "max_staleness_s in the ps.json's update_source (default: no limit)",
    )
    parser.set_defaults(run=serve, error_code=2, **from_environment(SERVE_OPTIONS))


class _Names(argparse.Action):
    """Collects the names of a repeated option; they replace those of the environment."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(earlier if isinstance(earlier, list) else ()), *values])


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _device(text: str) -> str:
    try:
        return check_device_name(text, "--device")
    except ConfigError as err:
        raise argparse.ArgumentTypeError(err.reason) from err


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    place = WorkerPlace.of_this_process()

    last_resort_s = options.drain_timeout_s + _LAST_RESORT_S

    def must_end(exit_code: int) -> None:
        """End the process in good order, or after a while even if a thread hangs."""
        end_process_after(options.shutdown_delay_s + last_resort_s, exit_code)

    def end(*_: object) -> None:
        end_process_after(last_resort_s, 0)
        sys.exit(0)

    # Until the server handles it. Process 1 of a container ignores a signal without a handler.
    signal.signal(signal.SIGTERM, end)
    _permit_open_files()
    number = None if place is None else place.number
    with process_log(options.log_level, options.log_format, number) as standard_error:

        def checked(options: argparse.Namespace) -> int:
            if place is None:
                warn_of_misspelt_variables()
            with naming_variables():
                _check_together(options)
                for option, default in _DEFAULTS.items():
                    if getattr(options, option) is None:
                        setattr(options, option, default)
                return _listen_and_serve(options, place, must_end, standard_error)

        return outcome(options, checked)  # here, so that the log's format includes its error


def _listen_and_serve(
    options: argparse.Namespace, place: WorkerPlace | None, must_end: Callable[[int], None], standard_error: int
) -> int:
    """Serve in this process or in several; until models are loaded, connections get early answers."""
    certificate = options.ssl_certfile
    tls = None if certificate is None else Tls(certificate, options.ssl_keyfile, options.ssl_ca_certs)
    with _listener(options, place) as listener:
        if place is not None:
            with local_repository(options, place):
                return _serve(options, place, listener, tls, must_end, lambda: None)
        with closing(EarlyAnswers(listener, tls)) as early, local_repository(options, None):
            if options.workers == 1:
                return _serve(options, None, listener, tls, must_end, early.close)

            def answered() -> None:
                early.close()
                if tls is not None:
                    tls.close()

            return _supervise(options, listener, standard_error, answered)


def _check_together(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, before anything is opened."""
    checked_tolerance(options)
    loads, merges = options.model_control_mode == "explicit", options.max_batch_size != 1
    has_port = options.uds is None or "HOTROW_HTTP_PORT" in os.environ  # container images set the variable
    has_host = options.uds is None or options.grpc_port is not None
    is_remote = not isinstance(options.repository, Path)
    rules = {  # whether the option has an effect, and what to say if it has none
        "sample": (options.record or options.log_requests, "needs --record or --log-requests"),
        "log_max_bytes": (options.log_requests, "needs --log-requests"),
        "log_without": (options.log_requests, "needs --log-requests"),
        "record": (options.workers == 1, "needs --workers 1, because the workers would write the same file"),
        "copy_to": (is_remote, "needs the URL of a bucket as REPO"),
        "copy_max_bytes": (is_remote, "needs the URL of a bucket as REPO"),
        "load_model": (loads or not options.load_model, "needs --model-control-mode explicit"),
        "repository_poll_secs": (
            options.model_control_mode == "poll" or (is_remote and loads),
            "needs --model-control-mode poll",
        ),
        "max_inflight_per_token": (options.tokens, "needs --tokens"),
        "max_queue_delay_ms": (merges or not options.max_queue_delay_ms, "needs a --max-batch-size above 1"),
        "ssl_keyfile": (options.ssl_certfile, "needs --ssl-certfile"),
        "ssl_ca_certs": (options.ssl_certfile, "needs --ssl-certfile"),
        "http_port": (has_port, "has no effect with --uds"),
        "host": (has_host, "has no effect with --uds and without --grpc-port"),
    }
    for option, (has_effect, reason) in rules.items():
        if getattr(options, option) is not None and not has_effect:
            raise ConfigError(f"--{option.replace('_', '-')}", "", reason)
    if is_remote and options.copy_to is None:
        raise ConfigError("--copy-to", "", "a repository in a bucket is served from a local copy, so name its folder")
    http_port = _DEFAULTS["http_port"] if options.http_port is None else options.http_port
    if options.uds is None and options.grpc_port and options.grpc_port == http_port:
        raise ConfigError("--grpc-port", "", f"{options.grpc_port} is the port of HTTP")


def _permit_open_files() -> None:
    """Raise the limit of open files to the hard limit. Shells and systemd start processes with 1,024."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _serve(
    options: argparse.Namespace,
    place: WorkerPlace | None,
    listener: socket.socket,
    tls: Tls | None,
    must_end: Callable[[int], None],
    answering: Callable[[], None],
) -> int:
    """Serve in this process.

    Args:
        options: of the command line.
        place: of this worker; None: this process is the whole server.
        listener: accepts HTTP connections.
        tls: for them, and for gRPC.
        must_end: called with the exit code at the first signal to stop.
        answering: called just before this process answers.
    """
    from serving.cli.shared_folders import remove_abandoned_sockets
    from serving.cli.supervisor import end_with
    from serving.frontend.workers import Siblings

    siblings = None if place is None else Siblings(place)
    # The other commands do not need the web framework, which is slow to import.
    from serving.frontend.access import Access
    from serving.frontend.batcher import Batching
    from serving.frontend.front_end import FrontEnd, Settings
    from serving.frontend.http.app import create_app
    from serving.frontend.http.listening import host_of, url_of
    from serving.frontend.http.server import Neighbour, Stop, run
    from serving.frontend.tokens import Tokens
    from serving.frontend.tracing import Tracing
    from serving.frontend.version import server_version
    from serving.frontend.workers import WorkerServer
    from serving.opening import Runtime
    from serving.repository import ModelRepository, check_warm_up

    if place is None:
        remove_abandoned_sockets()
    else:
        end_with(place.starter)
    open_neighbours = [] if options.grpc_port is None else [_grpc_server()]
    tolerance = checked_tolerance(options)
    tokens = None if options.tokens is None else Tokens(options.tokens)
    tracing = Tracing(None if place is None else place.number) if options.traces else None
    runtime = Runtime(
        options.engine,
        calibration=options.calibration,
        tolerance=tolerance,
        device=options.device,
        max_candidates=options.max_candidates,
        warm_up_from=options.warm_up_from,
    )
    repository = ModelRepository(
        options.repository,
        runtime,
        control=options.model_control_mode,
        poll_s=options.repository_poll_secs,
        startup=options.load_model,
        peers=siblings,
        update_settings=_update_settings(options),
    )
    with (
        _recorder(options) as recorder,
        _request_log(options) as request_log,
        repository,
    ):
        if options.warm_up_from is not None:
            check_warm_up(options.warm_up_from)  # --log-requests may have made the folder
        _load(repository)
        if request_log is not None:
            request_log.check(repository.models().values())
        print(f"hotrow {server_version()}")
        for line in repository.describe():
            print(line)
        limits = Limits(
            max_body_bytes=options.max_body_bytes,
            max_answer_bytes=options.max_answer_bytes,
            max_inflight=options.max_inflight,
            max_inflight_per_token=options.max_inflight_per_token,
            max_connections=options.max_connections,
        )
        waits_s = (options.max_queue_delay_ms / 1000, options.max_queue_wait_ms / 1000)
        batching = Batching(options.max_batch_size, *waits_s)
        threads = options.threads or max(1, usable_cores() // options.workers)
        settings = Settings(threads, limits, batching, options.access_log)
        front = FrontEnd(repository, settings, recorder, siblings, request_log, tracing)
        grpc_port = options.grpc_port if place is None or place.grpc_port is None else place.grpc_port
        neighbours = [
            open_it(front, options.host, grpc_port, tls, shares_port=place is not None, tokens=tokens)
            for open_it in open_neighbours
        ]
        private = [WorkerServer(siblings, front, neighbours)] if siblings is not None else []
        # Loaded objects stay, so the garbage collector need not walk them during requests.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_S)

        def ready() -> None:
            for neighbour in neighbours:
                print(f"listening for gRPC on {neighbour.address}")
            print(f"listening on {url_of(listener, tls is not None)}", flush=True)

        all_neighbours: list[Neighbour] = [*neighbours, *private]
        app = create_app(front, Access(tokens, host_of(listener), options.host))
        answering()
        with closing(front):  # after all servers, whose last requests need its threads
            is_shared = bool(private)
            run(
                app,
                listener,
                ready,
                Stop(options.drain_timeout_s, options.shutdown_delay_s, must_end, front.control.leave),
                all_neighbours,
                tls,
                shares_listener=is_shared,
                limits=limits,
                refusal=app.refusal,
            )
    return 0


def _update_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The keys of the ``ps.json``'s ``update_source`` that options set."""
    values = {"rejected_file": options.rejected, "max_staleness_s": options.max_staleness_s}
    return {key: value for key, value in values.items() if value is not None}


def _supervise(
    options: argparse.Namespace, listener: socket.socket, standard_error: int, answered: Callable[[], None]
) -> int:
    """Serve in several processes until SIGTERM or Ctrl-C; ``answered`` is called once the first answers."""
    from serving.cli.shared_folders import remove_abandoned_sockets
    from serving.cli.supervisor import Supervisor

    remove_abandoned_sockets()
    with Supervisor(options, listener, standard_error, answered) as supervisor:
        return supervisor.run()


def _grpc_server() -> type["GrpcServer"]:
    """Import the gRPC server, before models are loaded."""
    try:
        from serving.frontend.grpc import GrpcServer
    except ImportError as err:
        raise MissingExtraError(err.name or "grpc", "grpc", "--grpc-port") from err
    return GrpcServer


def _listener(options: argparse.Namespace, place: "WorkerPlace | None" = None) -> AbstractContextManager[socket.socket]:
    """Listen before models are loaded, which may take long; a worker takes the socket that it was given."""
    from serving.frontend.http.listening import listen, listening_on_path

    if place is not None:
        return socket.socket(fileno=place.listener)
    return listen(options.host, options.http_port) if options.uds is None else listening_on_path(options.uds)


@contextmanager
def _recorder(options: argparse.Namespace) -> Iterator["Recorder | None"]:
    """Open the file of ``--record``, before models are loaded."""
    from serving.frontend.recorder import Recorder

    if options.record is None:
        yield None
        return
    with closing(Recorder(options.record, options.sample)) as recorder:
        yield recorder


@contextmanager
def _request_log(options: argparse.Namespace) -> Iterator["RequestLog | None"]:
    """Open the log of requests, before models are loaded."""
    from serving.request_log import RequestLog

    if options.log_requests is None:
        yield None
        return
    with closing(
        RequestLog(
            options.log_requests, options.sample, options.log_max_bytes, options.log_without, workers=options.workers
        )
    ) as log:
        yield log


def _load(repository: "ModelRepository") -> None:
    """Load all models or none, because a broken model must fail the start, not a later request."""
    try:
        with load_progress() as progress:
            in_thread("hotrow-load", lambda: repository.load(progress))
    except (ConfigError, ModelFileError) as err:
        if not err.model:
            raise
        advice = f"`hotrow check {repository.path}` lists the faults of every model"
        raise ServingError(f"{told(err)}; {advice}") from err
