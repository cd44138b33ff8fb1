"""The tracker against what a few tensors are known to take."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fanformer.plan.memory_tracker import MemoryTracker

KB = 256  # elements of a float32 tensor that takes a KiB


@pytest.fixture(params=["real", "fake"])
def tracker(request: pytest.FixtureRequest) -> MemoryTracker:
    """One that follows real tensors, and one that follows fake ones."""
    if request.param == "fake":
        mode = FakeTensorMode()
        mode.__enter__()
        request.addfinalizer(lambda: mode.__exit__(None, None, None))
    return MemoryTracker()


def test_storages_are_counted_once_and_until_the_last_view_goes(tracker: MemoryTracker) -> None:
    with tracker:
        whole = torch.zeros(4 * KB)
        half = whole[: 2 * KB].view(2, KB)
        half.add_(1)
        assert tracker.held_bytes == 4096
        del whole
        assert tracker.held_bytes == 4096
        del half
        assert (tracker.held_bytes, tracker.peak_bytes) == (0, 4096)


def test_what_autograd_keeps_is_held(tracker: MemoryTracker) -> None:
    with tracker:
        weight = torch.ones(KB, requires_grad=True)
        loss = (weight * 2).exp().sum()  # exp keeps its output
        assert tracker.held_bytes == 1024 + 1024 + 4
        loss.backward()
        del loss
        assert tracker.held_bytes == 1024 + 1024  # the weight and its gradient


def test_a_storage_that_is_resized_counts_with_its_new_size(tracker: MemoryTracker) -> None:
    with tracker:
        tensor = torch.zeros(KB)
        tensor.untyped_storage().resize_(0)
        assert tracker.held_bytes == 0
        tensor.untyped_storage().resize_(2048)
        assert (tracker.held_bytes, tracker.peak_bytes) == (2048, 2048)
        del tensor
        assert tracker.held_bytes == 0


def test_nothing_is_followed_outside_of_the_block(tracker: MemoryTracker) -> None:
    with tracker:
        inside = torch.zeros(KB)
    torch.zeros(KB)
    inside.untyped_storage().resize_(0)
    assert (tracker.held_bytes, tracker.peak_bytes) == (1024, 1024)
