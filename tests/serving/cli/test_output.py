"""Standard streams that cannot be written: their reader has left, their disk is full, or they are closed."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from tests.tools.tiny_model import TinyModel

HOTROW = [sys.executable, "-m", "serving.cli.entry"]


@contextmanager
def left_reader():
    """The write end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def close_stdout():
    os.close(1)


def close_stdin():
    os.close(0)


def run(*arguments, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([*HOTROW, *map(str, arguments)], text=True, timeout=120, check=False, **streams)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    TinyModel().write(folder)
    return folder


@pytest.mark.parametrize("arguments", [["check", "{}"], ["--version"]], ids=["report", "version"])
def test_a_report_whose_reader_leaves_ends_quietly_as_by_sigpipe(repository, arguments):
    with left_reader() as writer:
        done = run(*[word.format(repository) for word in arguments], stdout=writer)

    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["check", "{}"], ["--version"]], ids=["report", "version"])
def test_a_report_that_does_not_fit_the_disk_fails(repository, arguments):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = run(*[word.format(repository) for word in arguments], stdout=full)

    assert done.returncode == 1
    assert done.stderr == "hotrow: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("fault", ["left", "full", "closed"])
def test_a_token_that_nobody_has_seen_is_not_in_the_file(tmp_path, fault):
    file = tmp_path / "tokens.json"
    for name in ("first", "second"):
        before = file.read_bytes() if file.exists() else None
        with left_reader() as left, open("/dev/full", "w", encoding="utf-8") as full:
            streams = {"left": {"stdout": left}, "full": {"stdout": full}, "closed": {"preexec_fn": close_stdout}}
            done = run("token", file, name, **streams[fault])

        assert done.returncode == (141 if fault == "left" else 1)
        assert "SHA-256" not in done.stderr
        assert (file.read_bytes() if file.exists() else None) == before
        assert {path.name for path in tmp_path.iterdir()} == ({file.name} if before else set())
        assert run("token", file, name).returncode == 0  # the name is free


def test_a_command_whose_reader_leaves_writes_its_file(repository, tmp_path):
    file = tmp_path / "user.snapshot"
    with left_reader() as writer:
        done = run("snapshot", repository / "tiny" / "1" / "user", file, stdout=writer, stderr=writer)

    assert done.returncode == 0
    assert file.stat().st_size


@pytest.mark.long
def test_a_training_whose_reader_leaves_writes_its_model(tmp_path):
    with left_reader() as writer:
        done = run("train", "--synthetic", 300, "--model", "ncf", "--output", tmp_path, stdout=writer, stderr=writer)

    assert done.returncode == 0
    assert (tmp_path / "ncf" / "1" / "manifest.json").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_command_that_writes_files_finishes_them_and_then_fails_if_its_output_does_not_fit_the_disk(
    repository, tmp_path
):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = run("export-onnx", repository / "tiny", tmp_path / "out.onnx", stdout=full)

    assert done.returncode == 1
    assert "standard output cannot be written: No space left on device" in done.stderr
    assert (tmp_path / "out.onnx").stat().st_size


def test_a_server_whose_reader_leaves_keeps_serving(repository, tmp_path):
    path = str(tmp_path / "socket")
    with left_reader() as writer:
        process = subprocess.Popen([*HOTROW, "serve", repository, "--uds", path], stdout=writer, stderr=writer)
    try:
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200"):  # the output is written once the models are loaded
            assert process.poll() is None
            time.sleep(0.1)
            with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
                connection.connect(path)
                connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer = connection.recv(4096)
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_closed_streams_are_not_an_error(repository, tmp_path):
    target = tmp_path / "out.onnx"
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *HOTROW, "export-onnx", repository / "tiny", target]

    done = subprocess.run(command, capture_output=True, timeout=120, check=False)

    assert done.returncode == 0
    assert target.stat().st_size


def test_samples_from_a_closed_standard_input_are_empty():
    done = run("predict", "m", "-", "--url", "http://127.0.0.1:1", preexec_fn=close_stdin)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hotrow predict: http://127.0.0.1:1: no server answers: ")


def test_an_unbuffered_python_prints_each_line_at_once():
    program = "from serving.cli.output import watch_streams; watch_streams(); print('line'); import os; os._exit(0)"

    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "line\n"
