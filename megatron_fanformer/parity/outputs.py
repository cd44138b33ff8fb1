"""Records the outputs of modules in a forward pass, by sample and position, whatever the layout.

Shapes: s sequence, b micro batch, w a module's width; outputs are [s, b, w], or [b, s] for the loss of each token.
Where attention stays within documents, they are [b * s, 1, w] and [1, b * s]: one row of the samples.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fanformer.model.fan_layer import ActivatedColumnParallelLinear, FANProjection
from megatron_fanformer.parity.tensor_parts import TensorPart, as_array
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.pipeline import own_positions

TOKEN_LOSS = "token loss"
OUTPUT_MAKERS = (FANProjection, ActivatedColumnParallelLinear)
"""Modules whose forward returns a FAN map's outputs: the map itself, or the layer that computes them from its p | g."""


class OutputRecorder:
    """Between its start and its end, records every output of one step; passes of recomputation are excluded."""

    def __init__(self, stages: list[Any], grid: RankGrid, global_batch_size: int, micro_batch_size: int) -> None:
        self.parts: list[TensorPart] = []
        self._grid, self._global_batch_size, self._micro_batch_size = grid, global_batch_size, micro_batch_size
        self._seq_length = stages[0].max_sequence_length
        self._forward_of: dict[int, int] = {}
        self._inside = False
        self._hooks = [hook for number, chunk in enumerate(stages) for hook in self._watch(number, chunk)]

    def __enter__(self) -> "OutputRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, number: int, chunk: Any) -> list[Any]:
        hooks = [
            chunk.register_forward_pre_hook(functools.partial(self._begin, number)),
            chunk.register_forward_hook(functools.partial(self._end, number)),
        ]
        for name, module in self._modules(chunk):
            hooks.append(module.register_forward_hook(functools.partial(self._note, number, name)))
        return hooks

    @staticmethod
    def _modules(chunk: Any) -> list[tuple[str, Any]]:
        """Modules whose outputs are whole in width on every rank, under their global names."""
        modules = [("embedding", chunk.embedding)] if chunk.pre_process else []
        for layer in chunk.decoder.layers:
            name = f"layers.{layer.layer_number - 1}"  # global, whatever the stage
            makers = [m for m in layer.self_attention.modules() if isinstance(m, OUTPUT_MAKERS)]  # one of them runs
            modules += [(f"{name}.fan", maker) for maker in makers]
            modules += [(f"{name}.self_attention", layer.self_attention), (f"{name}.mlp", layer.mlp), (name, layer)]
        if chunk.decoder.final_layernorm is not None:
            modules.append(("final_layernorm", chunk.decoder.final_layernorm))
        return modules

    def _begin(self, number: int, *_: Any) -> None:
        self._inside = True
        self._forward_of[number] = self._forward_of.get(number, -1) + 1

    def _end(self, number: int, chunk: Any, _inputs: Any, output: Tensor) -> None:
        self._inside = False  # what runs from here on, in backward, is recomputation
        if chunk.post_process:
            self._keep(TOKEN_LOSS, self._forward_of[number], output.t().unsqueeze(-1))

    def _note(self, number: int, name: str, module: Any, _inputs: Any, output: Any) -> None:
        if not self._inside:
            return
        if name.endswith(".fan"):
            if isinstance(module, ActivatedColumnParallelLinear):
                _, output = output
            for part, tensor in zip((name, name.replace(".fan", ".v_fan")), output, strict=False):
                self._keep(part, self._forward_of[number], tensor)
        else:
            tensor = output[0] if isinstance(output, tuple) else output
            self._keep(name, self._forward_of[number], tensor)

    def _keep(self, name: str, micro_batch: int, output_sbw: Tensor) -> None:
        size = self._micro_batch_size
        first = (micro_batch * self._grid.data_parallel_size + self._grid.data_parallel_rank) * size
        samples = list(range(first, first + size))
        whole = (self._global_batch_size, self._seq_length, output_sbw.shape[-1])
        values = as_array(output_sbw.transpose(0, 1))
        if len(values) < size:
            self.parts += [TensorPart(name, whole, *part) for part in self._of_one_row(values, samples)]
            return
        self.parts.append(
            TensorPart(name, whole, (samples, self._positions(self._seq_length, output_sbw.shape[0])), values)
        )

    def _of_one_row(self, values: np.ndarray, samples: list[int]) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the parts that the samples have in the one row of them, or in this rank's part of it."""
        places, positions = divmod(self._positions(len(samples) * self._seq_length, values.shape[1]), self._seq_length)
        for place in np.unique(places):
            own = places == place
            yield ([samples[place]], positions[own]), values[:, own]

    def _positions(self, whole: int, length: int) -> np.ndarray:
        """Return which positions of a whole sequence an output of `length` has, by its length alone."""
        positions = own_positions(torch.arange(whole).unsqueeze(0), self._grid).squeeze(0)
        if length != len(positions):  # this tensor parallel rank's part of them
            positions = positions.chunk(len(positions) // length)[self._grid.groups.tp.rank()]
        return positions.numpy()
