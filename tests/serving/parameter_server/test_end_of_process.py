"""Processes that end without closing their server, while its own threads are looking rows up or copying them."""

import subprocess
import sys

import numpy as np
import pytest

from tests.serving.small_server import write_sparse_directory

COUNT = 100_000

SERVE = """
import logging, sys
from contextlib import suppress
from pathlib import Path
import numpy as np
from serving.errors import StoreError
from serving.parameter_server import ParameterServer, TierSettings
from serving.storage import MemoryStore
from tests.serving.small_server import model_of

class SlowStore(MemoryStore):
    name = "slow"

logging.disable()  # which says that the tier is late
settings = {"memory": TierSettings(fills_at_start=False), "slow": TierSettings(timeout_ms=int(sys.argv[2]) or None)}
server = ParameterServer([MemoryStore(), SlowStore()], promote=sys.argv[3] == "promote", settings=settings)
server.load_model(model_of(Path(sys.argv[1])))
with suppress(StoreError):
    server.lookup("m.t", np.arange(COUNT))
"""


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("timeout_ms", "promote"), [(0, "promote"), (1, "keep")], ids=["rows are promoted", "a tier is late"]
)
def test_a_process_that_does_not_close_its_server_ends_well(tmp_path, timeout_ms, promote, times):
    write_sparse_directory(tmp_path / "t", np.arange(COUNT), np.ones((COUNT, 3), np.float32))
    program = SERVE.replace("COUNT", str(COUNT))
    for _ in range(times):
        command = [sys.executable, "-c", program, tmp_path, str(timeout_ms), promote]
        ended = subprocess.run(command, capture_output=True, text=True)

        assert (ended.returncode, ended.stderr) == (0, "")
