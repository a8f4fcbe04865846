"""A server of several workers: one port, one copy of the tables, and no failed request while workers come and go."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as system_memory
from tritonclient.utils import InferenceServerException

from serving.config import shared_ram_name
from tests.e2e.conftest import ROOT, serving
from tests.e2e.kserve_requests import inputs_of, request_of
from tests.serving.table_names import with_digests
from tests.tools import warm
from tests.tools.tiny_model import TinyModel

DEADLINE_S = 120
# A busy machine must not make these tests fail.
PATIENT = ("--max-queue-wait-ms", "60000")
MODELS = {version: TinyModel(seed=version) for version in (1, 2)}
CACHE_AND_ROCKSDB = {
    "supportlonglong": True,
    "models": [],
    "volatile_db": {"type": "hash_map", "capacity_rows": 100},
    "persistent_db": {"type": "rocks_db", "path": "rows"},
}
RAM_AND_ROCKSDB = CACHE_AND_ROCKSDB | {"volatile_db": {"type": "hash_map"}}


pytestmark = pytest.mark.slow


def until(condition):
    """Ask again until the condition is true; return its value."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def workers_of(served):
    """The processes of the workers, in the order in which they were started."""
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text(encoding="utf-8")
    return [int(pid) for pid in children.split()]


def process_of(served, number):
    """The process of one worker, as it was started last."""
    ready = rf"worker {number} is ready: process (\d+)"
    return int(until(lambda: re.findall(ready, served.log.read_text()))[-1])  # a line of the log may come late


def starts_of(served, number):
    return served.log.read_text().count(f"worker {number} is ready")


def kill_and_wait(served, number):
    """Kill a worker, and wait until it is ready again."""
    starts = starts_of(served, number)
    os.kill(process_of(served, number), signal.SIGKILL)
    until(lambda: starts_of(served, number) > starts)


def is_gone(pid):
    """Whether a process has ended, whether or not its parent has read its exit code."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    return True


def samples_of(count=3, seed=3):
    dense, bags = MODELS[1].sample_requests(count, seed=seed)
    samples = [{"dense": row.tolist(), "keys": slots} for row, slots in zip(dense, bags, strict=True)]
    return json.dumps({"samples": samples}).encode(), {
        version: model.probabilities(dense, bags) for version, model in MODELS.items()
    }


BODY, EXPECTED = samples_of()


def predict(served):
    """Ask over a new connection; return the version that answered, whose answer is checked."""
    with urllib.request.urlopen(served.url + "/predict/tiny", BODY, timeout=DEADLINE_S) as response:
        answer = json.loads(response.read())
    version = int(answer["model_version"])
    np.testing.assert_allclose(answer["predictions"], EXPECTED[version], atol=2e-6)
    return version


def grpc_address(served):
    return re.search(r"listening for gRPC on (\S+)", served.printed)[1]


def asking_anew(served):
    """Ask over a new connection each time."""
    yield lambda: predict(served)


@contextlib.contextmanager
def asking_over(module, address):
    """Ask over the connection of one of NVIDIA's clients."""
    arrays, _ = request_of(MODELS[1], 3)
    expected = {version: request_of(model, 3)[1] for version, model in MODELS.items()}
    with module.InferenceServerClient(address) as client:

        def ask():
            result = client.infer("tiny", inputs_of(arrays, module))
            response = result.get_response()
            version = int(response["model_version"] if isinstance(response, dict) else response.model_version)
            np.testing.assert_allclose(result.as_numpy("OUTPUT0"), expected[version], atol=2e-6)
            return version

        yield ask


ASKING = {
    "new connections": contextlib.contextmanager(asking_anew),
    "http": lambda served: asking_over(tritonclient.http, f"{served.host}:{served.port}"),
    "grpc": lambda served: asking_over(tritonclient.grpc, grpc_address(served)),
}


class Load:
    """Requests from several threads, from the block's begin to its end.

    Attributes:
        versions: the versions that answered.
        failures: when each failed request was sent, and its error.
    """

    def __init__(self, served, how, threads=3):
        self.versions, self.failures = [], []
        self._asking, self._served = ASKING[how], served
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def _run(self):
        with self._asking(self._served) as ask:
            while not self._stop.is_set():
                sent = time.monotonic()
                try:
                    self.versions.append(ask())
                except (InferenceServerException, OSError, AssertionError) as err:
                    self.failures.append((sent, err))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def goes_on(self, requests=30):
        """Wait until so many more requests were answered."""
        answered = len(self.versions)
        until(lambda: len(self.versions) >= answered + requests)

    def __exit__(self, *_exception):
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)


