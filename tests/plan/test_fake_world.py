"""The world that a simulated rank is in: its groups, its tensors, and that nothing of it is left."""

import functools

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import clip_grads
from torch._subclasses.fake_tensor import FakeTensor

from megatron_fanformer.plan import rank
from megatron_fanformer.plan.fake_world import fake_world
from tests.plan.runs import run_config


def patched() -> list[object]:
    """What a fake world replaces."""
    return [
        dist.new_group,
        dist.all_gather_object,
        torch.UntypedStorage.copy_,
        clip_grads.l2_norm_impl,
        param_and_grad_buffer.shard_buffer,
    ]


def test_nothing_is_left_of_it_even_after_an_error() -> None:
    before = patched()
    with pytest.raises(KeyError), fake_world(8, 3):
        assert isinstance(torch.zeros(2), FakeTensor)
        assert all(now is not then for now, then in zip(patched(), before, strict=True))
        raise KeyError
    assert patched() == before
    assert not isinstance(torch.zeros(2), FakeTensor)
    assert not dist.is_initialized()


def test_a_rank_is_in_its_own_groups_alone() -> None:
    with fake_world(16384, 700):
        assert (dist.get_rank(), dist.get_world_size()) == (700, 16384)
        own, others = dist.new_group([600, 700, 800], backend="gloo"), dist.new_group([600, 800])
        assert (dist.get_rank(own), dist.get_world_size(own)) == (1, 3)
        assert others is dist.GroupMember.NON_GROUP_MEMBER


def test_the_shard_of_a_rank_is_megatrons() -> None:
    buffer = torch.arange(24)
    shards = param_and_grad_buffer.shard_buffer(buffer, 6)
    with fake_world(6, 0):
        ours = param_and_grad_buffer.shard_buffer
    for number, shard in enumerate(shards):
        assert ours(buffer, 6)[number].tolist() == shard.tolist()


def test_a_number_that_is_read_is_invented_unless_it_is_known() -> None:
    with fake_world(2, 0):
        total = torch.ones(3).sum()
        dist.all_reduce(total)
        assert (total.item(), total.to(torch.int32).item(), bool(total > 5)) == (1.0, 1, True)
        assert torch.tensor([7]).item() == 7


@pytest.mark.full
def test_no_step_holds_more_than_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation frees storages and fills them again, past what torch's fake tensors follow."""
    config = run_config(
        recompute_granularity="selective",
        recompute_modules=["core_attn", "layernorm", "mlp", "fan"],
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    two_steps = rank.run_rank(config, world_size=4, rank=0)
    monkeypatch.setattr(rank, "take_steps", functools.partial(rank.take_steps, short_steps=4))
    assert rank.run_rank(config, world_size=4, rank=0) == two_steps
