"""The process that forks for ``tests.tools.warm``: ``python -m tests.tools.warm_server LISTENER``.

It imports Hotrow and PyTorch at the first request, and ends with its standard input.
"""

import atexit
import logging
import os
import pickle
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module

CODE = struct.Struct("i")  # of the answers: the process, then its exit code


def main():
    listener = socket.socket(fileno=int(sys.argv[1]))
    connections = {}  # by process
    waker, woken = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    with selectors.DefaultSelector() as selector:
        for file in (sys.stdin, listener, woken):
            selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                return
            if woken in ready:
                woken.recv(1000)
                end_connections(connections)
            if listener in ready:
                with suppress(ImportError):  # the environment with NumPy 1 has no PyTorch
                    import_module("tests.tools.warm_imports")
                connection, _ = listener.accept()
                process = os.fork()
                if not process:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for file in (listener, waker, woken, *connections.values()):
                        file.close()
                    become_requested(connection)
                connections[process] = connection
                connection.sendall(CODE.pack(process))


def end_connections(connections):
    """Send the exit codes of processes that have ended."""
    with suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with connections.pop(ended[0]) as connection, suppress(BrokenPipeError):
                connection.sendall(CODE.pack(os.waitstatus_to_exitcode(ended[1])))


def become_requested(connection):
    """Be the process that a ``Warm`` asks for."""
    with connection:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        request = b"".join(iter(partial(connection.recv, 1 << 16), b""))
    arguments, cwd, environment, starts_session = pickle.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if starts_session:
        os.setsid()
    os.chdir(cwd)
    import asyncio  # not before a process is asked for

    asyncio.create_subprocess_exec = forking(asyncio.create_subprocess_exec)
    become(arguments, environment)


def forking(start):
    """Have ``asyncio`` start this Python by a fork too: the workers of a server."""

    def create(program, *arguments, **how):
        if program == sys.executable:
            how["preexec_fn"] = partial(become_worker, arguments, how.pop("env"), how["pass_fds"])
        return start(program, *arguments, **how)

    return create


def become_worker(arguments, environment, kept):
    """Be a process that has its streams, and forget the state of the process that forked it."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # the listing's own
                os.close(int(name))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    logging.getLogger().handlers.clear()
    atexit._clear()
    become(arguments, environment)


def become(arguments, environment):
    """Run as ``python ARGUMENTS`` does, and end the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    sys.orig_argv = [sys.executable, *arguments]
    code = 1
    try:
        run(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
        finally:
            os._exit(code & 0xFF)


def run(option, *words):
    if option == "-c":
        sys.argv = [option, *words[1:]]
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif option == "-m":
        sys.argv = list(words)
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(words[0], None)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *words]
        sys.path.insert(0, os.path.dirname(option))
        runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    main()
