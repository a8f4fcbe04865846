"""The server's ends of GPU caches: command line, HTTP, the engine int8."""

import re

import numpy as np
import pytest

from serving.cli.main import main
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.opening import Runtime
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.serving.lookup.test_gpu_serving import ps_json
from tests.tools.tiny_model import TinyModel


def test_a_gpu_that_is_not_there_is_named_and_nothing_is_served(tmp_path, capfd):
    TinyModel().write(tmp_path)

    assert main(["serve", str(tmp_path), "--device", "cuda:99", "--http-port", "0"]) == 2

    assert "hotrow serve: " in (told := capfd.readouterr().err)
    assert "cuda:99" in told


def test_what_names_no_device_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path), "--device", "gpu"])

    assert "--device: expected cpu, auto, cuda, cuda:<index>, runner or runner:<number>" in capsys.readouterr().err


@pytest.fixture
def model(write_model):
    return write_model(write_model.table(slots=3, dim=4, combiner=1), write_model.table(slots=2, dim=6))


def test_check_prints_the_memory_of_caches_apart_from_the_total(model, tmp_path, capsys):
    def checked(**said):
        code = main(["check", str(ps_json(model, tmp_path, **said))])
        told = capsys.readouterr()
        return code, told.out + told.err

    without, cached, empty = checked(gpucache=False), checked(), checked(gpucacheper=0.0)

    assert (without[0], cached[0], empty[0]) == (0, 0, 1)
    assert "caches" not in without[1]
    assert re.search(r"caches, if GPUs are used +0\.00 MiB  on each GPU, not in the total", cached[1])
    assert [line for line in cached[1].splitlines() if "caches" not in line] == without[1].splitlines()
    assert (
        "models[0].gpucacheper: expected more than 0 and at most 1, got 0: for no cache, set gpucache to false"
        in empty[1]
    )


def test_check_tells_what_of_caches_and_worker_buffers_is_page_locked(model, tmp_path, capsys):
    large = {"max_batch_size": 2_000_000_000, "num_of_worker_buffer_in_pool": 1}

    assert main(["check", str(ps_json(model, tmp_path, embedding_cache_type="uvm", **large))]) == 0

    caches, buffers = [line for line in capsys.readouterr().out.splitlines() if "caches" in line]
    assert re.search(r"caches, if GPUs are used +0\.00 MiB  on each GPU and 0\.00 MiB page-locked on the host", caches)
    assert float(re.search(r"GPU and ([\d,.]+) MiB page-locked", buffers)[1].replace(",", "")) > 5 * 4 * 2e9 / 2**20


def test_a_batch_beyond_the_memory_is_refused_with_its_size(model, tmp_path, capfd):
    file = ps_json(model, tmp_path, max_batch_size=2_000_000_000)

    assert main(["serve", str(file), "--device", "runner", "--http-port", "0"]) == 2

    told = capfd.readouterr().err
    assert re.search(
        r"for 2 worker buffers of max_batch_size 2,000,000,000, but [\d,]+ are free; set max_batch_size", told
    )


@pytest.mark.parametrize("clock", ["refresh_delay", "refresh_interval"])
def test_check_warns_of_a_clock_that_refreshes_nothing(model, tmp_path, capsys, clock):
    def warnings(**said):
        assert main(["check", str(ps_json(model, tmp_path, **said))]) == 0
        return capsys.readouterr().err

    expected = "refresh_delay and refresh_interval have no effect without a cache_refresh_percentage_per_iteration"
    assert expected in warnings(**{clock: 5.0})
    assert not warnings(**{clock: 5.0}, cache_refresh_percentage_per_iteration=0.5)
    assert not warnings(**{clock: 5.0}, gpucache=False)


def test_check_warns_of_keys_that_a_cache_as_large_as_its_table_never_holds(model, tmp_path, capsys):
    def warnings(**said):
        assert main(["check", str(ps_json(model, tmp_path, embedding_cache_mode="asynchronous", **said))]) == 0
        return capsys.readouterr().err

    assert "gpucacheper 1 does not hold whole tables" in warnings(gpucacheper=1.0)
    assert not warnings(gpucacheper=0.5)
    assert not warnings(gpucacheper=1.0, gpucache=False)


def test_the_metrics_page_shows_the_caches(tmp_path):
    TinyModel().write(tmp_path)

    with ModelRepository(tmp_path, Runtime(device="runner")) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        answer = client.post("/predict/tiny", {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]})
        page = client.get("/metrics").text

    labels = 'device="runner",model="tiny",table="user",version="1"'
    assert answer.status_code == 200
    assert re.search(rf"hotrow_gpu_cache_(hits|misses)_total{{{labels}}} 1\.0", page)


def test_the_engine_int8_is_measured_on_rows_of_the_tiers(model, tmp_path):
    said = {"embedding_cache_mode": "asynchronous", "hit_rate_threshold": 0.0, "init_ec": False}
    dense, bags = model.draw_request(np.random.default_rng(2), 100)  # more than one request may have
    keys, row_ptrs, _ = model.flatten(bags)
    request = {"DES": dense, "CATCOLUMN": np.array(keys), "ROWINDEX": np.array(row_ptrs)}
    np.savez(tmp_path / "calibration.npz", **request)
    options = {"engine": "int8", "calibration": tmp_path / "calibration.npz", "tolerance": 0.5, "device": "runner"}

    with ModelRepository(ps_json(model, tmp_path, **said), Runtime(**options)) as repository:
        repository.load()
        assert repository.session("dcn").quantization.samples == 100
