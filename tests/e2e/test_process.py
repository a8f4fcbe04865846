"""The life of a server process: starting, being too busy, stopping, being killed."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import termios
import threading
import time

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from serving.cli.main import main
from serving.config import read_model_directory
from serving.planner import read_trace
from tests.e2e.kserve_requests import inputs_of, request_of
from tests.serving.ps_files import write_ps
from tests.serving.table_names import full_name
from tests.tools import warm
from tests.tools.tiny_model import TinyModel

DEADLINE_S = 60


@pytest.fixture
def tiny_repository(tmp_path, model):
    model.write(tmp_path / "repository")
    return tmp_path / "repository"


def samples_of(model, count, seed):
    """A request body for /predict/tiny and its right answer."""
    dense, bags = model.sample_requests(count, seed=seed)
    samples = [{"dense": row.tolist(), "keys": slots} for row, slots in zip(dense, bags, strict=True)]
    return json.dumps({"samples": samples}).encode(), model.probabilities(dense, bags)


def is_right(answer, expected):
    return np.allclose(json.loads(answer)["predictions"], expected, atol=2e-6)


def read_answer(connection):
    """One answer's head and body; both are empty if the connection is closed instead."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        received = connection.recv(65536)
        if not received:
            return b"", answer
        answer += received
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length")).split()[1])
    while len(body) < length:
        body += connection.recv(65536)
    return head, body


class HeldRequest:
    """A request whose headers the server has read; the server waits for the body."""

    def __init__(self, served, body):
        self._connection = served.connect()
        self._body = body
        head = "POST /predict/tiny HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        self._connection.sendall((head % len(body)).encode())
        assert self._connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"

    def finish(self):
        """Send the body; return the answer's head and body."""
        with self._connection:
            self._connection.sendall(self._body)
            return read_answer(self._connection)


def refuses_connections(served):
    try:
        with served.connect():
            return False
    except ConnectionError:  # refused, or reset before the server accepted it
        return True


