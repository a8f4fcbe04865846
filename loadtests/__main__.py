"""Start a server, send load to it with Locust, and write a report with charts; see docs/loadtests.md."""

import argparse
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from loadtests.scenarios import SCENARIOS
from serving.cli.client import token_header

ROOT = Path(__file__).parents[1]
USERS = {"http": "HttpClient", "grpc": "GrpcClient"}


def main():
    options, for_locust = read_options()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.address:
        return send_load(options, options.address, for_locust)
    with serving(options) as (http, grpc):
        before = read_metrics(http)
        code = send_load(options, http if options.protocol == "http" else grpc, for_locust)
        try:
            describe(before, read_metrics(http))
        except OSError:
            sys.exit("the server no longer answers; the lines above say why")
        return code


def read_options():
    """The options of this command, and those for Locust."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests",
        description=__doc__,
        epilog="More options: -u USERS, -t TIME, --model, --samples, --skew, --unknown, --allow-remote, and those of "
        "`locust --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("repository", type=Path, metavar="REPO", help="whatever `hotrow serve` takes")
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="steady", help="(default: %(default)s)")
    parser.add_argument("--protocol", choices=list(USERS), default="http", help="(default: %(default)s)")
    parser.add_argument("--address", metavar="HOST:PORT", help="use this server (default: start one on a free port)")
    parser.add_argument("--output", type=Path, default=Path("loadtest_report"), help="(default: %(default)s)")
    return parser.parse_known_args()


@contextmanager
def serving(options):
    """Run ``hotrow serve`` on free ports, and yield its addresses for HTTP and gRPC."""
    grpc_port = ["--grpc-port", "0"] if options.protocol == "grpc" else []
    command = [sys.executable, "-m", "hotrow", "serve", str(options.repository)]
    local = ["--host", "127.0.0.1", "--http-port", "0"]
    with subprocess.Popen([*command, *local, *grpc_port], stdout=subprocess.PIPE, text=True) as server:
        try:
            printed = []
            for line in server.stdout:
                print(line, end="", flush=True)
                printed.append(line)
                if line.startswith("listening on "):
                    break
            else:
                sys.exit("the server did not start; the lines above say why")
            found = dict(re.findall(r"listening (on|for gRPC on) (?:http://)?(\S+)", "".join(printed)))
            yield found["on"], found.get("for gRPC on")
        finally:
            server.send_signal(signal.SIGTERM)


def send_load(options, address, for_locust):
    """Run Locust without its page; return its exit code, which is not 0 if a request failed."""
    report = options.output / f"{options.scenario}_{options.protocol}"
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py"), USERS[options.protocol]]
    host = f"http://{address}" if options.protocol == "http" else address
    chosen = ["--repository", str(options.repository), "--scenario", options.scenario, "--host", host]
    files = ["--html", f"{report}.html", "--csv", str(report), "--csv-full-history"]
    quietly = ["--headless", "--only-summary", "--stop-timeout", "10"]
    code = subprocess.run([*command, *chosen, *files, *quietly, *for_locust]).returncode
    if Path(f"{report}.html").exists():
        print(f"report: {report}.html, with the numbers in {report}_*.csv")
    return code


def read_metrics(address):
    """The server's resident memory, keys looked up, and keys that no tier has."""
    names = ("process_resident_memory_bytes", "hotrow_lookup_keys_total", "hotrow_defaulted_keys_total")
    request = urllib.request.Request(f"http://{address}/metrics", headers=token_header())
    with urllib.request.urlopen(request) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return [sum(sample.value for sample in samples if sample.name == name) for name in names]


def describe(before, after):
    """Print what the server counted."""
    memory, keys, defaulted = after
    percent = 100 * defaulted / keys if keys else 0.0
    print(f"server: {keys:,.0f} keys looked up, {percent:.2f} % of them unknown")
    print(f"server: {before[0] / 2**20:,.0f} MiB of memory before, {memory / 2**20:,.0f} MiB after")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
