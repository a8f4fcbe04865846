"""``python -m training.persia run`` with real processes: how it starts, ends and restarts them."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.tools.warm import Warm
from tests.training.persia.batches import SLOTS, draw
from tests.training.persia.roles import pids_of_run
from tests.training.persia.training import plain_losses
from tests.training.publishing.following import Follower, rows_in
from training.persia.__main__ import main
from training.persia.checkpoint import CheckpointFacts, write_tables
from training.persia.config import read_embedding_config

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "persia_dlrm"
DEADLINE_S = 240
PAUSE = "import signal\nsignal.pause()\n"


class Started:
    """A run in a folder of its own. No process of it outlives the test."""

    def __init__(self, folder, nn_worker=PAUSE, data_loader=PAUSE, options=(), environment=None, cwd=ROOT):
        self.folder = folder
        files = {"nn_worker.py": nn_worker, "data_loader.py": data_loader}
        files |= {"embedding.yml": "slots_config: {a: {dim: 3}}\n", "global.yml": ""}
        for name, text in files.items():
            if not (folder / name).exists():
                (folder / name).write_text(text)
        command = ["-m", "training.persia", "run"]
        command += [f"--embedding-config={folder}/embedding.yml", f"--global-config={folder}/global.yml"]
        command += [f"--data-loader={folder}/data_loader.py", f"--nn-worker={folder}/nn_worker.py", *options]
        with (folder / "stderr").open("wb") as errors:
            self.process = Warm(*command, cwd=cwd, env={**os.environ, **(environment or {})}, stderr=errors)

    def end(self):
        """Wait for the end, and return the exit code, the output and the log."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        log = (self.folder / "stderr").read_text()
        return self.process.returncode, output, log


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*arguments, **more):
        started.append(Started(tmp_path, *arguments, **more))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.communicate()
    wait_for_ends(pids_of_run(tmp_path))
    assert pids_of_run(tmp_path) == []


def wait_for_ends(pids):
    """Wait until these processes have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            ready, _, _ = select.select([descriptor], [], [], DEADLINE_S)
            os.close(descriptor)
            assert ready, f"process {pid} is still there"


SHOW = """
import os
import sys

from tests.training.persia.roles import siblings, wait_for_servers

wait_for_servers()
names = siblings()
print(*names)
print(open(f"/proc/{names['emb-server-1']}/cmdline").read().replace("\\0", " "))
print(sys.argv, os.environ["TRAINER_PORT"].isdecimal(), os.environ["FORWARD_QUEUE_SIZE"])
sys.exit(7)
"""


def test_the_run_ends_with_the_nn_worker_and_returns_its_code(start, tmp_path):
    code, output, log = start(SHOW, options=["--embedding-servers=2"]).end()

    assert code == 7, log
    names, command, scripts_view = output.splitlines()
    assert {"emb-server-0", "emb-server-1", "nn-worker"} <= set(names.split())
    assert command.strip().endswith("-m training.persia embedding-server 1")
    assert scripts_view == f"['{tmp_path}/nn_worker.py'] True 16"
    assert pids_of_run(tmp_path) == []


STUBBORN = """
import signal
import subprocess
import sys

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        (signal.SIGINT, 130),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_to_the_run_ends_every_role(start, tmp_path, number, code):
    run = start("print('up', flush=True)\n" + PAUSE)
    assert run.process.stdout.readline() == "up\n"
    pids = pids_of_run(tmp_path)
    assert len(pids) == 4

    run.process.send_signal(number)

    assert run.end()[0] == code
    wait_for_ends(pids)


@pytest.mark.long
def test_a_role_that_ignores_the_signal_is_killed_with_its_children(start):
    run = start(STUBBORN)
    child = int(run.process.stdout.readline())

    run.process.send_signal(signal.SIGTERM)

    assert run.end()[0] == 143
    wait_for_ends([child])


KILL = """
from tests.training.persia.roles import kill, wait_for_servers

wait_for_servers()
kill("emb-server-0")
"""


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_run_without_a_checkpoint_ends_or_begins_again_as_configured(start, restarts):
    code, _, log = start(KILL + PAUSE, options=[f"--max-restarts={restarts}"]).end()

    assert code == 1
    ends = "ERROR hotrow.persia: embedding-server 0 was ended by SIGKILL; "
    again = f"{ends}there is no checkpoint; all roles start again, restarts left: 0\n"
    assert log == again * restarts + f"{ends}the run ends; there is no checkpoint\n"


@pytest.mark.parametrize(
    ("nn_worker", "data_loader", "code", "message"),
    [
        pytest.param("raise ValueError('wrong')", PAUSE, 1, "ValueError: wrong", marks=pytest.mark.long),
        ("import os; os.kill(os.getpid(), 11)", PAUSE, 139, "nn-worker was ended by SIGSEGV; the run ends"),
        pytest.param(
            *(PAUSE, "raise ValueError('wrong')", 1, "data-loader ended with exit code 1; the run ends"),
            marks=pytest.mark.long,
        ),
        pytest.param(PAUSE, "import sys; sys.exit('no data')", 1, "no data", marks=pytest.mark.long),
        pytest.param(
            *(PAUSE, "import os; os.kill(os.getpid(), 9)", 1, "data-loader was ended by SIGKILL; the run ends"),
            marks=pytest.mark.long,
        ),
        ("import sys; sys.exit()", PAUSE, 0, ""),
    ],
)
def test_a_script_that_ends_ends_the_run(start, nn_worker, data_loader, code, message):
    ended, _, log = start(nn_worker, data_loader).end()

    assert ended == code, log
    assert message in log


