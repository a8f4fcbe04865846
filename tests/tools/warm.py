"""Processes that start in milliseconds: forks of a process that has imported Hotrow and PyTorch.

Most of a command's time goes to imports. Tests of what a command does use these processes. Tests of its start, of its
end or of its imports start Python. One process forks for all processes of a test run: ``start_server`` names it in the
environment.
"""

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from tests.tools.warm_server import CODE

_NAME = "TESTS_WARM_SERVER"
_started = []  # the process that forks, if this process has started it


def start_server():
    """Start the process that forks, unless this process was started with the name of one."""
    if _NAME not in os.environ:
        name = uuid4().hex
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            command = [sys.executable, "-m", "tests.tools.warm_server", str(listener.fileno())]
            files = {"stdin": subprocess.PIPE, "pass_fds": [listener.fileno()]}
            _started.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], **files))
        os.environ[_NAME] = name


def end_server():
    """End the process that this process has started, if any."""
    while _started:
        with _started.pop() as process:
            process.stdin.close()


class Warm:
    """``python ARGUMENTS``: a program's file, ``-m`` and its module, or ``-c`` and its text.

    It has the methods of ``subprocess.Popen`` with pipes of text. ``stderr`` may be a file, PIPE or STDOUT as there.
    """

    def __init__(self, *arguments, cwd=None, env=None, stderr=None, start_new_session=False):
        start_server()
        its_input, self.stdin = _pipe()
        self.stdout, output = _pipe()
        self.stderr, errors = _pipe() if stderr == subprocess.PIPE else (None, stderr)
        if errors == subprocess.STDOUT:
            errors = output
        request = (
            [str(argument) for argument in arguments],
            str(cwd or os.getcwd()),
            dict(os.environ if env is None else env),
            start_new_session,
        )
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{os.environ[_NAME]}")
            streams = (its_input, output, errors or sys.__stderr__)
            socket.send_fds(connection, [b"0"], [stream.fileno() for stream in streams])
            connection.sendall(pickle.dumps(request))
            connection.shutdown(socket.SHUT_WR)
            [self.pid] = CODE.unpack(connection.recv(CODE.size))
            self._answers = connection.detach()
        weakref.finalize(self, os.close, self._answers)
        self._code, self._reading = None, threading.Lock()
        for stream in (its_input, output, *([errors] if self.stderr else [])):
            stream.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self._close()
        self.wait()

    def _close(self):
        with suppress(BrokenPipeError):
            self.stdin.close()
        for stream in filter(None, (self.stdout, self.stderr)):
            stream.close()

    def _has_ended(self, timeout_s):
        answers = select.poll()
        answers.register(self._answers, select.POLLIN)
        if answers.poll(None if timeout_s is None else 1000 * timeout_s):
            with self._reading:
                if self._code is None:
                    [self._code] = CODE.unpack(os.read(self._answers, CODE.size))
        return self._code is not None

    @property
    def returncode(self):
        self._has_ended(0)
        return self._code

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._code

    def communicate(self, text=None, timeout=None):
        with suppress(BrokenPipeError):
            if text:
                self.stdin.write(text)
            self.stdin.close()
        until = None if timeout is None else time.monotonic() + timeout
        texts = {}
        readers = [
            threading.Thread(target=lambda stream=stream: texts.update({stream: stream.read()}), daemon=True)
            for stream in (self.stdout, self.stderr)
            if stream and not stream.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if until is None else max(0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self.wait(None if until is None else max(0, until - time.monotonic()))
        self._close()
        return texts.get(self.stdout), texts.get(self.stderr)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def run(*arguments, text=None, timeout=None, stderr=subprocess.PIPE, **options):
    """Run ``python ARGUMENTS`` to its end, as ``subprocess.run`` does with captured text."""
    with Warm(*arguments, stderr=stderr, **options) as process:
        try:
            printed, errors = process.communicate(text, timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, printed, errors)


def _pipe():
    reading, writing = os.pipe()
    return os.fdopen(reading, encoding="utf-8"), os.fdopen(writing, "w", encoding="utf-8")
