"""A real Triton Inference Server on the CPU, for tests and as a peer: 2.51.0, from the package nvidia-pytriton 0.7.0.

It needs its own environment, because its Python backend corrupts tensors under NumPy 2. `make .venv-numpy1/.triton`
makes it: the interpreter is then `.venv-numpy1/bin/python`.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import NamedTuple

from serving.features import FEATURES_FILE, read_definition, triton_tensors
from serving.model.graph import read_graph
from serving.model.manifest import write_manifest
from serving.model.triton_config import triton_config
from serving.model.version_writer import TRITON_ENTRY

DEADLINE_S = 60
INSTANCES = 2
FACTS = """
import json, sys, sysconfig
print(json.dumps({"packages": sysconfig.get_paths()["purelib"], "python": "%d.%d" % sys.version_info[:2],
                  "prefix": sys.prefix, "lib": sysconfig.get_config_var("LIBDIR")}))
"""


class Ports(NamedTuple):
    """The ports of a running Triton on 127.0.0.1."""

    http: int
    grpc: int
    metrics: int


def prepare(repository, name, versions=(1,), extra="", instances=INSTANCES):
    """Add what an export writes for Triton to a model: ``model.py``, and a ``config.pbtxt`` of some instances."""
    for number in versions:
        version = repository / name / str(number)
        (version / "model.py").write_text(TRITON_ENTRY)
        write_manifest(version, name, number)
    features = version / FEATURES_FILE
    definition = read_definition(features) if features.exists() else None
    config = triton_config(name, triton_tensors(read_graph(version / "graph.json"), definition), "CPU")
    config = config.replace("count: 1", f"count: {instances}")
    (repository / name / "config.pbtxt").write_text(config + extra)


@contextlib.contextmanager
def running(python, repositories, folder, *options, models_python=None):
    """Serve ``repositories`` with the Triton in the environment of ``python``; yield its ports.

    The server's log is ``triton.log`` in ``folder``. Models run in the environment of ``models_python``, or of
    ``python``.
    """
    facts, models = (
        json.loads(subprocess.run([path, "-c", FACTS], check=True, capture_output=True).stdout)
        for path in (python, models_python or python)
    )
    packages = Path(facts["packages"])
    triton = packages / "pytriton" / "tritonserver"
    # Triton does not look for the backend's stub where the wheel keeps it.
    backend = folder / "backends" / "python"
    shutil.copytree(triton / "backends" / "python", backend)
    stub = shutil.copy(triton / "python_backend_stubs" / facts["python"] / "triton_python_backend_stub", backend)
    os.chmod(stub, 0o755)
    ports = Ports(*free_ports(3))
    shared_memory = f"hotrow_triton_{uuid.uuid4().hex}"  # a Triton that is killed leaves it behind
    command = [
        triton / "bin" / "tritonserver",
        *(f"--model-repository={repository}" for repository in repositories),
        *options,
    ]
    command += [f"--backend-config=python,shm-region-prefix-name={shared_memory}"]
    # With the default of 1 MiB, which grows, Triton sometimes crashes in boost::interprocess while instances start.
    command += ["--backend-config=python,shm-default-byte-size=16777216"]
    command += [f"--backend-directory={backend.parent}", "--disable-auto-complete-config", "--allow-gpu-metrics=false"]
    for protocol, port in ports._asdict().items():
        command += [f"--{protocol}-address=127.0.0.1", f"--{protocol}-port={port}"]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{facts['lib']}:{packages / 'nvidia_pytriton.libs'}",
        "PATH": f"{models['prefix']}/bin:{os.environ['PATH']}",
    }
    log = folder / "triton.log"
    with log.open("wb") as errors, subprocess.Popen(command, stdout=errors, stderr=errors, env=environment) as process:
        try:
            wait_until_ready(process, ports.http, log)
            yield ports
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            finally:
                process.kill()
                for region in Path("/dev/shm").glob(f"*{shared_memory}*"):
                    region.unlink()


def free_ports(count):
    """Ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def wait_until_ready(process, port, log):
    """Return when every model is ready."""
    end = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit(f"Triton did not start: {log}\n{log.read_text()}")
