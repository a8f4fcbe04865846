"""A write waits for readers between its halves. Without this wait, queries return rows of other keys and torn rows."""

import numpy as np
import pytest

from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.readers import Readers
from kernels.runner.device import RunnerDevice

DIM = 256
KEYS = 24
ASKED = np.tile(np.arange(KEYS, dtype=np.int64), 40)
ROUNDS = 20


@pytest.fixture
def prompt_runner(runner, monkeypatch):
    """The CPU runner without late streams: late streams seldom run at the same time, as these tests need."""
    monkeypatch.delenv("HOTROW_RUNNER_DELAY_MS", raising=False)
    return RunnerDevice(runner.name)


class NobodyReads(Readers):
    """Skips the grace period."""

    def latest(self):
        return []


def rows_of(keys, version):
    return np.repeat((np.asarray(keys)[:, None] * 100 + version).astype(np.float32), DIM, axis=1)


def wrong_rows(cache, answer, reader):
    """The number of found rows that are torn or belong to other keys, and the number of found rows."""
    reader.synchronize()
    with cache.device.using(reader):
        rows, positions = cache.device.to_host(answer.rows), cache.device.to_host(answer.missing_positions)
    found = np.setdiff1d(np.arange(len(ASKED)), positions[: answer.missing_count[0]])
    torn = (rows[found] != rows[found, :1]).any(axis=1)
    others = rows[found, 0] // 100 != ASKED[found]
    return int((torn | others).sum()), len(found)


def erase_and_replace(cache, version):
    """Put other keys into the same slots, and then the first keys again."""
    keys, others = np.arange(KEYS), np.arange(KEYS) + 1000 + version * KEYS
    cache.erase(keys)
    cache.replace(others, rows_of(others, 0))
    cache.erase(others)
    cache.replace(keys, rows_of(keys, version))


def update(cache, version):
    cache.update(np.arange(KEYS), rows_of(np.arange(KEYS), version))


def read_during_writes(device, write, readers, rounds, until_wrong):
    """The numbers of wrong and of found rows of queries before and during each write."""
    cache = EmbeddingCache(DIM, 30, device=device, readers=readers)
    cache.replace(np.arange(KEYS), rows_of(np.arange(KEYS), 0))
    cache.stream.synchronize()
    reader = device.stream()
    before, during = cache.answer(len(ASKED), reader), cache.answer(len(ASKED), reader)
    with device.using(reader):
        keys = device.xp.asarray(ASKED)
    wrong = found = 0
    for version in range(1, rounds):
        cache.query(keys, out=before, stream=reader)
        write(cache, version % 99)
        cache.query(keys, out=during, stream=reader)
        for answer in (before, during):
            more_wrong, more_found = wrong_rows(cache, answer, reader)
            wrong, found = wrong + more_wrong, found + more_found
        cache.stream.synchronize()
        if wrong and until_wrong:
            break
    cache.close()
    return wrong, found


@pytest.mark.slow  # not under ThreadSanitizer, which would report this intended race
@pytest.mark.parametrize("write", [erase_and_replace, update])
def test_without_a_grace_period_queries_give_wrong_rows(prompt_runner, write):
    with prompt_runner.scheduled(seed=5):
        wrong, _ = read_during_writes(prompt_runner, write, NobodyReads(), rounds=20 * ROUNDS, until_wrong=True)

    assert wrong > 0


@pytest.mark.parametrize("write", [erase_and_replace, update])
def test_with_the_grace_period_every_row_is_whole_and_of_its_key(device, write):
    wrong, found = read_during_writes(device, write, Readers(), rounds=ROUNDS, until_wrong=False)

    assert found > 0
    assert wrong == 0