def test_a_role_starts_without_pytorch():
    code = "import sys; import training.persia.__main__; sys.exit('torch' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, caplog):
    """Run a command that cannot start in this process; return the exit code, and what it says."""
    (tmp_path / "script.py").write_text(PAUSE)
    (tmp_path / "embedding.yml").write_text("slots_config: {a: {dim: 3}}\n")
    (tmp_path / "global.yml").write_text("")

    def refused(*options):
        files = [f"--{name}-config={tmp_path}/{name}.yml" for name in ("embedding", "global")]
        scripts = [f"--{name}={tmp_path}/script.py" for name in ("data-loader", "nn-worker")]
        monkeypatch.setattr("sys.argv", ["persia", "run", *files, *scripts, *options])
        try:
            code = main()
        except SystemExit as exit_:
            code = exit_.code
        return code, capsys.readouterr().err + caplog.text

    return refused


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--embedding-config=none.yml", "none.yml: cannot be read: no such file or directory"),
        ("--nn-worker=none.py", "--nn-worker: expected a Python script, got none.py, which is no file"),
        ("--embedding-workers=0", "expected a whole number of at least 1, got '0'"),
        ("--max-restarts=-1", "expected a whole number of at least 0, got '-1'"),
        ("--checkpoint=/proc/none", "/proc/none: cannot be written: "),
    ],
)
def test_a_run_that_cannot_start_says_why(refused, option, message):
    code, said = refused(option)

    assert code == 2
    assert message in said


def test_a_port_that_is_in_use_is_reported(refused, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("TRAINER_PORT", str(port))
        code, said = refused()
    monkeypatch.setenv("TRAINER_PORT", "here")
    other, other_said = refused()

    assert (code, other) == (2, 2)
    assert f"TRAINER_PORT: cannot listen on 127.0.0.1:{port}: " in said
    assert "TRAINER_PORT: cannot listen on 127.0.0.1:here: " in other_said


@pytest.mark.long
def test_the_example_needs_no_checkpoint(start, tmp_path):
    sample = "\t".join(["1", *"7" * 13, *["0a1b"] * 26]) + "\n"
    (tmp_path / "train.txt").write_text(sample * 10)
    files = [f"--{name}-config={EXAMPLE}/{name}_config.yml" for name in ("embedding", "global")]
    scripts = [f"--data-loader={EXAMPLE}/data_compose.py", f"--nn-worker={EXAMPLE}/train.py"]

    code, output, log = start(options=[*files, *scripts], environment={"PYTHONPATH": str(ROOT)}, cwd=tmp_path).end()

    assert code == 0, log
    assert [line.split()[:3] for line in output.splitlines()] == [["current", "idx:", "0"], ["current", "idx:", "1"]]


LOAD = """
from tests.tools.warm import Warm
from tests.training.persia.batches import batches_of, draw
from training.persia.ctx import init_backend

backend = init_backend()
for batch in batches_of(draw({batches})):
    backend.send_data(batch)
"""
TRAIN = """
import os

from tests.training.persia.roles import kill
from tests.training.persia.training import a_net, step
from training.persia.ctx import TrainCtx
from training.persia.sparse.optim import Adagrad

net, dense_optimizer = a_net()
context = TrainCtx(None, Adagrad(0.1), int(os.environ["TRAINER_PORT"]), 2, embedding_staleness=1)
with context:
    publisher = context.publish_to({log!r}, "ctr")
    loaded = context.load_checkpoint(net, dense_optimizer)
    for number, data in enumerate(context.data_loader()):
        print(context.batches, step(context, data, net, dense_optimizer, number), flush=True)
        if context.batches % 2 == 0:
            context.dump_checkpoint(net, dense_optimizer)
        else:
            publisher.publish()
        victim = {kills}.get(loaded)
        if number == 2 and victim is not None:
            kill(victim)
    context.dump_checkpoint(net, dense_optimizer)
"""
#: Whom the NN worker kills in its third batch, by the batches of the checkpoint that it has loaded.
KILLS = {0: "emb-worker-1", 2: "emb-server-0", 4: "emb-worker-0", 6: "data-loader", 8: "nn-worker", 10: "emb-server-1"}


@pytest.mark.long
def test_a_training_goes_on_from_its_last_checkpoint_after_every_role_was_killed(start, tmp_path):
    kills = len(KILLS)
    count = 3 + 2 * kills
    (tmp_path / "embedding.yml").write_text(json.dumps({"slots_config": SLOTS}))
    options = ["--embedding-workers=2", "--embedding-servers=2", f"--checkpoint={tmp_path}/saved"]

    run = start(
        TRAIN.format(kills=KILLS, log=str(tmp_path / "log")),
        LOAD.format(batches=count),
        [*options, f"--max-restarts={kills}"],
    )
    code, output, log = run.end()

    assert code == 0, log
    for left, (batches, name) in zip(range(kills - 1, -1, -1), KILLS.items(), strict=True):
        role = name.replace("emb", "embedding").replace("er-", "er ") if name.startswith("emb") else name
        last = f"the last checkpoint is {tmp_path}/saved/batch-{batches + 2}"
        assert f"{role} was ended by SIGKILL; {last}; all roles start again, restarts left: {left}\n" in log
    lines = [line.split() for line in output.splitlines()]
    by_batch = {int(batch): float(loss) for batch, loss in lines}  # the last time that a batch was trained
    expected = plain_losses(draw(count), read_embedding_config(tmp_path / "embedding.yml"))
    np.testing.assert_allclose([by_batch[number] for number in range(count)], expected, rtol=1e-4)
    checkpoint = tmp_path / "saved" / f"batch-{count}"
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {checkpoint.name, "outbox"}
    write_tables(checkpoint, tmp_path / "tables")
    follower = Follower().follow(tmp_path / "log", CheckpointFacts.read(checkpoint).run)
    assert follower.tables == rows_in(tmp_path / "tables")