def until(condition):
    """Ask again until the condition is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline


def test_slow_clients_do_not_block_other_clients(start, tiny_repository, model):
    served = start(tiny_repository, "--max-inflight", "2")
    body, expected = samples_of(model, 2, seed=1)
    held = [HeldRequest(served, body) for _ in range(5)]

    code, _, answer = served.ask("/predict/tiny", body)

    assert code == 200
    assert is_right(answer, expected)
    assert all(is_right(request.finish()[1], expected) for request in held)


def test_of_short_requests_that_arrive_together_the_server_refuses_those_that_it_would_answer_late(
    start, tiny_repository, model
):
    served = start(tiny_repository, "--max-queue-wait-ms", "2")
    body, expected = samples_of(model, 1, seed=3)
    request = b"POST /predict/tiny HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def answer_at_once(connections):
        for _ in range(50):  # the server learns that these requests are short, and how long they take
            connections[0].sendall(request)
            assert read_answer(connections[0])[0].startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 429 "))
        served.process.send_signal(signal.SIGSTOP)
        for connection in connections:
            connection.sendall(request)
        served.process.send_signal(signal.SIGCONT)
        return [read_answer(connection) for connection in connections]

    for _ in range(8):  # on a busy machine these requests may not look short, and are refused for another reason
        with contextlib.ExitStack() as stack:
            answers = answer_at_once([stack.enter_context(served.connect()) for _ in range(200)])
        accepted = [answer for head, answer in answers if head.startswith(b"HTTP/1.1 200 ")]
        refused = [answer for head, answer in answers if head.startswith(b"HTTP/1.1 429 ")]
        assert len(accepted) + len(refused) == 200
        assert accepted
        assert all(is_right(answer, expected) for answer in accepted)
        if any(b"requests have arrived, and the last would wait" in answer for answer in refused):
            return
    pytest.fail("no request was refused because of those that had arrived before it")


def test_sigterm_lets_accepted_requests_finish_refuses_new_ones_and_exits_0(start, tiny_repository, model):
    served = start(tiny_repository)
    requests = [samples_of(model, 1 + seed, seed) for seed in range(5)]
    held = [HeldRequest(served, body) for body, _ in requests]

    served.process.send_signal(signal.SIGTERM)
    until(lambda: refuses_connections(served))
    answers = [request.finish() for request in held]

    assert served.process.wait(DEADLINE_S) == 0
    assert all(head.startswith(b"HTTP/1.1 200 ") for head, _ in answers)
    assert all(is_right(body, expected) for (_, body), (_, expected) in zip(answers, requests, strict=True))
    assert "Traceback" not in served.log.read_text()


def test_sigterm_under_load_answers_every_request_that_reached_the_server(start_python, tiny_repository, model):
    served = start_python(tiny_repository)
    body, expected = samples_of(model, 3, seed=2)
    head = b"POST /predict/tiny HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    answered, unanswered = [], []
    running = threading.Barrier(9)

    def send_until_told_to_stop():
        with served.connect() as connection:
            for number in range(1_000_000):
                connection.sendall(head + body)
                answer_head, answer = read_answer(connection)
                (answered if answer_head.startswith(b"HTTP/1.1 200 ") else unanswered).append(answer)
                if number == 20:
                    running.wait(DEADLINE_S)
                if not answer_head or b"connection: close" in answer_head:
                    return

    clients = [threading.Thread(target=send_until_told_to_stop) for _ in range(8)]
    for client in clients:
        client.start()
    running.wait(DEADLINE_S)
    code = served.stop(signal.SIGTERM)
    for client in clients:
        client.join(DEADLINE_S)

    assert code == 0
    assert not unanswered
    assert len(answered) > 8 * 20
    assert all(is_right(answer, expected) for answer in answered)


def test_after_sigterm_a_server_is_unready_and_answers_until_its_delay_is_over(start, tiny_repository, model):
    served = start(tiny_repository, "--shutdown-delay-s", "600", "--grpc-port", "0")
    body, expected = samples_of(model, 2, seed=1)
    grpc_address = re.search(r"listening for gRPC on (\S+)", served.printed)[1]
    client = tritonclient.grpc.InferenceServerClient(grpc_address)

    def readiness():
        paths = ["/v2/health/ready", "/v2/models/tiny/ready"]
        return [*(served.ask(path)[0] for path in paths), client.is_server_ready(), client.is_model_ready("tiny")]

    assert readiness() == [200, 200, True, True]
    served.process.send_signal(signal.SIGTERM)
    until(lambda: served.ask("/v2/health/ready")[0] == 503)
    code, headers, answer = served.ask("/predict/tiny", body)

    assert readiness() == [503, 503, False, False]
    assert (code, headers["connection"]) == (200, "close")  # clients come again, perhaps to another server
    assert is_right(answer, expected)
    assert served.ask("/v2/health/live")[0] == 200
    assert client.is_server_live()
    client.close()
    assert served.stop(signal.SIGTERM) == 0  # a second signal ends the delay
    assert "not ready from now on, and stopping in 600" in served.log.read_text()


def test_a_client_may_take_as_long_as_the_drain_timeout(start, tiny_repository, model):
    served = start(tiny_repository, "--drain-timeout-s", "0")
    held = HeldRequest(served, samples_of(model, 1, seed=1)[0])

    assert served.stop() == 0
    with contextlib.suppress(ConnectionError):
        assert not held.finish()[0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_models_load_ends_the_server_quietly(tiny_repository, number, code):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = {"type": "redis_cluster", "address": f"127.0.0.1:{silent.getsockname()[1]}"}
        write_ps(tiny_repository, volatile_db=tier)
        command = ["-m", "serving.cli.entry", "serve", tiny_repository, "--http-port", "0"]
        with warm.Warm(*command, stderr=subprocess.PIPE) as process:
            silent.settimeout(DEADLINE_S)
            with silent.accept()[0]:  # it asks Redis, and waits
                process.send_signal(number)
                printed, log = process.communicate(timeout=DEADLINE_S)

    assert (process.returncode, printed) == (code, "")
    assert "Traceback" not in log


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_is_live_and_not_ready_while_its_models_load(tiny_repository, tmp_path, capsys, workers):
    path = tmp_path / "hotrow.sock"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = {"type": "redis_cluster", "address": f"127.0.0.1:{silent.getsockname()[1]}"}
        write_ps(tiny_repository, volatile_db=tier)
        command = ["-m", "serving.cli.main", "serve", tiny_repository, "--uds", path, "--workers", workers]
        with (tmp_path / "log").open("wb") as log, warm.Warm(*command, stderr=log) as process:
            silent.settimeout(DEADLINE_S)
            with silent.accept()[0]:  # it asks Redis, and waits
                found = [main(["ready", "--uds", str(path), *options]) for options in ([], ["--live"])]
                process.terminate()
                assert process.wait(DEADLINE_S) == 0

    assert found == [1, 0]
    assert capsys.readouterr().err == f"hotrow ready: {path}: not ready\n"


def test_ctrl_c_exits_130_quietly(start, tiny_repository):
    served = start(tiny_repository)

    assert served.stop(signal.SIGINT) == 130
    assert "Traceback" not in served.log.read_text()
    assert "KeyboardInterrupt" not in served.log.read_text()


def test_a_second_ctrl_c_while_a_request_is_under_way_ends_quietly_too(start_python, tiny_repository, model):
    served = start_python(tiny_repository)
    body, _ = samples_of(model, 1, seed=1)
    held = HeldRequest(served, body)

    served.process.send_signal(signal.SIGINT)
    until(lambda: refuses_connections(served))

    assert served.stop(signal.SIGINT) == 130
    with contextlib.suppress(ConnectionError):
        held.finish()
    log = served.log.read_text()
    assert "Traceback" not in log
    assert "CancelledError" not in log


def test_a_kill_under_load_loses_nothing(start, tiny_repository, model):
    tiers = {
        "supportlonglong": True,
        "models": [],
        "volatile_db": {"type": "hash_map", "capacity_rows": 100},
        "persistent_db": {"type": "rocks_db", "path": "rows"},
    }
    (tiny_repository / "ps.json").write_text(json.dumps(tiers))
    requests = [samples_of(model, 1 + seed % 9, seed) for seed in range(40)]
    first = start(tiny_repository)
    before = [first.ask("/predict/tiny", body)[2] for body, _ in requests]

    killed = threading.Event()

    def keep_asking():
        while not killed.is_set():
            try:
                first.ask("/predict/tiny", requests[0][0])
            except OSError:
                return

    traffic = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in traffic:
        thread.start()
    first.stop(signal.SIGKILL)
    killed.set()
    for thread in traffic:
        thread.join(DEADLINE_S)
    second = start(tiny_repository)
    after = [second.ask("/predict/tiny", body)[2] for body, _ in requests]

    assert after == before
    assert all(is_right(answer, expected) for answer, (_, expected) in zip(after, requests, strict=True))
    hits = [
        line for line in second.ask("/metrics")[2].decode().splitlines() if line.startswith("hotrow_tier_hits_total")
    ]
    assert any('tier="rocksdb"' in line and not line.endswith(" 0.0") for line in hits)


def test_a_ps_json_with_models_can_be_served_and_queried_from_the_shell(start, tiny_repository, model, tmp_path):
    entry = {
        "model": "ctr",
        "sparse_files": ["repository/tiny/1/user", "repository/tiny/1/item"],
        "dense_file": "repository/tiny/1/dense.model",
        "network_file": "repository/tiny/1/graph.json",
    }
    (tmp_path / "ps.json").write_text(json.dumps({"supportlonglong": True, "models": [entry]}))
    body, expected = samples_of(model, 3, seed=4)
    (tmp_path / "samples.json").write_bytes(body)

    url = start(tmp_path / "ps.json").url
    done = warm.run("-m", "serving.cli.main", "predict", "ctr", tmp_path / "samples.json", "--url", url)

    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose([float(line) for line in done.stdout.split()], expected.reshape(-1), atol=2e-6)


def test_a_port_in_use_is_one_clear_line_and_exit_code_2(hotrow_serve, tiny_repository):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = hotrow_serve(tiny_repository, "--http-port", port)

    assert done.returncode == 2
    assert done.stderr == f"hotrow serve: 127.0.0.1:{port}: cannot listen: Address already in use\n"
    assert done.stdout == ""


def break_weights(repository):
    (repository / "tiny" / "1" / "dense.model").write_bytes(b"1234")


def break_tiers(repository):
    (repository / "ps.json").write_text('{"supportlonglong": true, "volatil_db": {}}')


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(break_weights, "tiny/1/dense.model: expected 64 bytes, found 4", id="a broken model"),
        pytest.param(break_tiers, "ps.json: volatil_db: ", id="a misspelt ps.json"),
    ],
)
def test_a_repository_that_cannot_be_served_is_one_clear_line_and_exit_code_2(
    hotrow_serve, tiny_repository, spoil, expected
):
    spoil(tiny_repository)

    done = hotrow_serve(tiny_repository, "--http-port", "0")

    assert done.returncode == 2
    assert expected in done.stderr
    assert ("hotrow check" in done.stderr) == ("model 'tiny'" in done.stderr) == (spoil is break_weights)
    assert done.stderr.count("\n") == 1
    assert "listening" not in done.stdout


def test_the_error_names_a_broken_model_and_the_command_that_lists_all_faults(hotrow_serve, tiny_repository, model):
    model.write(tiny_repository, "other")
    (tiny_repository / "tiny" / "1" / "user" / "key").write_bytes(b"123")

    done = hotrow_serve(tiny_repository, "--http-port", "0")

    assert done.returncode == 2
    assert done.stderr.startswith(f"hotrow serve: model 'tiny': {tiny_repository}/tiny/1/user/key: ")
    assert f"; `hotrow check {tiny_repository}` lists the faults of every model" in done.stderr


def test_two_servers_share_only_the_files(start, tiny_repository, tmp_path):
    other = TinyModel(seed=5)
    other.write(tmp_path / "other")
    body, expected = samples_of(other, 2, seed=3)

    first, second = start(tiny_repository), start(tmp_path / "other")

    assert first.port != second.port
    assert is_right(second.ask("/predict/tiny", body)[2], expected)
    assert not is_right(first.ask("/predict/tiny", body)[2], expected)


def test_the_environment_sets_options_and_the_command_line_wins(start, tiny_repository, model, monkeypatch):
    body, expected = samples_of(model, 2, seed=1)
    monkeypatch.setenv("HOTROW_GRPC_PORT", "0")
    monkeypatch.setenv("HOTROW_MAX_BODY_BYTES", "10")

    limited = start(tiny_repository)
    assert "listening for gRPC on" in limited.printed
    assert limited.ask("/predict/tiny", body)[0] == 413

    code, _, answer = start(tiny_repository, "--max-body-bytes", "100000").ask("/predict/tiny", body)
    assert code == 200
    assert is_right(answer, expected)


def test_the_log_may_be_json_and_shows_the_stop(start, tiny_repository):
    served = start(tiny_repository, "--log-format", "json")
    served.stop()

    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    stop = [line["message"] for line in lines if line["logger"] == "hotrow.server"]
    assert stop[0].startswith("stopping: new connections are refused")
    assert stop[1].startswith("stopped after")


def test_a_log_level_leaves_out_less_severe_lines(start, tiny_repository):
    served = start(tiny_repository, "--log-level", "error")
    served.stop()

    assert served.log.read_text() == ""


def test_recorded_requests_of_both_protocols_are_a_trace_for_the_planner(start, tiny_repository, model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    served = start(tiny_repository, "--grpc-port", "0", "--record", str(trace), "--sample", "1")
    body, _ = samples_of(model, 5, seed=1)
    arrays, _ = request_of(model, 3)
    grpc_address = re.search(r"listening for gRPC on (\S+)", served.printed)[1]

    for _ in range(10):
        assert served.ask("/predict/tiny", body)[0] == 200
    with tritonclient.http.InferenceServerClient(f"{served.host}:{served.port}") as client:
        client.infer("tiny", inputs_of(arrays, tritonclient.http))
    with tritonclient.grpc.InferenceServerClient(grpc_address) as client:
        client.infer("tiny", inputs_of(arrays, tritonclient.grpc))
    assert served.ask("/predict/tiny", b"{}")[0] == 400
    assert served.stop() == 0

    recorded = [json.loads(line)["lookups"] for line in trace.read_text().splitlines()]
    assert len(recorded) == 12
    sent = json.loads(body)["samples"]
    assert recorded[0] == {
        "user": [key for sample in sent for key in sample["keys"][0]],
        "item": [key for sample in sent for bag in sample["keys"][1:] for key in bag],
    }
    assert recorded[10] == recorded[11]
    assert sum(map(len, recorded[10].values())) == arrays["CATCOLUMN"].size
    assert "12 requests were recorded" in served.log.read_text()
    plan = warm.run("-m", "serving.cli.main", "plan", tiny_repository, trace)
    assert plan.returncode == 0, plan.stderr
    lookups = sum(len(keys["user"]) for keys in recorded)
    assert f"table tiny.user: 1,000 rows of 4 floats\n  {lookups} lookups of" in plan.stdout


def test_a_kill_under_load_leaves_whole_records(start, tiny_repository, model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    served = start(tiny_repository, "--record", str(trace), "--sample", "1")
    body, _ = samples_of(model, 64, seed=1)
    for _ in range(20):
        served.ask("/predict/tiny", body)
    until(lambda: trace.stat().st_size)

    served.stop(signal.SIGKILL)

    models = [read_model_directory(tiny_repository / "tiny")]
    keys = read_trace([trace], models)["tiny.user"]
    one_request = [key for sample in json.loads(body)["samples"] for key in sample["keys"][0]]
    assert keys.size
    assert keys.tolist() == one_request * (keys.size // len(one_request))


def test_a_record_is_not_begun_if_a_model_cannot_be_loaded(hotrow_serve, tiny_repository, tmp_path):
    break_weights(tiny_repository)

    broken = hotrow_serve(tiny_repository, "--http-port", "0", "--record", tmp_path / "new.jsonl")

    assert broken.returncode == 2
    assert "tiny/1/dense.model: expected 64 bytes" in broken.stderr
    assert not (tmp_path / "new.jsonl").exists()


def test_a_terminal_shows_a_bar_per_table_and_a_file_has_log_lines_only(served, repository, model):
    terminal, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = ["-m", "serving.cli.main", "serve", repository, "--http-port", "0"]
    with open(screen, "wb") as errors:
        process = warm.Warm(*command, stderr=errors)
    with process:
        shown = b""
        assert any(line.startswith("listening on ") for line in process.stdout)
        process.terminate()
        with contextlib.suppress(OSError):  # the screen's last process has ended
            while received := os.read(terminal, 65536):
                shown += received
    os.close(terminal)

    table = full_name(model, "item", version=2)
    for text, is_terminal in ((shown.decode(), True), (served.log.read_text(), False)):
        assert f"loaded {table} into memory: read 1,000 rows in " in text
        assert (f"{table} into memory: 100%|" in text) == is_terminal
