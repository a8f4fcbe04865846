"""SIGTERM ends a server although a load hangs, as it does on a file server that does not answer."""

import json
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest

from tests.tools.tiny_model import TinyModel
from tests.tools.warm import Warm

DEADLINE_S = 60
HANGING = """
import sys, time
from serving.repository.served_model import ServedNetwork
warm_up = ServedNetwork.warm_up
def hang(model):
    if model.name == "hangs":
        print("hangs", flush=True)
        time.sleep(1000)
    warm_up(model)
ServedNetwork.warm_up = hang
from serving.cli.entry import run
sys.exit(run(["serve", *sys.argv[1:]]))
"""


@pytest.fixture
def start(tmp_path):
    """Start a server whose loads of the model ``hangs`` never end; its first line is read until it has ``until``."""
    started = []

    def serve(names, until, *options):
        for name in names:
            TinyModel().write(tmp_path / "models", name)
        with (tmp_path / "stderr").open("wb") as errors:
            process = Warm("-c", HANGING, tmp_path / "models", "--http-port", "0", *options, stderr=errors)
        started.append(process)
        line = next(line for line in process.stdout if until in line)
        return process, line.split()[-1]

    yield serve
    for process in started:
        process.kill()
        process.communicate()


def assert_ends(process):
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_at_the_start(start):
    process, _ = start(["hangs"], "hangs")

    assert_ends(process)


def post(url, document=None):
    request = urllib.request.Request(url, json.dumps(document or {}).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return answer.status


@pytest.mark.slow
def test_after_a_client_has_asked_for_it_many_times_while_other_requests_are_answered(start):
    process, url = start(["hangs", "tiny"], "listening", "--model-control-mode", "explicit", "--load-model", "tiny")

    def load():
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            post(f"{url}/v2/repository/models/hangs/load")

    loads = [threading.Thread(target=load) for _ in range(40)]
    for one in loads:
        one.start()
    next(line for line in process.stdout if "hangs" in line)
    with urllib.request.urlopen(f"{url}/v2/models/stats", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"{url}/status", timeout=DEADLINE_S) as answer:
        assert answer.status == 200

    assert_ends(process)
    for one in loads:
        one.join()


def test_the_last_resort_ends_a_process_with_the_exit_code():
    code = "import time; from serving.cli.threads import end_process_after; end_process_after(0.01, 7); "
    code += "time.sleep(1000)"

    done = subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False)

    assert done.returncode == 7


def test_an_end_during_a_call_that_hangs_does_not_reach_the_destructors_of_libraries():
    code = "import atexit, os, threading, time; from serving.cli.threads import end_process_after; "
    code += "atexit.register(os.abort); end_process_after(1000, 7); "  # handlers run in reverse order
    code += "threading.Thread(target=time.sleep, args=(1000,), daemon=True, name='hotrow-load').start()"

    done = subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False)

    assert done.returncode == 7


def test_an_end_waits_for_a_call_that_is_about_to_end():
    code = "import atexit, threading, time; from serving.cli.threads import end_process_after; "
    code += "atexit.register(print, 'handlers run'); end_process_after(1000, 7); "
    code += "threading.Thread(target=time.sleep, args=(0.02,), daemon=True, name='hotrow-load').start()"
    command = [sys.executable, "-c", code]

    done = subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "handlers run\n", "")
