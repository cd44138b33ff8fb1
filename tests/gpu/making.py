"""Building blocks of tests on a GPU: a small model's runs in processes of their own, and what they left.

A process of its own is what starts with CUDA's settings fresh, or without CUDA; the trainer is the same in all.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.model.layer_spec import transformer_engine_problem
from megatron_fanformer.runtime.device import fp8_problem
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.train.metrics import read_metrics
from tests.engine_on_cpu import installing
from tests.patience import PATIENCE_SECONDS
from tests.small_runs import ROOT, small_run, start_command, write_config
from tests.token_pairs import write_token_pair

IS_STAND_IN = torch.cuda.is_available() and torch.cuda.get_device_name() == installing.NAME
# As runs on GPUs do by themselves, which is over NCCL; a torch without it shares the GPU over gloo.
BACKEND = None if torch.distributed.is_nccl_available() and not IS_STAND_IN else "gloo"
ON_GPU = RuntimeConfig(device="cuda", distributed_backend=BACKEND)
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is seen: `pytest tests/gpu` alone shows it"),
]
needs_real_gpu = pytest.mark.skipif(IS_STAND_IN, reason="the GPU is the stand-in of tests/engine_on_cpu")


def needs_engine(recipe: str | None = None) -> None:
    """Skip a test where there is no Transformer Engine, or no FP8 of a recipe."""
    if problem := transformer_engine_problem() or (recipe and fp8_problem(recipe)):
        pytest.skip(str(problem))


VOCAB_SIZE = 512
SEQ_LENGTH = 128
STEPS = 12
# Every size a multiple of 128: each FP8 recipe takes them.
MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "seq_length": SEQ_LENGTH,
}
# nats, of any of a dozen steps: what rounding and summing otherwise may change. bf16 differed from float32 by 0.011 at
# most on one CPU (2026-11); two bf16 runs may be as far off on either side, and a GPU sums in orders of its own.
SAME_LOSS = 0.04


def write_learnable_tokens(prefix: Path, documents: int = 200) -> str:
    """Token files whose next token follows from the present one, nine times of ten; returns the prefix."""
    generator = np.random.default_rng(0)
    follower = generator.permutation(VOCAB_SIZE)
    written = []
    for _ in range(documents):
        tokens = [int(generator.integers(VOCAB_SIZE))]
        for _ in range(2 * SEQ_LENGTH):
            is_noise = generator.random() < 0.1
            tokens.append(int(generator.integers(VOCAB_SIZE)) if is_noise else int(follower[tokens[-1]]))
        written.append([tokens])
    return write_token_pair(prefix, written)


def gpu_run(tokens: str, run_dir: Path, *, steps: int = STEPS, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration's plain values: bf16, Transformer Engine's layers where they are; `sections` are laid over it."""
    values = {
        "model": MODEL,
        "kernels": {"transformer_impl": "auto"},
        "runtime": {"device": "cuda", "distributed_backend": BACKEND},
        "precision": {"dtype": "bf16"},
        "optimizer": {"lr": 3e-3},
        "training": {"train_iters": steps},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return small_run(tokens, run_dir, **values)


def finished(values: dict[str, Any], file: Path) -> list[float]:
    """Run a configuration in a process of its own; the losses of all steps so far."""
    return [metrics["loss"] for metrics in finished_metrics(values, file)]


def finished_metrics(values: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    """The same, with all metrics of each step."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # Transformer Engine may stand in a folder of it
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    if values["runtime"]["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    arguments = ("--debug", "train", "--config", str(write_config(file, values)))
    process = start_command(*arguments, environment=environment)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, f"{output[-2000:]}\n{errors[-6000:]}"
    return read_metrics(Path(values["training"]["run_dir"]))
