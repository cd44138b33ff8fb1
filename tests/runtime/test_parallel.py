"""What the rank grid sets up for its ranks: kernels that all or none compute by, one bucket a call over gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from megatron_fanformer.errors import InputError
from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.runtime import device, parallel
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.runtime.parallel import reduce_one_bucket_a_call


@pytest.mark.usefixtures("without_home")
def test_a_user_without_a_home_is_told_so_and_computes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 1)
    message, compiled = "there is no home folder for a cache", RuntimeConfig(cpu_kernels="compiled")
    with pytest.raises(InputError, match=rf"^{message} .*; set XDG_CACHE_HOME to a folder$"):
        device.cache_folder()
    with parallel.cpu_kernels_of(RuntimeConfig(), "cpu"):
        assert str(cpu_kernels.problem()).startswith(message)
    with pytest.raises(InputError, match=message), parallel.cpu_kernels_of(compiled, "cpu"):
        pass
    with pytest.raises(InputError, match="ranks on GPUs do not"), parallel.cpu_kernels_of(compiled, "cuda"):
        pass
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert device.cache_folder() == Path("/somewhere/megatron-fanformer")


def refusal_of_kernels(failing: int) -> tuple[str, bool]:
    """What a rank says, and whether another says it for it, where one rank cannot build the kernels."""
    with (
        mock.patch.object(parallel, "_kernels_problem", lambda: {failing: "there is no compiler"}.get(dist.get_rank())),
        pytest.raises(InputError) as caught,
        parallel.cpu_kernels_of(RuntimeConfig(cpu_kernels="compiled"), "cpu"),
    ):
        pass
    cpu_kernels.unload("the test is over")
    return str(caught.value), caught.value.already_reported


def test_what_one_rank_cannot_build_is_refused_by_all_and_told_by_one(run_on_ranks: Callable[..., list[Any]]) -> None:
    message = "runtime.cpu_kernels is compiled, but there is no compiler; set it to torch"
    assert run_on_ranks(2, refusal_of_kernels, 1) == [(message, False), (message, True)]


def reduced_twice() -> tuple[bool, list[float]]:
    """At once, which must not be coalesced, and in the background, which torch's own manager waits for."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    theirs, tensor = buffers._coalescing_manager, torch.ones(2)
    try:
        reduce_one_bucket_a_call()
        with buffers._coalescing_manager(dist.group.WORLD) as nothing:
            dist.all_reduce(tensor)
        with buffers._coalescing_manager(dist.group.WORLD, async_ops=True) as works:
            dist.all_reduce(tensor, async_op=True)
        works.wait()
    finally:
        buffers._coalescing_manager = theirs
    return nothing is None, tensor.tolist()


def test_buckets_are_reduced_one_a_call(run_on_ranks: Callable[..., list[Any]]) -> None:
    assert run_on_ranks(2, reduced_twice) == [(True, [4.0, 4.0])] * 2
