"""``hotrow stats``: what the status page shows, in a terminal."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from serving.cli.client import DEFAULT_URL, Client, add_client_options, message_in
from serving.errors import RequestError, ServingError, printable
from serving.frontend.tokens import METRICS
from serving.frontend.version import server_version
from serving.metrics import Histogram

#: How long a server may take to answer.
TIMEOUT_S = 10.0
_INTERVAL_S = 1.0
_CLEAR = "\x1b[H\x1b[J"  # the cursor to the top, then erase what is below it
_MODEL_COLUMNS = ("model", "version", "state", "requests", "failed", "samples", "p50 ms", "p99 ms")
_TIER_COLUMNS = ("table", "tier", "state", "rows", "size", "keys asked", "hits", "hit rate", "errors", "p99 ms")
_UPDATE_COLUMNS = ("updates", "state", "lag", "visible p99 ms", "rejected", "table", "step", "time")
_TEXT_COLUMNS = frozenset(
    {"model", "version", "state", "table", "tier", "updates", "rejected", "time", "partition", "position"}
)

Document = dict[str, Any]


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "stats",
        description="Show the models, tiers and latencies of a running server since its start. Percentiles are "
        "estimates from histograms.",
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="refresh every second until Ctrl-C; rates, hit rates and percentiles cover the last second",
    )
    parser.add_argument("--json", action="store_true", help="print GET /status, one line per reading")
    add_client_options(parser)
    parser.set_defaults(run=stats, error_code=1)


def stats(options: argparse.Namespace) -> int:
    """Print one reading, or a reading per second until Ctrl-C."""
    before, client = None, Client(options.url, options, TIMEOUT_S)
    try:
        while True:
            now = read_status(client)
            print(json.dumps(now) if options.json else _screen(client.server, options.watch, now, before), flush=True)
            if not options.watch:
                return 0
            before = now
            time.sleep(_INTERVAL_S)
    except KeyboardInterrupt:
        if not options.watch:
            raise
        return 0


def read_status(client: Client) -> Document:
    """Ask the server for its status.

    Raises:
        ServingError: the server does not answer, or is not Hotrow's.
        RequestError: the URL is not valid, or the token is missing or does not suffice.
    """
    code, reason, answer = client.ask("/status", METRICS)
    if code == HTTPStatus.FORBIDDEN:
        raise RequestError(f"{client.server}: {message_in(answer, reason)}")
    if code != HTTPStatus.OK:
        raise _stranger(client, f"GET /status returned {code} {reason}")
    try:
        document = json.loads(answer)
    except ValueError as err:
        raise _stranger(client, "GET /status did not return JSON") from err
    if not isinstance(document, dict) or document.get("server") != "hotrow":
        raise _stranger(client, "GET /status returned other JSON")
    return document


def _stranger(client: Client, reason: str) -> ServingError:
    return ServingError(f"{client.server}: this is not a Hotrow server, or an older one: {reason}")


def in_text(server: str, now: Document, lines: Iterator[str]) -> str:
    """Return lines about the status ``now`` of a server.

    Raises:
        ServingError: the status has not the form that ``lines`` expects.
    """
    try:
        return "\n".join(map(printable, lines))
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        versions = f"the server is Hotrow {now.get('version')}, this command is Hotrow {server_version()}"
        raise ServingError(f"{server}: the status has another form: {versions}") from err


def _screen(server: str, watches: bool, now: Document, before: Document | None) -> str:
    """One reading as text."""
    text = in_text(server, now, _lines(server, now, before))
    if not watches:
        return text
    return f"{_CLEAR}{text}" if sys.stdout.isatty() else f"{text}\n"


def _lines(server: str, now: Document, before: Document | None) -> Iterator[str]:
    figures = f"{_size(now['memory_bytes'])} of memory, {now['requests_in_flight']:,} in flight"
    yield f"hotrow {now['version']} at {server}: {now['state']}, up {_duration(now['uptime_s'])}, {figures}"
    unmatched = sum(now["unmatched_requests"].values())
    if unmatched:
        yield f"{unmatched:,} requests named no served model"
    # Another process, or the same process for the first time: all counts are new.
    is_first = before is None or before["uptime_s"] >= now["uptime_s"]
    seconds = None if before is None or is_first else now["uptime_s"] - before["uptime_s"]
    earlier = {} if before is None or is_first else {model["name"]: model for model in before["models"]}
    rates = ("requests/s", "samples/s") if seconds else ()
    models = [row for model in now["models"] for row in _model_rows(model, earlier.get(model["name"]), seconds)]
    yield ""
    yield from aligned((*_MODEL_COLUMNS, *rates), models)
    for model in now["models"]:
        for version in model["versions"]:
            if version["reason"]:
                number = f" version {version['version']}" if version["version"] else ""  # otherwise the whole model
                yield f"{model['name']}{number}: {version['reason']}"
    earlier_tables = {} if before is None or is_first else dict(_tables(before))
    rows = [row for path, table in _tables(now) for row in _tier_rows(path, table, earlier_tables.get(path), seconds)]
    yield ""
    yield from aligned((*_TIER_COLUMNS, "keys/s") if seconds else _TIER_COLUMNS, rows)
    updates = list(_update_rows(now, before if seconds else None))
    if updates:
        yield ""
        yield from aligned(_UPDATE_COLUMNS, updates)


def _model_rows(model: Document, before: Document | None, seconds: float | None) -> Iterator[Sequence[str]]:
    """One row per version; the server counts requests for all versions of a model together."""
    total, failed = sum(model["requests"].values()), _failed(model["requests"])
    if before and (sum(before["requests"].values()) > total or before["samples"] > model["samples"]):
        before = model  # a worker has ended, and its counts with it
    latency = _times(model["latency"], before and before["latency"])
    figures = [f"{total:,}", f"{failed:,}", f"{model['samples']:,}"]
    figures += [_milliseconds(latency.quantile(part)) for part in (0.5, 0.99)]
    if seconds:
        earlier = (sum(before["requests"].values()), before["samples"]) if before else (0, 0)
        counts = zip((total, model["samples"]), earlier, strict=True)
        figures += [f"{(count - before_it) / seconds:,.0f}" for count, before_it in counts]
    for index, version in enumerate(model["versions"]):
        shared = figures if index == 0 else []
        yield (model["name"] if index == 0 else "", version["version"] or "-", version["state"].lower(), *shared)
    if not model["versions"]:
        yield (model["name"], "-", "unloaded", *figures)


def _tables(document: Document) -> Iterator[tuple[str, Document]]:
    """Every table with the path ``model/version/table``."""
    for model in document["models"]:
        for version in model["versions"]:
            for table in version["tables"]:
                yield f"{model['name']}/{version['version']}/{table['name']}", table


def _tier_rows(path: str, table: Document, before: Document | None, seconds: float | None) -> Iterator[Sequence[str]]:
    earlier = {tier["name"]: tier for tier in before["tiers"]} if before else {}
    for index, tier in enumerate(table["tiers"]):
        old = earlier.get(tier["name"])
        if old and (old["hits"] > tier["hits"] or old["misses"] > tier["misses"]):
            old = None  # the version was loaded again, and counts from zero
        asked = tier["hits"] + tier["misses"]
        hits, misses = (tier[name] - (old[name] if old else 0) for name in ("hits", "misses"))
        times = tier["fetch_times"] and _times(tier["fetch_times"], old and old["fetch_times"])
        yield (
            path if index == 0 else "",
            tier["name"],
            tier["state"] if tier["is_up"] else "failing",
            "-" if tier["rows"] is None else f"{'~' if tier['rows_are_estimated'] else ''}{tier['rows']:,}",
            "-" if tier["bytes"] is None else _size(tier["bytes"]),
            f"{asked:,}",
            f"{tier['hits']:,}",
            _share(hits, hits + misses),
            f"{tier['errors']:,}",
            _milliseconds(times.quantile(0.99)) if times else "-",
            *([f"{(hits + misses) / seconds:,.0f}"] if seconds else []),
        )
    keys, defaulted = table["keys"], table["defaulted_keys"]
    yield ("", "default value", "", "", "", f"{keys:,}", f"{defaulted:,}", _share(defaulted, keys))


def _update_rows(now: Document, before: Document | None) -> Iterator[Sequence[str]]:
    """One row per table and reader of updates; the figures of a reader are in its first row."""
    earlier = {} if before is None else dict(_readers(before))
    for (path, worker), reader in _readers(now):
        old = earlier.get((path, worker))
        times, old_times = reader["visible_times"], old and old["visible_times"]
        if old_times and sum(old_times["counts"]) > sum(times["counts"]):
            old_times = None  # the version was loaded again, and counts from zero
        figures: Sequence[str] = (
            f"{path} (worker {worker})" if worker else path,
            "fault" if reader["fault"] else "up",
            lag_of(reader),
            _milliseconds(_times(times, old_times).quantile(0.99)),
            by_reason(reader["rejected"]),
        )
        for table in reader["tables"] or [None]:
            newest = ("-", "-", "-") if table is None else (table["name"], _step(table), _utc(table["time_ms"]))
            yield (*figures, *newest)
            figures = [""] * len(figures)


def _readers(document: Document) -> Iterator[tuple[tuple[str, int], Document]]:
    """Every reader of updates with the path ``model/version`` and its worker."""
    for model in document["models"]:
        for version in model["versions"]:
            for reader in version["updates"]:
                yield (f"{model['name']}/{version['version']}", reader["worker"]), reader


def lag_of(reader: Document) -> str:
    """Return what a reader of updates has not read yet."""
    return f"{reader['lag_messages']:,} messages, {reader['lag_s']:.1f} s"


def by_reason(counts: dict[str, int]) -> str:
    """Return a count and its parts."""
    parts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values()):,} ({parts})" if parts else "0"


def _step(table: Document) -> str:
    return "-" if table["step"] is None else f"{table['step']:,}"


def _utc(time_ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError):  # a trainer may write any number
        return f"{time_ms} ms"


def _times(now: Document, before: Document | None) -> Histogram:
    """The durations that were counted after ``before``."""
    histogram = Histogram(tuple(now["bounds_s"]))
    earlier = before["counts"] if before else [0] * len(now["counts"])
    counts = [count - old for count, old in zip(now["counts"], earlier, strict=True)]
    histogram.add(counts, now["sum_s"] - (before["sum_s"] if before else 0.0))
    return histogram


def _failed(requests: dict[str, int]) -> int:
    return sum(count for code, count in requests.items() if int(code) >= 400)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with aligned columns: texts on the left, numbers on the right."""
    lines = [list(map(str.upper, columns)), *([*row, *[""] * (len(columns) - len(row))] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(width) if name in _TEXT_COLUMNS else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _milliseconds(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s * 1000:.2f}"


def _size(size_bytes: float) -> str:
    units = ("KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(1, len(units)) if size_bytes < 1024 ** (power + 1)), len(units))
    return f"{size_bytes / 1024**power:,.1f} {units[power - 1]}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])
