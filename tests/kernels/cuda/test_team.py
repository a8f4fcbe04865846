"""Blocks that stay until all are done form a team: each knows its rank, and all meet before they continue."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from gpu_cache.bag_layout import TEAM_WORDS

SOURCE = Path(__file__).parent / "team.cu"
THREADS = 64
MOST_MEMBERS = 64


class Launch:
    """One launch of ``share``, and the team's memory, which all launches share."""

    def __init__(self, device):
        self.device = device
        self.team = device.zeros(TEAM_WORDS, np.uint32)

    def __call__(self, reasons, together, os_threads, seed=0):
        blocks, device = len(reasons), self.device
        self.values = np.random.default_rng(seed).integers(0, 1000, (blocks, THREADS), dtype=np.uint32)
        given = [device.xp.asarray(np.array(reasons, np.uint32)), device.xp.asarray(self.values)]
        per_thread = (blocks, THREADS)
        shapes = (per_thread, per_thread, blocks, blocks, per_thread, blocks + 1)
        out = [device.zeros(shape, np.uint32) for shape in shapes]
        stream = device.stream()
        arguments = (self.team, given[0], np.bool_(together), given[1], *out)
        on_runner = hasattr(device, "scheduled")
        with device.scheduled(seed, os_threads) if on_runner else nullcontext():
            device.kernel(SOURCE, "share")((blocks,), (THREADS,), arguments, stream)
            stream.synchronize()
        _, self.seen, self.ranks, self.sizes, self.before, self.arrivals = (device.to_host(array) for array in out)
        return np.flatnonzero(self.sizes)

    def is_ready_again(self):
        return not self.device.to_host(self.team)[:6].any()


@pytest.fixture
def share(device):
    return Launch(device)


def check_team(share, members):
    """Check that members see all blocks' writes, have ranks without gaps, add up by rank, and meet."""
    by_rank = members[np.argsort(share.ranks[members])]
    values = share.values[by_rank].ravel()
    assert share.sizes[members].tolist() == [members.size] * members.size
    assert (share.seen[members] == share.values.sum(axis=0)[::-1]).all()
    assert share.ranks[by_rank].tolist() == list(range(members.size))
    assert share.before[by_rank].ravel().tolist() == (np.cumsum(values) - values).tolist()
    assert share.arrivals[members].tolist() == [members.size] * members.size
    assert share.is_ready_again()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_with_a_reason_to_stay_form_the_team(share, seed):
    for reasons in ([1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 0], [0, 1, 1]):
        members = share(reasons, together=True, os_threads=len(reasons), seed=seed)

        assert members.tolist() == np.flatnonzero(reasons).tolist()
        check_team(share, members)


@pytest.mark.parametrize("blocks", [1, 3, 9])
@pytest.mark.parametrize("os_threads", [1, 3])
def test_if_no_block_has_a_reason_one_block_stays(share, blocks, os_threads):
    for _ in range(3):
        members = share([0] * blocks, together=False, os_threads=os_threads)

        assert members.size == 1
        check_team(share, members)


@pytest.mark.parametrize("os_threads", [1, 2, 5])
def test_a_launch_of_more_blocks_than_run_at_once_ends(share, os_threads):
    for seed in range(3):
        members = share([1] * 23, together=False, os_threads=os_threads, seed=seed)

        assert members.size >= 1
        check_team(share, members)


def test_a_block_does_not_wait_for_blocks_that_have_not_started(runner):
    share = Launch(runner)

    members = share([1] * 7, together=False, os_threads=1)  # one after another

    assert members.tolist() == [6]


@pytest.mark.slow
def test_a_team_has_a_limited_number_of_members(share):
    members = share([1] * (MOST_MEMBERS + 6), together=True, os_threads=MOST_MEMBERS + 6)

    assert members.size == MOST_MEMBERS
    check_team(share, members)
