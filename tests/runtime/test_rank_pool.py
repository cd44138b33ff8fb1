"""The pool of ranks: a job's failure is the job's, and no rank outlives its owner."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_fanformer.runtime import rank_pool
from megatron_fanformer.runtime.rank_pool import JobFailed, RankPool
from tests.patience import is_running, wait_until
from tests.small_runs import start_program


def sum_of_ranks() -> int:
    gathered: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_rank())
    return sum(rank for rank in gathered if rank is not None)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def tell_and_wait_for_ever() -> None:
    print(os.getpid(), flush=True)
    time.sleep(3600)


def import_nothing() -> None:
    """In the place of megatron-core, which takes a fork server seconds: that is of the pool that all tests share."""


def test_a_failed_job_names_its_rank_and_the_pool_goes_on() -> None:
    with RankPool(prepare=import_nothing) as pool:
        with pytest.raises(JobFailed, match=r"(?s)rank 1 of 2: .*planted") as failure:
            pool.run(2, fail_on, 1)
        assert failure.value.rank == 1
        assert pool.run(2, sum_of_ranks) == [1, 1]
        for _ in range(40):  # one in a hundred used to end its group before another rank had joined it
            assert pool.run(3, dist.get_world_size) == [3] * 3
        with pytest.raises(JobFailed, match="rank 0 of 2: it died"):
            pool.run(2, die_on, 0)


def test_a_job_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "END_SECONDS", 0.1)  # it never ends by itself
    refused = pytest.raises(JobFailed, match="took longer than 1 s on 1 ranks")
    with RankPool(job_seconds=1, prepare=import_nothing) as pool, refused:
        pool.run(1, tell_and_wait_for_ever)


OWNER = """
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.runtime.test_rank_pool import import_nothing, tell_and_wait_for_ever
if __name__ == "__main__":
    RankPool(prepare=import_nothing).run(1, tell_and_wait_for_ever)
"""


def test_ranks_end_with_a_killed_owner(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = start_program(sys.executable, str(script))
    assert owner.stdout is not None
    rank = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    wait_until(lambda: not is_running(rank))