@pytest.fixture
def folder(tmp_path):
    MODELS[1].write(tmp_path / "models", "tiny", 1)
    return tmp_path / "models"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two workers for all tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("two")
    MODELS[1].write(folder / "models", "tiny", 1)
    with serving(folder / "models", folder / "stderr", "--workers", "2", "--grpc-port", "0") as served:
        yield served


@pytest.fixture(scope="module")
def mended(tmp_path_factory):
    """Two workers that tests kill. Each test waits until both serve version 1 again."""
    folder = tmp_path_factory.mktemp("mended")
    MODELS[1].write(folder / "models", "tiny", 1)
    with serving(folder / "models", folder / "stderr", "--workers", "2", "--grpc-port", "0", *PATIENT) as served:
        served.folder = folder / "models"
        yield served


def samples_by_worker(served, name):
    """The values of a metric by worker and version."""
    page = served.ask("/metrics")[2].decode()
    found = {}
    for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        key = int(of["worker"]), of.get("version", "")
        found[key] = found.get(key, 0) + float(value)
    return found


def versions_by_worker(served):
    """The versions that each worker has loaded."""
    return sorted(samples_by_worker(served, "hotrow_lookup_keys_total"))


@pytest.mark.parametrize("how", ASKING)
def test_every_worker_gives_the_answer_of_the_model(two, how):
    def all_have_answered():
        with ASKING[how](two) as ask:
            assert ask() == 1
        counts = samples_by_worker(two, "hotrow_samples_total")
        return all(counts.get((worker, ""), 0) > before.get((worker, ""), 0) for worker in (0, 1))

    before = samples_by_worker(two, "hotrow_samples_total")

    until(all_have_answered)


def test_any_worker_shows_the_metrics_of_all(two):
    pages = [two.ask("/metrics")[2].decode() for _ in range(10)]

    for page in pages:
        for metric in ("hotrow_requests_in_flight", "process_resident_memory_bytes"):
            assert re.findall(rf'^{metric}{{worker="(\d)"}}', page, re.MULTILINE) == ["0", "1"]
        assert page.count("# TYPE hotrow_requests_in_flight gauge") == 1
        assert page.count("# TYPE hotrow_lookup_keys_total counter") == 1
        assert 'hotrow_tier_rows{model="tiny",table="user",tier="shared_memory",version="1",worker="1"} 1000.0' in page


def test_any_worker_shows_the_status_of_all(two):
    def shown():
        status = json.loads(two.ask("/status")[2])
        [model] = status["models"]
        [version] = model["versions"]
        keys = sum(table["keys"] for table in version["tables"])
        return model["samples"], keys, sum(model["latency"]["counts"]), status["memory_bytes"]

    counted = [
        sum(samples_by_worker(two, metric).values()) for metric in ("hotrow_samples_total", "hotrow_lookup_keys_total")
    ]
    pages = [shown() for _ in range(10)]

    assert all([samples, keys] == counted for samples, keys, _, _ in pages)
    assert len({times for _, _, times, _ in pages}) == 1
    assert min(memory for *_, memory in pages) > 2 * 50e6


def test_any_worker_shows_the_statistics_of_all(two):
    requests = sum(samples_by_worker(two, "hotrow_requests_total").values())
    samples = sum(samples_by_worker(two, "hotrow_samples_total").values())

    for path in ("/v2/models/stats", "/v2/models/tiny/stats", "/v2/models/tiny/versions/1/stats") * 4:
        [stats] = json.loads(two.ask(path)[2])["model_stats"]
        assert (stats["name"], stats["version"], stats["inference_count"]) == ("tiny", "1", samples)
        assert stats["inference_stats"]["success"]["count"] == stats["execution_count"] == requests
        assert sum(batch["compute_infer"]["count"] for batch in stats["batch_stats"]) == requests
        assert len({batch["batch_size"] for batch in stats["batch_stats"]}) == len(stats["batch_stats"])


