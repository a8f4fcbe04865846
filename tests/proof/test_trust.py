"""What users must be able to rely on, for hours in `make test-long`, of which `make test` has a moment.

The figures of the long forms are in ``benchmarks/results/test_long.json``.
"""

import random
from tempfile import TemporaryDirectory

import pytest

from tests.proof import hostile, kills, soak, update_kills
from tests.proof.decoders import REQUESTS, TARGETS, corpus_of
from tests.proof.hostile_commands import commands
from tests.proof.hostile_sockets import Attack
from tests.serving.storage.tiers import QUICK_FOLDER

HOUR_S = 3600
#: Over nine million inputs in all.
REQUEST_INPUTS, FILE_INPUTS = 1_450_000, 140_000


def long(*values):
    return pytest.param(*values, marks=[pytest.mark.long, pytest.mark.timeout(8 * HOUR_S)])


@pytest.fixture
def quick_folder():
    """A folder whose fsync costs nothing."""
    with TemporaryDirectory(dir=QUICK_FOLDER) as folder:
        yield folder


@pytest.fixture
def record(record_property):
    """Keep figures for the record of `make test-long`."""

    def keep(figures):
        for name, value in figures.items():
            record_property(name, value)
        return figures

    return keep


@pytest.mark.parametrize(("count", "seed"), [long(250, seed) for seed in range(4)])
def test_killed_processes_lose_no_acknowledged_change_and_give_no_wrong_answer(
    record, tmp_path, quick_folder, count, seed
):
    figures = record(kills.run(count, seed=seed, folder=tmp_path, redis_folder=tmp_path / quick_folder / "redis"))

    assert not figures["faults"], "\n".join(figures["faults"])
    assert (figures["tracebacks"], figures["exit_code"]) == (0, 0)


@pytest.mark.slow  # each kill takes a fifth of a second of processor time, so `make test` has 15 kills
@pytest.mark.parametrize(
    ("truth", "count", "seed"),
    [
        *[(truth, 5, 0) for truth in update_kills.TRUTHS],
        *[long(truth, 112, seed) for truth in update_kills.TRUTHS for seed in range(3)],
    ],
)
def test_killed_processes_apply_each_update_exactly_once(record, tmp_path, quick_folder, truth, count, seed):
    folder = tmp_path / quick_folder
    kind, pause_s = (update_kills.LiveServer, 0.6) if count > 100 else (update_kills.Consumer, 0.06)
    figures = record(update_kills.run(count, seed, folder, folder / "redis", truth, kind, pause_s))

    assert not figures["faults"], "\n".join(figures["faults"])
    assert (figures["tracebacks"], figures["exit_code"]) == (0, 0)


@pytest.mark.slow  # seconds of traffic
@pytest.mark.parametrize("seconds", [2, long(2 * HOUR_S)])
def test_a_server_under_swaps_and_faults_stays_as_it_is(record, tmp_path, quick_folder, seconds):
    figures = record(soak.run(seconds, seed=seconds, folder=tmp_path, redis_folder=tmp_path / quick_folder / "redis"))

    assert not figures["faults"], "\n".join(figures["faults"])
    assert figures["exit_code"] == 0


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_and_its_neighbours_are_decoded_or_refused(name):
    rng = random.Random(name)
    for data in corpus_of(name):
        TARGETS[name].takes(data)
        for _ in range(3):
            TARGETS[name].takes(TARGETS[name].change(data, rng))


@pytest.mark.parametrize("name", [long(name) for name in TARGETS])
def test_no_hostile_input_makes_a_decoder_fail(record, tmp_path, name):
    inputs = REQUEST_INPUTS if name in REQUESTS else FILE_INPUTS

    figures = record(hostile.fuzz_in_process(name, inputs, seed=1, folder=tmp_path))

    assert figures["faults"] == []
    assert figures["inputs"] >= inputs * 0.99
    assert figures["growth_mib"] <= hostile.MOST_GROWTH_MIB


@pytest.mark.parametrize("inputs", [800, long(500_000)])
def test_no_hostile_request_is_a_server_error(record, tmp_path, inputs):
    figures = record(Attack(tmp_path, random.Random(inputs)).run(inputs))

    assert figures["faults"] == []


@pytest.mark.parametrize("inputs", [long(2000)])
def test_no_hostile_file_or_argument_ends_a_command_with_a_traceback(record, tmp_path, inputs):
    figures = record(commands(inputs, tmp_path))

    assert figures["faults"] == []
