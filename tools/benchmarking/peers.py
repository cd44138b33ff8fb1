"""Train the model for transformers by plain PyTorch on a CPU, as a user would without this package.

Weights are float32; forward and backward run under autocast in bf16 runs; AdamW is fused, and the gradient is clipped.
"""

import os
import resource
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from benchmarking.ranks import CaseProcesses, serve

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime import device as devices


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to train the same model."""

    name: str
    keeps_memory: bool = False
    """Whether large tensors use huge pages, and freed memory is kept (`runtime.device`)."""
    compiles: bool = False


PEERS = (
    Peer(name="plain"),
    Peer(name="plain, memory kept", keeps_memory=True),
    Peer(name="plain, memory kept, compiled", keeps_memory=True, compiles=True),
)
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # what `environment.prepare` sets


def start_peer(peer: Peer, model: FANformerConfig, is_bf16: bool, samples: int) -> CaseProcesses:
    """Start a peer in a user's environment, without the variables that this package sets."""
    with patch.dict(os.environ):
        os.environ.pop(HUGE_PAGES, None)
        if peer.keeps_memory:
            os.environ[HUGE_PAGES] = "1"
        return CaseProcesses(_serve_peer, [(peer, model, is_bf16, samples)])


def _serve_peer(connection: Any, peer: Peer, model: FANformerConfig, is_bf16: bool, samples: int) -> None:
    """Serve a peer's process."""
    devices.quieten_libraries()
    torch.set_num_threads(devices.threads_per_rank(1))
    if peer.keeps_memory:
        devices.keep_freed_memory()
    connection.send("ready")
    serve(connection, lambda: _PlainTraining(peer, model, is_bf16, samples))


class _PlainTraining:
    def __init__(self, peer: Peer, model: FANformerConfig, is_bf16: bool, samples: int) -> None:
        from megatron_fanformer.convert.huggingface import to_huggingface_config
        from megatron_fanformer.hf import FANformerForCausalLM

        torch.manual_seed(0)
        self._model = FANformerForCausalLM(to_huggingface_config(model)).train()
        self._loss = torch.compile(self._loss_of) if peer.compiles else self._loss_of
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, fused=True)
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_bf16)
        self._shape, self._vocab_size = (samples, model.seq_length), model.vocab_size

    def _loss_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model(input_ids=ids, labels=ids, use_cache=False).loss

    def _step(self) -> None:
        ids = torch.randint(self._vocab_size, self._shape)
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast:
            loss = self._loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def steps(self, number: int) -> float:
        """Take some steps in a row; return the mean seconds."""
        started = time.perf_counter()
        for _ in range(number):
            self._step()
        return (time.perf_counter() - started) / number

    def peak_memory(self) -> int:
        """Return the peak of resident memory in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
