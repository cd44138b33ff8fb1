"""What the main rank does for all of them, on gloo ranks."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.runtime.agreement import on_main, store_of_ranks
from megatron_fanformer.runtime.device import RankAddress

RunOnRanks = Callable[..., list[Any]]


def slow_rank() -> tuple[int, int]:
    """The rank that worked, for longer than the store waits by itself, and this one."""
    from torch.distributed.distributed_c10d import _get_default_store

    _get_default_store().set_timeout(timedelta(seconds=0.2))

    def work() -> int:
        time.sleep(1)
        return dist.get_rank()

    return on_main(work), dist.get_rank()


def failure(kind: type[Exception]) -> tuple[str, str, bool]:
    def fail() -> None:
        raise kind("it is damaged")

    with pytest.raises(Exception) as caught:
        on_main(fail)
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "already_reported", False)


def test_a_value_reaches_every_rank_however_long_the_main_one_is_at_work(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(4, slow_rank) == [(0, 0), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("kind", [FanformerError, InputError])
def test_an_error_is_raised_on_every_rank_and_told_by_one(run_on_ranks: RunOnRanks, kind: type[Exception]) -> None:
    problem = (kind.__name__, "it is damaged")
    assert run_on_ranks(3, failure, kind) == [(*problem, False), (*problem, True), (*problem, True)]


def test_an_unforeseen_error_ends_every_rank_too(run_on_ranks: RunOnRanks) -> None:
    main, other = run_on_ranks(2, failure, OSError)
    assert main == ("OSError", "it is damaged", False)
    assert other == ("FanformerError", "rank 0: OSError: it is damaged", True)


def test_a_name_that_does_not_resolve_is_reported_at_once_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    numbers = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "master_port": 1}
    address = RankAddress(**numbers, master_address="no-such-node.invalid")
    with pytest.raises(FanformerError, match=r"^MASTER_ADDR no-such-node\.invalid does not resolve .*; check the name"):
        store_of_ranks(address, timedelta(seconds=1))
    assert [message.endswith("; waiting 1 s for it") for message in caplog.messages] == [True]
