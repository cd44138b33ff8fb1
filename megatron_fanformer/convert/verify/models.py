"""Logits of a model of any format, whole and in float32, by the code that its users run.

A checkpoint of ours runs through megatron-core's model class, a Hugging Face folder through its own, a reference
checkpoint through `reference_model`: the authors' code is not installed here.

Shapes: b batch, s sequence, v rows of the head.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from megatron_fanformer.convert.checkpoints import Checkpoint
from megatron_fanformer.convert.huggingface import to_huggingface_config
from megatron_fanformer.convert.verify.reference_model import reference_logits
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid
from megatron_fanformer.runtime.seeding import local_shards, seed_everything

Logits = Callable[[Tensor], Tensor]
"""Maps ids [b, s] to logits [b, s, v] in float32."""
Load = Callable[[str], Tensor]


class UsedTensors:
    """A checkpoint's tensors by name in float32; records which were requested.

    Args:
        dtype: to round to first; None: as they are.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        self.checkpoint, self._dtype = checkpoint, dtype
        self.used: set[str] = set()

    def __call__(self, name: str) -> Tensor:
        """Return the tensor of a name.

        Raises:
            CorruptError: there is none.
        """
        if name not in self.checkpoint.tensors:
            raise CorruptError(f"the model asks for {name}, which was not written")
        self.used.add(name)
        tensor = self.checkpoint.tensors[name]
        return (tensor if self._dtype is None else tensor.to(self._dtype)).float()


def logits_of(tensors: UsedTensors, grid: RankGrid) -> Logits:
    """Return a checkpoint's model.

    Raises:
        CorruptError: a tensor is missing or has another shape than the model's.
    """
    checkpoint = tensors.checkpoint
    if checkpoint.format == "reference":
        return lambda ids_bs: reference_logits(checkpoint.config, tensors, ids_bs)
    return _huggingface(tensors) if checkpoint.format == "hf" else _megatron(tensors, grid)


@torch.no_grad()
def _huggingface(tensors: UsedTensors) -> Logits:
    with no_init_weights():
        model = FANformerForCausalLM(to_huggingface_config(tensors.checkpoint.config)).float().eval()
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.copy_(_of_shape(parameter.shape, tensors(name), name))

    @torch.no_grad()
    def logits(ids_bs: Tensor) -> Tensor:
        out: Tensor = model(input_ids=ids_bs, use_cache=False).logits
        return out.float()

    return logits


@torch.no_grad()
def _megatron(tensors: UsedTensors, grid: RankGrid) -> Logits:
    seed_everything(0)  # megatron-core needs its random states
    (stage,) = build_stages(tensors.checkpoint.config, ParallelConfig(), grid, dtype=torch.float32, seed=None)
    for shard in local_shards(sharded_state(stage.eval(), grid)):
        assert shard.data is not None
        whole = _of_shape(shard.global_shape, tensors(shard.key), shard.key)
        shard.data.copy_(whole[shard.global_slice()])

    @torch.no_grad()
    def logits(ids_bs: Tensor) -> Tensor:
        positions = torch.arange(ids_bs.shape[1]).expand_as(ids_bs)
        out: Tensor = stage(input_ids=ids_bs, position_ids=positions, attention_mask=None)
        return out.float()

    return logits


def _of_shape(shape: Sequence[int], tensor: Tensor, name: str) -> Tensor:
    if tuple(tensor.shape) != tuple(shape):
        raise CorruptError(
            f"the model's {name} has shape {list(shape)}, but what was written has shape {list(tensor.shape)}"
        )
    return tensor
