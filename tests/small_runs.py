"""Runs of a model so small that twenty steps take a second, on random tokens, for tests of the whole trainer."""

import copy
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import yaml

from tests.tiny import TINY
from tests.token_pairs import write_token_pair

if TYPE_CHECKING:  # of a process that has installed the CPU adaptations
    from megatron_fanformer.train.step import StepResult
    from megatron_fanformer.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
VOCAB_SIZE = TINY["vocab_size"]
SEQ_LENGTH = 16
MANY_THREADS = 40

RunOnRanks = Callable[..., list[Any]]
"""Of the fixture `run_on_ranks`."""


def collect_groups() -> None:
    """Collect what runs in this process left: process groups in cycles, whose gloo threads wake up every 10 ms."""
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        gc.collect()


def write_tokens(prefix: Path, *, vocab_size: int = VOCAB_SIZE, documents: int = 60) -> str:
    """Random documents as token files; returns the prefix."""
    generator = np.random.default_rng(0)
    return write_token_pair(prefix, [[generator.integers(vocab_size, size=40 + n)] for n in range(documents)])


def small_run(tokens: str, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration's plain values: one rank, fp32, 20 steps; `sections` are laid over it, key by key."""
    values: dict[str, dict[str, Any]] = {
        "model": {**TINY, "ffn_hidden_size": 64, "seq_length": SEQ_LENGTH},
        "parallel": {},
        "kernels": {"transformer_impl": "local"},
        "runtime": {"device": "cpu", "threads_per_rank": 1, "cpu_kernels": "torch"},
        "precision": {"dtype": "fp32"},
        "data": {"train_data": [tokens]},
        "optimizer": {"lr": 1e-2},
        "schedule": {"lr_warmup_iters": 5},
        "training": {"run_dir": str(run_dir), "train_iters": 20, "global_batch_size": 4, "micro_batch_size": 2},
        "logging": {"tensorboard": False},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **copy.deepcopy(fields)}
    return values


@contextmanager
def trainer_of(values: dict[str, Any], **options: Any) -> "Iterator[Trainer]":
    """On a rank: the trainer of a configuration's plain values, closed at the end of the block."""
    from megatron_fanformer.runtime.parallel import rank_grid
    from megatron_fanformer.train import preflight
    from megatron_fanformer.train.config import config_from_dict
    from megatron_fanformer.train.trainer import Trainer

    config = config_from_dict(values)
    with rank_grid(config.parallel, "cuda" if config.runtime.device == "cuda" else "cpu") as grid:
        with mock.patch.object(preflight, "_tokenizer_problems", lambda _config: []):  # any tokenizer has more ids
            trainer = Trainer(config, grid, **options)
        try:
            yield trainer
        finally:
            trainer.close()


def train(values: dict[str, Any]) -> None:
    """On a rank: train to the last step."""
    with trainer_of(values) as trainer:
        trainer.train()


def first_step(trainer: "Trainer") -> "StepResult":
    """On a rank: take one step of a trainer's batches."""
    from megatron_fanformer.train.step import train_step

    parts = (trainer._wrapped, trainer._optimizer, trainer._batches, trainer.grid, trainer._num_micro_batches)
    return train_step(*parts)


def write_config(file: Path, values: dict[str, Any]) -> Path:
    """Write plain values as a configuration file."""
    file.write_text(yaml.safe_dump(values))
    return file


def write_program(file: Path, script: str, *, interpreter: str = "/usr/bin/env bash") -> Path:
    """Write a script that can be run by its name."""
    file.write_text(f"#!{interpreter}\n{script}\n")
    file.chmod(0o755)
    return file


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_open(port: int) -> bool:
    """Return whether a server listens on this port of the loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_command(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """Start `python -m megatron_fanformer ARGUMENTS` in a session of its own, its output captured."""
    return start_program(sys.executable, "-m", "megatron_fanformer", *arguments, **options)


def start_program(*command: str, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start a program that finds this checkout's package, in a session of its own, its output captured."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