@pytest.mark.parametrize("module", [pytest.param(tritonclient.http, marks=pytest.mark.long), tritonclient.grpc])
def test_log_settings_and_shared_memory_are_the_same_in_all_workers(mended, module):
    server = mended
    address = grpc_address(server) if module is tritonclient.grpc else f"{server.host}:{server.port}"

    def of_new_connections(path):
        return [json.loads(server.ask(path)[2]) for _ in range(10)]

    def are_registered(names):
        pages = of_new_connections("/v2/systemsharedmemory/status")
        return all([region["name"] for region in page] == names for page in pages)

    region = system_memory.create_shared_memory_region("one", f"/hotrow{os.getpid()}", 64)
    with contextlib.closing(module.InferenceServerClient(address)) as client:
        client.register_system_shared_memory("one", f"/hotrow{os.getpid()}", 64)
        client.update_log_settings({"log_verbose_level": 1})

        assert are_registered(["one"])
        assert all(page["log_verbose_level"] == 1 for page in of_new_connections("/v2/logging"))

        kill_and_wait(server, 1)
        assert are_registered(["one"])
        assert all(page["log_verbose_level"] == 1 for page in of_new_connections("/v2/logging"))
    system_memory.destroy_shared_memory_region(region)
    with contextlib.closing(module.InferenceServerClient(address)) as client:
        client.unregister_system_shared_memory("one")
        client.update_log_settings({"log_verbose_level": 0})
        assert are_registered([])


def test_the_log_names_the_worker(two):
    assert "INFO worker 0 hotrow.repository: model tiny: version 1 serves" in two.log.read_text(encoding="utf-8")
    assert "INFO worker 1 hotrow.repository: model tiny: version 1 serves" in two.log.read_text(encoding="utf-8")
    assert "each has its own GPU caches" in two.log.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_json_log_has_the_worker_in_a_field(start, folder):
    served = start(folder, "--workers", "2", "--log-format", "json")

    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    assert {line.get("worker") for line in lines} == {None, 0, 1}


