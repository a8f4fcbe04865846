"""Processes that start in milliseconds: forks of a process that has imported Hotrow and PyTorch.

Most of a command's time goes to imports. Tests of what a command does use these processes. Tests of its start, of its
end or of its imports start Python.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import get_context

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.tools.warm_imports"])


class Warm:
    """``python ARGUMENTS``: a program's file, ``-m`` and its module, or ``-c`` and its text.

    It has the methods of ``subprocess.Popen`` with pipes of text. ``stderr`` may be a file, PIPE or STDOUT as there.
    """

    def __init__(self, *arguments, cwd=None, env=None, stderr=None, start_new_session=False):
        its_input, self.stdin = _pipe()
        self.stdout, output = _pipe()
        self.stderr, errors = _pipe() if stderr == subprocess.PIPE else (None, stderr)
        streams = [its_input, output, output if errors == subprocess.STDOUT else errors]
        streams = streams if errors else streams[:2]
        process = os.getpid()
        self._process = _FORKS.Process(
            target=_become,
            args=(
                [str(argument) for argument in arguments],
                [f"/proc/{process}/fd/{stream.fileno()}" for stream in streams],
                str(cwd or os.getcwd()),
                dict(os.environ if env is None else env),
                start_new_session,
            ),
        )
        self._process.start()
        self.pid = self._process.pid
        assert self.stdout.readline() == "started\n"  # and has the pipes
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

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

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


def _become(arguments, streams, cwd, environment, starts_session):
    """Be the process of a command line."""
    for number, stream in enumerate(streams):
        opened = os.open(stream, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    if starts_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    sys.orig_argv = [sys.executable, *arguments]
    print("started", flush=True)
    option, *words = arguments
    try:
        if option == "-c":
            sys.argv = [option, *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        elif option == "-m":
            sys.argv = words
            sys.path.insert(0, cwd)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(option))
            runpy.run_path(option, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
