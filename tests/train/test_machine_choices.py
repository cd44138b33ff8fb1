"""What is left to the machine, as a CPU chooses it, and as a run tells and records it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_fanformer.configuration import flatten
from megatron_fanformer.runtime import device
from megatron_fanformer.train import machine_choices
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.machine_choices import attention_notice, choose_for_machine
from tests.small_runs import RunOnRanks, small_run, train

ENGINE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
OPEN = {
    "kernels": {"transformer_impl": "auto"},
    "runtime": {"device": "auto", "threads_per_rank": None, "cpu_kernels": "auto"},
    "precision": {"dtype": "auto"},
}


def values_of(**sections: dict[str, Any]) -> dict[str, Any]:
    return small_run("no-such-tokens", Path("no-such-run"), **sections)


def grid_of(kind: str, replicas: int, backend: str | None = None) -> Any:
    groups = SimpleNamespace(dp_cp=SimpleNamespace(size=lambda: replicas))
    return SimpleNamespace(
        device=kind,
        backend=backend or {"cpu": "gloo", "cuda": "nccl"}[kind],
        groups=groups,
        data_parallel_size=replicas,
        cpu_kernels_problem="no C++ compiler is found",
    )


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as these choices look: a GPU with Transformer Engine."""
    monkeypatch.setattr(machine_choices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine_choices.torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(machine_choices, "resolve_transformer_impl", lambda _wanted: "transformer_engine")


def chosen(kind: str, replicas: int, **sections: dict[str, Any]) -> dict[str, Any]:
    config = config_from_dict(
        values_of(**{**sections, "parallel": {"data_parallel_size": 1, **sections.get("parallel", {})}})
    )
    before = flatten(config.as_dict())
    filled, _ = choose_for_machine(config, grid_of(kind, replicas))
    after = flatten(filled.as_dict())
    return {name.rpartition(".")[2]: value for name, value in after.items() if value != before[name]}


@pytest.mark.parametrize(
    ("attention", "dtype", "is_told"),
    [("unfused", "bf16", True), ("fused", "bf16", False), ("unfused", "fp32", False)],  # float32 has no other
)
def test_attention_that_fell_back_is_told(
    attention: str, dtype: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(_attention_backends={f"use_{attention}_attention": True})
    monkeypatch.setitem(sys.modules, ENGINE_ATTENTION, module)
    notice = attention_notice(config_from_dict(values_of(precision={"dtype": dtype})), grid_of("cuda", 1))
    assert (notice is not None) == is_told


def test_a_cpu_chooses_every_open_field() -> None:
    bf16 = "bf16" if device.has_bf16_matrix_units("cpu") else "fp32"
    assert chosen("cpu", 2, **OPEN) == {
        "device": "cpu",
        "dtype": bf16,
        "transformer_impl": "local",
        "threads_per_rank": machine_choices.torch.get_num_threads(),
        "gradient_accumulation_fusion": True,
        "cpu_kernels": "torch",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "num_workers": 0,
    }


def test_what_the_user_set_stays() -> None:
    sections = {
        "parallel": {"overlap_grad_reduce": True, "overlap_param_gather": False},
        "kernels": {"transformer_impl": "local", "gradient_accumulation_fusion": False},
        "runtime": {"device": "cpu", "threads_per_rank": 1, "cpu_kernels": "torch"},
        "data": {"num_workers": 1},
    }
    assert chosen("cpu", 2, **sections) == {}


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("replicas", "fields", "expected"),
    [
        (4, {}, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        (1, {}, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
        (4, {"use_distributed_optimizer": False}, {"overlap_grad_reduce": True, "overlap_param_gather": False}),
        (4, {"overlap_grad_reduce": False}, {"overlap_param_gather": False}),
    ],
)
def test_a_gpu_overlaps_where_there_are_replicas(
    replicas: int, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = chosen("cuda", replicas, **{**OPEN, "parallel": fields})
    rest = {"device": "cuda", "dtype": "bf16", "transformer_impl": "transformer_engine", "num_workers": 2}
    assert made == {**rest, "gradient_accumulation_fusion": True, **expected}


def test_a_run_records_what_was_chosen(run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str) -> None:
    sections = {**OPEN, "training": {"train_iters": 6}}
    run_on_ranks(1, train, small_run(tokens, tmp_path / "run", **sections))
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["kernels"]["transformer_impl"] == "local"
    assert recorded["parallel"]["overlap_grad_reduce"] is False
