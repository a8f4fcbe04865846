"""A real Triton Inference Server on the CPU as a peer: 2.51.0, from the package nvidia-pytriton 0.7.0.

It needs its own environment, because its Python backend corrupts tensors under NumPy 2:

    python3 -m venv triton-env
    triton-env/bin/pip install --no-deps nvidia-pytriton==0.7.0
    triton-env/bin/pip install 'numpy<2' pydantic array-api-compat orjson onnxruntime
    triton-env/bin/pip install scikit-build-core nanobind cmake ninja
    triton-env/bin/pip install --no-build-isolation --no-deps -e .
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
from pathlib import Path

from serving.model.graph import read_graph
from serving.model.manifest import write_manifest
from serving.model.version_writer import TRITON_ENTRY, triton_config

DEADLINE_S = 60
INSTANCES = 2
FACTS = """
import json, sys, sysconfig
print(json.dumps({"packages": sysconfig.get_paths()["purelib"], "python": "%d.%d" % sys.version_info[:2],
                  "prefix": sys.prefix, "lib": sysconfig.get_config_var("LIBDIR")}))
"""


def prepare(repository, name):
    """Add ``model.py`` and ``config.pbtxt`` with two instances to a model of one version."""
    version = repository / name / "1"
    (version / "model.py").write_text(TRITON_ENTRY)
    write_manifest(version, name, 1)
    config = triton_config(name, read_graph(version / "graph.json"))
    (repository / name / "config.pbtxt").write_text(config.replace("count: 1", f"count: {INSTANCES}"))


@contextlib.contextmanager
def running(python, repository, folder):
    """Serve ``repository`` with the Triton in the environment of ``python``; yield its HTTP port."""
    facts = json.loads(subprocess.run([python, "-c", FACTS], check=True, capture_output=True).stdout)
    packages = Path(facts["packages"])
    triton = packages / "pytriton" / "tritonserver"
    # Triton does not look for the backend's stub where the wheel keeps it.
    backend = folder / "backends" / "python"
    shutil.copytree(triton / "backends" / "python", backend)
    stub = shutil.copy(triton / "python_backend_stubs" / facts["python"] / "triton_python_backend_stub", backend)
    os.chmod(stub, 0o755)
    ports = free_ports(3)
    command = [triton / "bin" / "tritonserver", f"--model-repository={repository}"]
    command += [f"--backend-directory={backend.parent}", "--disable-auto-complete-config", "--allow-gpu-metrics=false"]
    for protocol, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{protocol}-address=127.0.0.1", f"--{protocol}-port={port}"]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{facts['lib']}:{packages / 'nvidia_pytriton.libs'}",
        "PATH": f"{facts['prefix']}/bin:{os.environ['PATH']}",
    }
    log = folder / "triton.log"
    with log.open("wb") as errors, subprocess.Popen(command, stdout=errors, stderr=errors, env=environment) as process:
        try:
            wait_until_ready(process, ports[0], log)
            yield ports[0]
        finally:
            process.terminate()


def free_ports(count):
    """Ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until_ready(process, port, log):
    """Return when every model is ready."""
    end = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit(f"Triton did not start: {log}\n{log.read_text()}")
