"""A real server with two workers that follows a log: what a person on call and a client see of it."""

import json
import re
import time

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from serving.cli.main import main
from serving.stream.folder import FolderSink
from serving.stream.message import Kind, UpdateMessage, encode
from tests.e2e.conftest import serving
from tests.e2e.kserve_requests import inputs_of, request_of
from tests.serving.ps_files import write_ps
from tests.tools.tiny_model import TinyModel

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A server that has applied one message and rejected another, and its log."""
    folder = tmp_path_factory.mktemp("updates")
    TinyModel().write(folder / "models", "tiny", 2)
    write_ps(folder / "models", update_source={"type": "folder", "path": str(folder / "log"), "poll_timeout_ms": 20})
    log = FolderSink(folder / "log")
    rows = np.ones((1, 4), np.float32)
    log.send(encode(UpdateMessage(Kind.UPSERT, "tiny", "user", np.array([1]), rows, step=9, time_ms=1_000)), 0)
    log.send(b"other bytes", 0)
    options = ("--workers", "2", "--grpc-port", "0", "--rejected", str(folder / "rejected"))
    with serving(folder / "models", folder / "stderr", *options) as served:
        yield served


def readers(capsys, url, count):
    """What `hotrow updates` says once so many workers have read the log."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        assert main(["updates", url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        if [part["position"] for reader in found for part in reader["partitions"]] == ["2"] * count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"after {LIMIT_S:g} s: {found}")


def test_the_command_shows_every_worker_that_reads_the_log(followed, capsys):
    found = readers(capsys, followed.url, 2)

    shown = [(one["model"], one["version"], one["worker"], one["applied"], one["rejected"]) for one in found]
    assert shown == [("tiny", "2", worker, {"upsert": 1}, {"format": 1}) for worker in (0, 1)]


def test_an_answer_over_grpc_says_how_new_the_rows_are(followed, capsys):
    readers(capsys, followed.url, 2)
    arrays, _ = request_of(TinyModel(), 3)
    with triton.InferenceServerClient(re.search(r"listening for gRPC on (\S+)", followed.printed)[1]) as client:
        silent = client.infer("tiny", inputs_of(arrays, triton)).get_response()
        answer = client.infer("tiny", inputs_of(arrays, triton), parameters={"freshness": True}).get_response()
        with pytest.raises(InferenceServerException, match=r"parameters\.freshness: expected true or false"):
            client.infer("tiny", inputs_of(arrays, triton), parameters={"freshness": 1})

    parameters = {name: value.int64_param for name, value in answer.parameters.items()}
    assert set(silent.parameters) == {"defaulted_keys"}
    asked = {"newest_step": 9, "newest_time_ms": 1_000, "lag_messages": 0, "lag_ms": 0}
    assert parameters == asked | {"defaulted_keys": parameters["defaulted_keys"]}


def test_one_worker_keeps_rejected_messages(followed, capsys):
    readers(capsys, followed.url, 2)

    lines = (followed.log.parent / "rejected").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["format"]


REFUSED = {
    "rejected": (["--rejected", "FILE"], "update_source: rejected_file would have no effect, because no updates"),
    "staleness": (["--max-staleness-s", "5"], "update_source: max_staleness_s would have no effect, because no upd"),
    "both": (["--rejected", "F", "--max-staleness-s", "5"], "rejected_file and max_staleness_s would have no effect"),
    "negative": (["--max-staleness-s", "-1"], "expected a number from 0 to 315,360,000 seconds, got '-1'"),
    "no number": (["--max-staleness-s", "soon"], "expected a number from 0 to 315,360,000 seconds, got 'soon'"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_options_without_effect_and_wrong_values_are_refused(repository, hotrow_serve, options, reason):
    ended = hotrow_serve(repository, "--http-port", "0", *options)

    assert ended.returncode == 2
    assert reason in ended.stderr


def test_a_file_of_rejected_messages_that_cannot_be_written_ends_the_start(tmp_path, hotrow_serve):
    TinyModel().write(tmp_path, "tiny", 2)
    write_ps(tmp_path, update_source={"type": "folder", "path": "log"})

    ended = hotrow_serve(tmp_path, "--http-port", "0", "--rejected", tmp_path)

    assert ended.returncode == 2
    assert f"rejected_file: {tmp_path} cannot be written: Is a directory" in ended.stderr


class ChangedModel(TinyModel):
    """The model whose row of user 1 the log has changed to ones."""

    def vectors(self, table):
        vectors = super().vectors(table)
        vectors[1] = 1 if table == "user" else vectors[1]
        return vectors


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiers",
    [pytest.param({}, marks=pytest.mark.long), {"persistent_db": {"type": "rocks_db", "path": "rows"}}],
    ids=["RAM", "RocksDB"],
)
def test_no_worker_answers_with_a_new_network_before_its_rows_are_there(start, tmp_path, tiers):
    folder, log = tmp_path / "models", FolderSink(tmp_path / "log")
    TinyModel().write(folder, "tiny", 1, run="a")
    write_ps(folder, update_source={"type": "folder", "path": str(tmp_path / "log"), "poll_timeout_ms": 20}, **tiers)
    served = start(folder, "--workers", "2", "--model-control-mode", "poll", "--repository-poll-secs", "1")
    dense, bags = [[0.5, 0.5, 0.5]], [[[1], [3], [4]]]
    body = {"samples": [{"dense": dense[0], "keys": bags[0]}]}
    answers = []

    def ask():
        code, _, answer = served.ask("/predict/tiny", body)
        assert code == 200
        answers.append((json.loads(answer)["model_version"], json.loads(answer)["predictions"][0][0]))
        return answers[-1][0]

    def ask_until(condition):
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end_s
            ask()

    def state():
        index = json.loads(served.ask("/v2/repository/index", {}, method="POST")[2])
        return {one["version"]: (one["state"], one.get("reason", "")) for one in index}

    TinyModel(network_seed=2).write_dense(folder, positions={"folder": "1"}, run="a")
    waits = "waits until its tables reach position 1 of folder (they are at its beginning)"
    ask_until(lambda: state().get("2") == ("LOADING", waits))
    log.send(encode(UpdateMessage(Kind.UPSERT, "tiny", "user", np.array([1]), np.ones((1, 4), np.float32), run="a")), 0)
    log.flush()
    ask_until(lambda: state() == {"2": ("READY", "")})
    assert {ask() for _ in range(10)} == {"2"}

    old, new = (
        {model(network_seed=seed).probabilities(dense, bags).item() for seed in seeds}
        for model, seeds in ((TinyModel, (None,)), (ChangedModel, (None, 2)))
    )
    assert all(any(abs(answer - one) < 2e-6 for one in old | new) for _, answer in answers)
    assert {version for version, _ in answers} == {"1", "2"}