def memory_of(pid, field):
    line = re.search(
        rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(line[1]) << 10


@pytest.mark.parametrize(
    "tiers", [None, pytest.param(RAM_AND_ROCKSDB, marks=pytest.mark.long)], ids=["RAM alone", "RAM and RocksDB"]
)
def test_tables_are_in_memory_once(start_python, tmp_path, tiers):
    big = TinyModel(tables={"only": 1}, dense_dim=0, dim=32, rows=300_000)
    table_bytes = 300_000 * 32 * 4
    big.write(tmp_path / "big", "big")
    if tiers:
        (tmp_path / "big" / "ps.json").write_text(json.dumps(tiers))

    served = start_python(tmp_path / "big", "--workers", "2", "--log-level", "warning")

    workers = workers_of(served)
    assert len(workers) == 2
    assert table_bytes < sum(memory_of(pid, "Pss_Shmem") for pid in workers) < 2 * table_bytes
    assert memory_of(served.process.pid, "Pss") < 2 * table_bytes


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_worker_fails_only_its_own_requests_and_is_started_again(mended, number):
    served, starts = mended, starts_of(mended, number)
    killed = process_of(served, number)

    with Load(served, "new connections", threads=4) as load:
        os.kill(killed, signal.SIGKILL)
        until(lambda: is_gone(killed))
        died = time.monotonic()
        load.goes_on()
        until(lambda: starts_of(served, number) > starts)
        load.goes_on()

    assert [failure for failure in load.failures if failure[0] > died] == []
    assert len(load.failures) <= 4
    assert f"worker {number} was ended by SIGKILL; it starts again in 0.5 s" in served.log.read_text()
    assert versions_by_worker(served) == [(0, "1"), (1, "1")]


@pytest.mark.slow
def test_a_stopped_worker_is_replaced_all_grpc_clients_are_answered_and_sigterm_ends_a_stopped_worker(start, folder):
    served = start(folder, "--workers", "2", "--grpc-port", "0", *PATIENT)
    os.kill(process_of(served, 1), signal.SIGSTOP)

    until(lambda: starts_of(served, 1) == 2)

    assert "worker 1 does not answer" in served.log.read_text()
    for _ in range(10):
        with tritonclient.grpc.InferenceServerClient(grpc_address(served)) as client:
            assert client.is_server_live(client_timeout=5)
    os.kill(process_of(served, 1), signal.SIGSTOP)

    assert served.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("how", ASKING)
def test_no_request_fails_while_sighup_restarts_the_workers(start, folder, how):
    served = start(folder, "--workers", "2", "--grpc-port", "0", "--shutdown-delay-s", "600", *PATIENT)
    before = workers_of(served)

    with Load(served, how) as load:
        served.process.send_signal(signal.SIGHUP)
        until(lambda: "all workers were restarted" in served.log.read_text())
        load.goes_on()

    assert load.failures == []
    assert not set(before) & set(workers_of(served))


@pytest.mark.long
def test_sighup_serves_the_new_version_of_a_model(start, folder):
    served = start(folder, "--workers", "2", *PATIENT)
    MODELS[2].write(folder, "tiny", 2)

    with Load(served, "http") as load:
        served.process.send_signal(signal.SIGHUP)
        until(lambda: "all workers were restarted" in served.log.read_text())

    assert load.failures == []
    assert versions_by_worker(served) == [(0, "2"), (1, "2")]


@pytest.mark.long
def test_a_broken_new_version_ends_a_restart_and_the_server_goes_on(start, folder):
    served = start(folder, "--workers", "2", *PATIENT)
    (MODELS[2].write(folder, "tiny", 2) / "dense.model").write_bytes(b"1234")

    with Load(served, "http") as load:
        served.process.send_signal(signal.SIGHUP)
        until(lambda: "the restart ends here: worker 0 did not start" in served.log.read_text())
        until(lambda: starts_of(served, 0) == 2)

    assert load.failures == []
    assert "hotrow serve: model 'tiny': " in served.log.read_text()
    assert versions_by_worker(served) == [(0, "1"), (1, "1")]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_worker_that_is_started_again_serves_what_the_others_serve(mended, number):
    newer = MODELS[2].write(mended.folder, "tiny", 2)

    kill_and_wait(mended, number)

    assert versions_by_worker(mended) == [(0, "1"), (1, "1")]
    shutil.rmtree(newer)


@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.long)])
def test_all_workers_swap_if_one_starts_after_the_files_of_its_version_were_replaced(start, folder, tmp_path, number):
    served = start(folder, "--workers", "2")
    assert predict(served) == 1
    made = MODELS[2].write(tmp_path / "made", "tiny", 1)
    shutil.copytree(made, folder / "tiny" / "1", dirs_exist_ok=True)

    os.kill(process_of(served, number), signal.SIGKILL)
    until(lambda: starts_of(served, number) == 2)

    for _ in range(10):  # connections to either worker
        with urllib.request.urlopen(served.url + "/predict/tiny", BODY, timeout=DEADLINE_S) as response:
            np.testing.assert_allclose(json.loads(response.read())["predictions"], EXPECTED[2], atol=2e-6)


