"""Triton's load generator, `perf_analyzer`, from the package tritonclient 2.51.0; later packages are without it.

The libraries that it needs are those of nvidia-pytriton. `make .venv-numpy1/.triton` installs both.
"""

import csv
import json
import subprocess
from pathlib import Path

#: How its command line names the ways to ask.
PROTOCOLS = {"http": ["-i", "http"], "unary": ["-i", "grpc"], "streaming": ["-i", "grpc", "--streaming"]}
_LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
_WINDOWS = 3  # the least number of measurements that it takes
_ANY_SPREAD = "999"  # percent between these measurements


def write_inputs(file, arrays):
    """Write the tensors of one request, arrays by tensor name; a batch dimension is not part of them."""
    tensors = {
        name: {"content": array.reshape(-1).tolist(), "shape": list(array.shape)} for name, array in arrays.items()
    }
    file.write_text(json.dumps({"data": [tensors]}))


class PerfAnalyzer:
    """Runs the program of one environment."""

    def __init__(self, python, folder):
        """Take the environment of the interpreter ``python``; links of libraries come into ``folder``."""
        self._program = Path(python).absolute().parent / "perf_analyzer"
        if not self._program.exists():
            raise SystemExit(f"no {self._program}: `make .venv-numpy1/.triton` installs it")
        (packages,) = self._program.parent.parent.glob("lib/python3*/site-packages")
        self._folder = folder
        for name in _LIBRARIES:
            stem, _, rest = name.partition(".so")
            (found,) = (packages / "nvidia_pytriton.libs").glob(f"{stem}-*.so{rest}*")
            (folder / name).symlink_to(found)

    def measure(self, model, address, protocol, inputs, concurrency, seconds, options=()):
        """Send the request in ``inputs`` again and again; return requests per second, and latencies in microseconds.

        ``options`` are more options of its command line.
        """
        table = self._folder / "measured.csv"
        interval_ms = max(500, round(seconds * 1000 / _WINDOWS))
        command = [self._program, "-m", model, "-u", address, *PROTOCOLS[protocol], "--input-data", inputs, "-f", table]
        command += ["--concurrency-range", str(concurrency), "--measurement-interval", str(interval_ms)]
        command += ["--max-trials", "20", "--stability-percentage", _ANY_SPREAD, *options]
        # One connection per request in flight, as the HTTP client has; the default is one for six.
        environment = {"LD_LIBRARY_PATH": str(self._folder), "TRITON_CLIENT_GRPC_CHANNEL_MAX_SHARE_COUNT": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        if done.returncode:
            raise SystemExit(f"perf_analyzer failed: {done.stdout}{done.stderr}")
        (row,) = csv.DictReader(table.read_text().splitlines())
        return {
            "requests_per_s": float(row["Inferences/Second"]),
            **{name: float(row[f"{name} latency"]) for name in ("p50", "p99")},
        }
