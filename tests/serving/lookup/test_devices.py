"""The choice of devices for a model."""

import logging

import pytest

from kernels.device import open_device
from kernels.errors import DeviceUnavailableError
from serving.errors import ConfigError
from serving.lookup import devices
from serving.lookup.devices import DeviceChoice, open_devices


class FakeDevice:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that sets the number of GPUs."""

    def there_are(count):
        def open_device(name):
            index = 0 if name == "auto" else int(name.removeprefix("cuda:"))
            if index >= count:
                raise DeviceUnavailableError(f"{name}: there are {count} GPUs")
            return FakeDevice(f"cuda:{index}")

        monkeypatch.setattr(devices, "open_device", open_device)

    return there_are


def names(found):
    return [device.name for device in found]


def test_cpu_is_no_device():
    assert open_devices("cpu", [0]) == ()


@pytest.mark.parametrize(
    ("name", "listed", "expected"),
    [
        ("auto", [0], ["cuda:0"]),
        ("auto", [1, 0], ["cuda:1", "cuda:0"]),
        ("cuda", [0, 1], ["cuda:0", "cuda:1"]),
        ("cuda:1", [0], ["cuda:1"]),
    ],
)
def test_a_named_gpu_wins_over_the_gpus_that_the_model_lists(gpus, name, listed, expected):
    gpus(2)

    assert names(open_devices(name, listed)) == expected


def test_auto_is_the_cpu_if_there_is_no_gpu(gpus, caplog):
    gpus(0)

    with caplog.at_level(logging.INFO):
        assert open_devices("auto", [0, 1]) == ()

    assert "no GPU is used: auto: there are 0 GPUs" in caplog.text


def test_a_choice_is_logged_once_for_all_models(gpus, caplog):
    gpus(0)
    choice = DeviceChoice("auto")

    with caplog.at_level(logging.INFO):
        assert [choice.open(listed) for listed in ([0], [0, 1], [1])] == [()] * 3

    assert [record.getMessage() for record in caplog.records] == ["no GPU is used: auto: there are 0 GPUs"]


@pytest.mark.parametrize(("name", "listed", "missing"), [("auto", [0, 2], 2), ("cuda", [3], 3), ("cuda:7", [0], 7)])
def test_a_missing_gpu_is_named(gpus, name, listed, missing):
    gpus(2)

    with pytest.raises(DeviceUnavailableError, match=f"cuda:{missing}: there are 2 GPUs"):
        open_devices(name, listed)


def test_runners_are_opened_only_by_name_and_logged_as_a_test_device(caplog):
    found = open_devices("runner", [0, 1])

    assert found == (open_device("runner"), open_device("runner:1"))
    assert names(found) == ["runner", "runner:1"]
    assert names(open_devices("runner:2", [0])) == ["runner:2"]
    assert "device runner: GPU kernels run on the CPU, thousands of times slower; this is for tests" in caplog.text


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "auto:1", "CUDA:0", None, 0])
def test_an_unknown_device_name_is_refused(name):
    with pytest.raises(ConfigError, match="expected cpu, auto, cuda"):
        open_devices(name, [0])