@pytest.mark.parametrize("how", ["http", pytest.param("grpc", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "tiers",
    [None, *(pytest.param(tiers, marks=pytest.mark.long) for tiers in (CACHE_AND_ROCKSDB, RAM_AND_ROCKSDB))],
    ids=["RAM", "RocksDB", "both"],
)
def test_all_workers_have_swapped_when_a_load_returns_and_no_request_fails(start, folder, how, tiers):
    if tiers:
        (folder / "ps.json").write_text(json.dumps(tiers))
    options = ("--model-control-mode", "explicit", "--load-model", "*")
    served = start(folder, "--workers", "2", "--grpc-port", "0", *options, *PATIENT)
    MODELS[2].write(folder, "tiny", 2)

    with Load(served, how) as load:
        for number in range(3):
            version = 2 - number % 2
            policy = {"version_policy": {"specific": {"versions": [version]}}}
            body = {"parameters": {"config": json.dumps(policy)}}
            assert served.ask("/v2/repository/models/tiny/load", body, method="POST")[0] == 200
            assert versions_by_worker(served) == [(0, str(version)), (1, str(version))]
            assert {predict(served) for _ in range(10)} == {version}

    assert load.failures == []
    assert set(load.versions) == {1, 2}


@pytest.mark.parametrize("module", [pytest.param(tritonclient.http, marks=pytest.mark.long), tritonclient.grpc])
def test_any_worker_loads_and_unloads_for_all(start, folder, module):
    served = start(folder, "--workers", "3", "--grpc-port", "0", "--model-control-mode", "explicit")
    address = grpc_address(served) if module is tritonclient.grpc else f"{served.host}:{served.port}"

    for _ in range(5):  # each client has a connection of its own, to a worker that the system chooses
        with module.InferenceServerClient(address) as client:
            client.load_model("tiny")
            assert versions_by_worker(served) == [(0, "1"), (1, "1"), (2, "1")]
            client.unload_model("tiny")
            assert versions_by_worker(served) == []
            with pytest.raises(InferenceServerException, match="no model 'tinny' is in the repository; did you mean"):
                client.load_model("tinny")


@pytest.mark.long
def test_a_worker_that_starts_during_swaps_serves_the_last_version(start, folder):
    served = start(folder, "--workers", "2", "--model-control-mode", "explicit", "--load-model", "*")
    MODELS[2].write(folder, "tiny", 2)

    os.kill(process_of(served, 1), signal.SIGKILL)
    version = 1
    while starts_of(served, 1) < 2:
        version = 3 - version
        policy = {"version_policy": {"specific": {"versions": [version]}}}
        body = {"parameters": {"config": json.dumps(policy)}}
        assert served.ask("/v2/repository/models/tiny/load", body, method="POST")[0] == 200

    assert versions_by_worker(served) == [(0, str(version)), (1, str(version))]
    assert {predict(served) for _ in range(10)} == {version}


@pytest.mark.long
@pytest.mark.parametrize("tiers", [None, CACHE_AND_ROCKSDB], ids=["RAM", "RocksDB"])
def test_all_workers_follow_a_polled_repository(start, folder, tiers):
    if tiers:
        (folder / "ps.json").write_text(json.dumps(tiers))
    served = start(folder, "--workers", "2", "--model-control-mode", "poll", "--repository-poll-secs", "1", *PATIENT)

    with Load(served, "http") as load:
        MODELS[2].write(folder, "tiny", 2)
        until(lambda: versions_by_worker(served) == [(0, "2"), (1, "2")])

    assert load.failures == []
    assert set(load.versions) == {1, 2}


@pytest.mark.long
def test_the_first_worker_finds_what_has_changed_while_it_was_not_running(start, folder):
    served = start(folder, "--workers", "2", "--model-control-mode", "poll", "--repository-poll-secs", "1")

    os.kill(process_of(served, 0), signal.SIGKILL)
    MODELS[2].write(folder, "tiny", 2)
    until(lambda: versions_by_worker(served) == [(0, "2"), (1, "2")])
    os.kill(process_of(served, 0), signal.SIGKILL)
    (MODELS[1].write(folder, "tiny", 3) / "dense.model").write_bytes(b"1234")

    until(lambda: starts_of(served, 0) == 3 and "3/dense.model: expected" in served.log.read_text())
    assert versions_by_worker(served) == [(0, "2"), (1, "2")]


def test_a_worker_that_is_killed_at_the_start_ends_it(folder):
    command = [sys.executable, "-m", "serving.cli.main", "serve", str(folder), "--http-port", "0", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        os.kill(int(until(lambda: children.read_text(encoding="utf-8").split())[0]), signal.SIGKILL)
        printed, errors = process.communicate(timeout=DEADLINE_S)

    assert (process.returncode, printed) == (2, "")
    assert "worker 0 was ended by SIGKILL before it was ready" in errors


def test_sigterm_answers_what_was_accepted_by_every_worker_and_exits_0(start, folder):
    served = start(folder, "--workers", "2", "--shutdown-delay-s", "600")
    workers = workers_of(served)
    head = b"POST /predict/tiny HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(BODY)
    held = [served.connect() for _ in range(12)]
    for connection in held:
        connection.sendall(head)
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"

    served.process.send_signal(signal.SIGTERM)
    until(lambda: served.log.read_text().count("not ready from now on") == 2)
    assert {served.ask("/v2/health/ready")[0] for _ in range(8)} == {503}
    assert served.ask("/predict/tiny", BODY)[0] == 200
    served.process.send_signal(signal.SIGTERM)  # ends the delay
    until(lambda: served.log.read_text().count("stopping: ") == 2)
    answers = []
    for connection in held:
        with connection:
            connection.sendall(BODY)
            answers.append(b"".join(iter(lambda: connection.recv(65536), b"")))  # noqa: B023

    assert served.process.wait(DEADLINE_S) == 0
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert all(map(is_gone, workers))
    assert "Traceback" not in served.log.read_text()


@pytest.mark.long
def test_ctrl_c_exits_130_quietly(start, folder):
    served = start(folder, "--workers", "2")

    assert served.stop(signal.SIGINT) == 130
    assert "Traceback" not in served.log.read_text()
    assert served.log.read_text().count("interrupted") == 1


@pytest.mark.long
def test_a_second_ctrl_c_cuts_connections_at_once(start, folder):
    served = start(folder, "--workers", "2")
    head = b"POST /predict/tiny HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(head)
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"

        served.process.send_signal(signal.SIGINT)
        until(lambda: served.log.read_text().count("stopping: ") == 2)

        assert served.stop(signal.SIGINT) == 130


def folders_of(worker):
    """The folders that the workers share: of their sockets and of their tables."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    place = json.loads(
        next(variable for variable in variables if variable.startswith(b"HOTROW_WORKER=")).partition(b"=")[2]
    )
    return Path(place["folder"]), Path("/dev/shm") / shared_ram_name(place["tables"])


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_when_the_server_has_ended(start_python, folder, how):
    served = start_python(folder, "--workers", "2")
    workers = workers_of(served)
    folders = folders_of(workers[0])
    assert all(one.is_dir() for one in folders)

    served.stop(how)

    until(lambda: all(map(is_gone, workers)))
    assert not any(one.exists() for one in folders)
    assert ("the supervisor was killed" in served.log.read_text()) is (how is signal.SIGKILL)


@pytest.mark.long
def test_a_server_finds_the_tables_of_a_server_that_was_killed_with_its_workers(start, folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    killed = start(folder, "--workers", "2", "--http-port", port)
    for worker in workers_of(killed):
        os.kill(worker, signal.SIGSTOP)  # so that no worker can remove the tables
    workers = workers_of(killed)
    killed.stop(signal.SIGKILL)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    until(lambda: all(map(is_gone, workers)))

    served = start(folder, "--workers", "2", "--http-port", port)

    loading = with_digests("loading tiny@1.user", folder)
    assert loading in killed.log.read_text()
    assert loading not in served.log.read_text()
    assert predict(served) == 1


def test_a_broken_model_fails_the_start_with_one_message(hotrow_serve, folder):
    (folder / "tiny" / "1" / "dense.model").write_bytes(b"1234")
    arguments = (folder, "--http-port", "0", "--log-level", "warning")

    one = hotrow_serve(*arguments)
    two = warm.run("-m", "serving.cli.main", "serve", *arguments, "--workers", "2", timeout=DEADLINE_S)

    assert (two.returncode, two.stdout, two.stderr) == (2, "", one.stderr)


@pytest.mark.parametrize("workers", ["0", "65", "two"])
def test_a_wrong_number_of_workers_is_refused(hotrow_serve, folder, workers):
    done = hotrow_serve(folder, "--workers", workers)

    assert done.returncode == 2
    assert f"--workers: expected a whole number from 1 to 64, got '{workers}'" in done.stderr


@pytest.mark.long
def test_the_environment_sets_the_number_of_workers(start, folder, monkeypatch):
    monkeypatch.setenv("HOTROW_WORKERS", "2")

    assert len(workers_of(start(folder))) == 2


def test_workers_cannot_record_into_one_file(hotrow_serve, folder, tmp_path):
    done = hotrow_serve(folder, "--http-port", "0", "--workers", "2", "--record", tmp_path / "trace.jsonl")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hotrow serve: --record: needs --workers 1, because the workers would write the same file\n"


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use_is_an_error_before_a_worker_starts(hotrow_serve, folder, two, option):
    port = two.port if option == "--http-port" else grpc_address(two).rpartition(":")[2]
    ports = {"--http-port": 0} | {option: port}

    done = hotrow_serve(folder, "--workers", "2", *(word for pair in ports.items() for word in pair))

    assert done.returncode == 2
    assert f"127.0.0.1:{port}: cannot listen" in done.stderr
    assert "Address already in use" in done.stderr


@pytest.mark.long
def test_workers_answer_on_one_unix_socket(start, folder, tmp_path):
    served = start(folder, "--workers", "2", "--uds", str(tmp_path / "hotrow.sock"))

    assert served.printed.endswith(f"listening on unix:{tmp_path}/hotrow.sock\n")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "hotrow.sock"))
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
