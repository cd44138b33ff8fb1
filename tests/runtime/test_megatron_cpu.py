"""The adaptations for machines without CUDA: when they go in, and when they must not."""

import sys

import pytest
import torch

from megatron_fanformer.runtime import megatron_cpu


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has imported megatron-core, and has not called `install`."""
    assert "megatron.core" in sys.modules
    monkeypatch.setattr(megatron_cpu, "_installed", False)


def test_install_is_refused_after_megatron_core_was_imported(not_installed: None) -> None:
    with pytest.raises(RuntimeError, match=r"megatron\.core was imported before"):
        megatron_cpu.install()


def test_nothing_is_touched_where_a_gpu_is_usable(not_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    megatron_cpu.install()
    assert not megatron_cpu._installed


def test_torch_compile_is_itself_again_after_install() -> None:
    assert torch.compile.__module__ == "torch"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_types_read_as_megatron_core_wants_them(dtype: str) -> None:
    tensor = torch.zeros(2, dtype=getattr(torch, dtype), device="cuda")
    assert tensor.device.type == "cpu"
    assert tensor.type().startswith("torch.cuda.")
    assert tensor.type(torch.float64).dtype == torch.float64


def test_the_device_of_a_with_block_is_the_factories_device_still() -> None:
    with torch.device("meta"):
        assert torch.empty(2).device.type == torch.tensor([1, 2]).device.type == "meta"
    assert torch.empty(2).device.type == torch.tensor([1, 2]).device.type == "cpu"


def test_what_was_left_out_is_imported_when_it_is_called() -> None:
    from megatron.core import optimizer

    with pytest.raises(ValueError, match="not found in model chunks"):
        optimizer.get_global_unique_param_name([], None)
    assert sys.modules["megatron.core.transformer.fsdp_dtensor_checkpoint"].__file__
