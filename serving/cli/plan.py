"""``hotrow plan``: print the memory of a model in each tier and, from recorded traffic, the hit rate of each size."""

import argparse
import csv
import json
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.cli.numbers import cache_sizes, memory_size, ratio
from serving.config import ModelConfig, read_repository
from serving.errors import ConfigError, OutputError, TraceError, did_you_mean
from serving.model.atomic import atomic_write
from serving.model.picture import PICTURES, check_picture
from serving.model.regular_file import real_path
from serving.planner import (
    OVERFLOW_POLICIES,
    POLICIES,
    Share,
    TablePlan,
    divide_budget,
    gpu_share_for,
    plan_tables,
    read_trace,
    table_sizes,
    write_hot_keys,
)
from serving.planner.chart import chart, draw
from serving.planner.report import (
    CSV_COLUMNS,
    amount,
    csv_rows,
    describe_shares,
    describe_sizes,
    describe_table,
)

_DEFAULT_SIZES = "1%,2%,5%,10%,20%,50%,100%"
_NEED_A_TRACE = ("table", "hit_rate", "ram", "sample", "csv", "plot", "write_hot_keys")


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        description="Print the memory of each table in each tier, and with a trace the hit rate of each cache size.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a configuration, as for `hotrow check`")
    parser.add_argument(
        "trace", type=Path, nargs="*", metavar="TRACE", help="recorded lookups: .npy, .npz, .json, .jsonl or folders"
    )
    parser.add_argument("--model", default="", metavar="NAME", help="plan only this model")
    parser.add_argument("--table", default="", metavar="NAME", help="the table of .npy files")
    parser.add_argument(
        "--sizes",
        type=cache_sizes,
        default=_DEFAULT_SIZES,
        metavar="LIST",
        help=f"rows, or percentages of a table (default: {_DEFAULT_SIZES.replace('%', '%%')})",
    )
    parser.add_argument(
        "--hit-rate", type=ratio, metavar="RATIO", help="print the smallest sizes that reach this hit rate"
    )
    parser.add_argument("--ram", type=memory_size, metavar="SIZE", help="divide this much RAM among the tables: 8GiB")
    parser.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        default="file",
        help="which rows --ram keeps; file: the first rows of the files (default: %(default)s)",
    )
    parser.add_argument("--sample", type=ratio, metavar="RATIO", help="estimate lru from this fraction of the rows")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the numbers of the curves to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw the curves: {', '.join(PICTURES)}")
    parser.add_argument(
        "--write-hot-keys", type=Path, metavar="DIR", help="write the keys of each table here, hottest first"
    )
    parser.set_defaults(run=plan, error_code=1)


def plan(options: argparse.Namespace) -> int:
    """Print the plan."""
    models = _models(options)
    if not options.trace:
        given = next((name for name in _NEED_A_TRACE if getattr(options, name)), None)
        if given is not None:
            raise TraceError(f"--{given.replace('_', '-')}", "needs a trace")
        print(*describe_sizes(table_sizes(models)), sep="\n")
        return 0
    if options.plot is not None:
        check_picture(options.plot)
    trace = read_trace(options.trace, models, options.table)
    plans = []
    for table_plan in plan_tables(models, trace, options.sample):
        plans.append(table_plan)
        _print_table(table_plan, options)
    if options.hit_rate is not None:
        _print_gpu_shares(models, plans, options.hit_rate)
    if options.write_hot_keys is not None:
        write_hot_keys(plans, options.write_hot_keys)
    if options.ram is not None:
        _print_shares(plans, options)
    if options.csv is not None:
        _write_csv(plans, options)
    if options.plot is not None:
        draw(plans, options.plot)
    return 0


def _models(options: argparse.Namespace) -> Sequence[ModelConfig]:
    models = read_repository(options.config).models
    if not options.model:
        return models
    chosen = [config for config in models if config.name == options.model]
    if not chosen:
        names = ", ".join(repr(config.name) for config in models)
        close = did_you_mean(options.model, (config.name for config in models))
        raise ConfigError(str(options.config), "", f"no model {options.model[:64]!r} in it; there is {names}{close}")
    return chosen


def _rows(options: argparse.Namespace, plan: TablePlan) -> NDArray[np.int64]:
    """Return the requested sizes as ascending numbers of rows of this table."""
    rows = (size if isinstance(size, int) else round(size * plan.rows) for size in options.sizes)
    return np.unique([min(max(row, 1), plan.rows) for row in rows])


def _print_table(plan: TablePlan, options: argparse.Namespace) -> None:
    print(*describe_table(plan, _rows(options, plan), options.hit_rate), sep="\n")
    if plan.lookups:
        print("", *chart(plan), "", sep="\n")


def _print_gpu_shares(models: Sequence[ModelConfig], plans: Sequence[TablePlan], hit_rate: float) -> None:
    for config in models:
        names = {config.hps_name(table) for table in config.tables}
        share = gpu_share_for([plan for plan in plans if plan.name in names], "lru", hit_rate)
        found = f'"gpucacheper": {share:g}' if share is not None else "out of reach"
        print(f"model {config.name}: hit rate {hit_rate:g} of lru over all of its tables: {found}")


def _print_shares(plans: Sequence[TablePlan], options: argparse.Namespace) -> None:
    shares = divide_budget(plans, options.policy, options.ram)
    print(f"{amount(options.ram)} of RAM, policy {options.policy}:")
    print(*describe_shares(shares, plans, options.policy, options.write_hot_keys is not None), sep="\n")
    if not any(share.rows for share in shares):
        print("no volatile_db for ps.json: no table gets a row")
        return
    print("for ps.json, with a persistent_db that holds the other rows:")
    print(json.dumps({"volatile_db": _memory_tier(shares, options)}, indent=2))


def _memory_tier(shares: Sequence[Share], options: argparse.Namespace) -> dict[str, Any]:
    tier: dict[str, Any] = {"type": "hash_map"}
    tier["capacity_rows_per_table"] = {share.table: share.rows for share in shares}
    if options.policy in OVERFLOW_POLICIES:
        tier |= {"overflow_policy": OVERFLOW_POLICIES[options.policy], "cache_missed_embeddings": True}
    if options.write_hot_keys is not None:
        tier["hot_keys"] = str(real_path(options.write_hot_keys))
    return tier


def _write_csv(plans: Sequence[TablePlan], options: argparse.Namespace) -> None:
    try:
        with atomic_write(options.csv) as file:
            text = TextIOWrapper(file, "utf-8", newline="")
            writer = csv.writer(text)
            writer.writerow(CSV_COLUMNS)
            for plan in plans:
                writer.writerows(csv_rows(plan, _rows(options, plan)))
            text.detach()
    except OSError as err:
        raise OutputError(f"{options.csv}: cannot be written: {err.strerror}") from err
