"""The log of ``hotrow serve``: nobody who writes to it waits, and no message forges a line."""

import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from serving.cli.main import main
from serving.cli.standard_error import StandardError

LOG = """
import logging, os, sys, warnings
from serving.cli.log import process_log
log = logging.getLogger("test")
with process_log("info", sys.argv[1]):
"""


def logged(form, code, **options):
    """Run indented code with the log on, and return what it wrote to standard error."""
    command = [sys.executable, "-c", LOG + code, form]
    return subprocess.run(command, capture_output=True, timeout=60, **options).stderr.decode()


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("two\nlines", r"two\nlines"),
        ("\r2026-01-01 ERROR forged", r"\r2026-01-01 ERROR forged"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("line\u2028separator", r"line\u2028separator"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        (os.fsdecode(b"no\xffutf"), r"no\udcffutf"),
        ("Größe 数", "Größe 数"),
    ],
)
def test_text_logs_escape_control_characters(message, shown):
    text = logged("text", f"    log.info('model %s', {message!a})\n")

    assert text.endswith(f" INFO test: model {shown}\n")
    assert text.count("\n") == 1


def test_the_lines_of_a_traceback_cannot_be_taken_for_lines_of_the_log():
    text = logged("text", "    log.error('failed', exc_info=ValueError('x\\n2026-01-01 00:00:00,000 INFO forged'))\n")

    assert text.splitlines()[1:] == ["  ValueError: x", "  2026-01-01 00:00:00,000 INFO forged"]


def test_every_line_of_a_json_log_is_an_object():
    code = """
    log.info('a\\nb')
    warnings.warn('careful')
    print('printed', file=sys.stderr)
    os.write(2, b'E0000 00:00:00 chttp2.cc:1] from C++ \\xff\\n')
    os.write(2, b'an unfinished line')
    raise ValueError('unexpected')
"""
    lines = [json.loads(line) for line in logged("json", code).splitlines()]

    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    messages = [line["message"] for line in lines]
    for part in (
        "a\nb",
        "UserWarning: careful",
        "printed",
        r"from C++ \xff",
        "an unfinished line",
        "ValueError: unexp",
    ):
        assert sum(part in message for message in messages) == 1


def test_every_line_of_standard_output_is_an_object_too_and_has_its_time_in_utc():
    code = """
    print('listening', flush=True)
    print('two\\nlines')
    os.write(1, b'from C++')
"""
    command = [sys.executable, "-c", LOG + code, "json"]
    environment = {**os.environ, "TZ": "Asia/Kathmandu"}
    before = datetime.now(UTC)
    printed = subprocess.run(command, capture_output=True, timeout=60, env=environment).stdout.decode()

    lines = [json.loads(line) for line in printed.splitlines()]
    assert sorted(line["message"] for line in lines) == ["from C++", "lines", "listening", "two"]
    assert {(line["level"], line["logger"]) for line in lines} == {("INFO", "stdout")}
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert before - timedelta(seconds=1) < datetime.fromisoformat(line["time"]) < datetime.now(UTC)


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        (["--log-format", "json"], None, True),
        (["--log-format=json"], "text", True),
        (["--log-format", "text"], "json", False),
        (["--grpc-port", "x"], "json", True),
        (["--log-format"], None, False),
    ],
)
def test_errors_of_the_command_line_are_in_the_form_of_the_log(monkeypatch, capfd, words, variable, expected):
    if variable:
        monkeypatch.setenv("HOTROW_LOG_FORMAT", variable)

    with pytest.raises(SystemExit):
        main(["serve", *words])

    errors = capfd.readouterr().err.splitlines()
    assert all(line.startswith("{") for line in errors) == expected
    assert any("hotrow serve: error: " in line for line in errors)


def test_a_crash_is_reported_next_to_a_json_log():
    text = logged("json", "    import ctypes; ctypes.string_at(0)\n", env={**os.environ, "PYTHONFAULTHANDLER": "1"})

    assert "Segmentation fault" in text


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_unread_log_drops_lines_and_says_so_when_it_is_read_again(form):
    code = """
    for number in range(60):
        log.info('%d %s', number, 100_000 * 'x')
    print('free', flush=True)
    sys.stdin.readline()
    log.info('the end')
"""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", LOG + code, form]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer) as process:
        os.close(writer)
        assert b"free" in process.stdout.readline()
        with open(reader, encoding="utf-8") as lines:
            report = next(line for line in lines if "lines were dropped" in line)
            process.stdin.write(b"\n")
            process.stdin.flush()
            end = lines.readline()

    kept_bytes = 4 << 20
    assert f"{60 - kept_bytes // 100_000 - 1} lines" in report or f"{60 - kept_bytes // 100_000} lines" in report
    assert "the end" in end


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_on_a_full_disk_drops_lines_and_says_so_when_there_is_room_again(form, tmp_path):
    code = """
    import resource, time
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    for number in range(2000):  # more than a pipe holds, so some were dropped before the loop ends
        log.info('line %d', number)
    while os.fstat(2).st_size < 2000:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    log.info('the end')
"""
    if form == "json":  # standard error is a pipe to the log
        code = code.replace("os.fstat(2)", "os.stat(sys.argv[2])")
    file = tmp_path / "log"
    with file.open("wb") as opened:
        subprocess.run([sys.executable, "-c", LOG + code, form, file], check=True, stderr=opened, timeout=60)

    lines = file.read_text().splitlines()
    written = sum("line " in line for line in lines)
    reports = re.findall(r"disk was full: ([\d,]+) lines were dropped", str(lines))
    dropped = sum(int(number.replace(",", "")) for number in reports)
    assert reports
    assert 0 < written < 2000
    assert 0 <= written + dropped - 2000 <= len(reports) + 1  # a line that was cut is in the file, too
    assert sum("the end" in line for line in lines) == 1


def test_a_line_that_is_written_in_pieces_is_one_line(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        stream = StandardError(file.fileno(), str)
        for size, piece in enumerate(("a", "b", "\n"), start=1):
            stream.write(piece)
            while os.fstat(file.fileno()).st_size < size:
                time.sleep(0.001)
        stream.finish()

    assert (tmp_path / "log").read_text() == "ab\n"


def test_a_process_ends_even_if_its_log_is_not_read():
    reader, writer = os.pipe()
    command = [sys.executable, "-c", LOG + "    for _ in range(9): log.info(100_000 * 'x')\n", "text"]
    with subprocess.Popen(command, stderr=writer) as process:
        os.close(writer)
        assert process.wait(timeout=60) == 0
    os.close(reader)


def test_a_reader_that_leaves_does_not_end_the_process():
    reader, writer = os.pipe()
    os.close(reader)
    code = "    log.info('lost')\n    print('lost', file=sys.stderr)\nprint('goes on')\n"
    command = [sys.executable, "-c", LOG + code, "text"]

    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, timeout=60)

    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"goes on\n")


def test_an_error_that_ends_a_command_is_one_line(tmp_path, capfd):
    assert main(["serve", f"{tmp_path}/no\n2026-01-01 INFO forged\x1b[2J", "--http-port", "0"]) == 2

    shown = capfd.readouterr().err
    assert r"no\n2026-01-01 INFO forged\x1b[2J" in shown
    assert shown.count("\n") == 1
