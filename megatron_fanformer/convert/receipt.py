"""Verification of a conversion: its result is read back from the files and compared with the source, for a receipt.

    round trip   converted back, the tensors are the source's, bit for bit
    logits       the models of both sides, run in float32 on fixed prompts, agree

The round trip cannot see a fault that is in both directions of a transform; the logits can. A checkpoint of ours runs
through megatron-core's model class, a Hugging Face folder through its own, a reference checkpoint through the equations
below: the authors' code is not installed here. Rows of vocabulary padding that only one side has are not compared.

Shapes: b batch, s sequence, h hidden size, n query heads, k query groups, d head size, v rows of the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.initialization import no_init_weights

from megatron_fanformer.checkpoint.manifest import versions
from megatron_fanformer.convert.checkpoints import Checkpoint
from megatron_fanformer.convert.huggingface import to_huggingface_config
from megatron_fanformer.convert.name_table import convert, listed, names_in, rows_of
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import CorruptError, FanformerError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid
from megatron_fanformer.runtime.seeding import local_shards, seed_everything

# Few: a 1B model takes seconds per pass on a laptop's cores.
PROMPTS, PROMPT_TOKENS = 4, 8
PROMPT_SEED = 20_250_211
# Of the largest logit. Rounding in float32 makes 1e-6 to 1e-5 (measured on the reference cases and at 1B); exchanging
# the query and key of one head, the smallest of the planted faults, 1e-3 and more.
LOGITS_TOLERANCE = 1e-4

Json: TypeAlias = dict[str, Any]
Logits = Callable[[Tensor], Tensor]
"""Maps ids [b, s] to logits [b, s, v] in float32."""
Load = Callable[[str], Tensor]


def verify(source: Checkpoint, destination: Checkpoint, dtype: torch.dtype | None, grid: RankGrid) -> Json:
    """Return the results of the checks: `problem` is empty where they passed.

    Args:
        destination: reopened from its files.
        dtype: the type to which the conversion rounded; None: it did not.
    """
    try:
        if different := different_tensors(source, destination, dtype):
            return {"problem": f"converted back, tensors are different: {listed(different)}"}
        ids_bs = prompts(min(source.config.vocab_size, destination.config.vocab_size))
        before = _logits(source, dtype, grid, ids_bs)  # one model at a time: two would need twice the memory
        after = _logits(destination, None, grid, ids_bs)
    except (FanformerError, RuntimeError, IndexError) as error:
        return {"problem": " ".join(str(error).split()) or type(error).__name__}
    columns = min(before.shape[-1], after.shape[-1])
    difference = (before[..., :columns] - after[..., :columns]).abs().max().item()
    allowed = LOGITS_TOLERANCE * before[..., :columns].abs().max().item()
    is_same = difference <= allowed  # False for NaN
    return {
        "problem": "" if is_same else f"logits differ by {difference:.1e}, and {allowed:.1e} is allowed",
        "round_trip": f"bit for bit, after rounding to {dtype_name(dtype)}" if dtype else "bit for bit",
        "logits_max_abs_error": difference,
        "logits_allowed": allowed,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name without the package's."""
    return str(dtype).removeprefix("torch.")


def receipt(source: Checkpoint, destination: Checkpoint, checks: Json, path: Path) -> Json:
    """Return the receipt; `path` is where the destination will be published."""
    return {
        "checks": checks,
        "source": side(source, source.path),
        "destination": side(destination, path),
        "versions": versions(),
    }


def side(checkpoint: Checkpoint, path: Path) -> Json:
    """Return the part of a receipt on one checkpoint: its model and files; of its path the last part alone."""
    return {
        "format": checkpoint.format,
        "name": path.name,
        "model": asdict(checkpoint.config),
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in checkpoint.weight_files()
        },
    }


# -- round trip


def different_tensors(source: Checkpoint, destination: Checkpoint, dtype: torch.dtype | None) -> list[str]:
    """Return the names of the source's tensors that the destination's, converted back, differ from.

    Raises:
        CorruptError: the destination's tensors are not its model's.
    """
    back = convert(
        destination.tensors, destination.config, destination.format, source.format, target_config=source.config
    )
    vocabulary = {
        name
        for row, layer in rows_of(source.config)
        if row.is_vocabulary
        for name in names_in(row, layer, source.format)
    }
    rows = min(_embedding_rows(source), _embedding_rows(destination))
    different = []
    for name, returned in back.items():
        original = source.tensors[name]
        # parts of one tensor get the wider of their types
        original = original.to(dtype or torch.promote_types(original.dtype, returned.dtype))
        if name in vocabulary:
            original, returned = original[:rows], returned[:rows]
        if not _same_bits(original, returned):
            different.append(name)
    return different


def _embedding_rows(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    return config.vocab_size if checkpoint.format == "hf" else config.padded_vocab_size


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


# -- logits


def prompts(vocab_size: int) -> Tensor:
    """Return the fixed prompts [b, s]: drawn ids, among them the first and the last of the vocabulary."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    ids_bs = torch.randint(vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator)
    ids_bs[0, 0], ids_bs[1, 1] = 0, vocab_size - 1
    return ids_bs


@torch.no_grad()
def _logits(checkpoint: Checkpoint, dtype: torch.dtype | None, grid: RankGrid, ids_bs: Tensor) -> Tensor:
    """Return the logits of a checkpoint's model in float32, its weights rounded to `dtype`.

    Raises:
        CorruptError: a tensor is missing or has another shape than the model's.
    """

    def load(name: str) -> Tensor:
        if name not in checkpoint.tensors:
            raise CorruptError(f"the model asks for {name}, which was not written")
        tensor = checkpoint.tensors[name]
        return (tensor if dtype is None else tensor.to(dtype)).float()

    if checkpoint.format == "reference":
        return reference_logits(checkpoint.config, load, ids_bs)
    if checkpoint.format == "hf":
        return _huggingface_logits(checkpoint.config, load, ids_bs)
    return _megatron_logits(checkpoint.config, load, ids_bs, grid)


def _huggingface_logits(config: FANformerConfig, load: Load, ids_bs: Tensor) -> Tensor:
    with no_init_weights():
        model = FANformerForCausalLM(to_huggingface_config(config)).float().eval()
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.copy_(_of_shape(parameter.shape, load(name), name))
    logits: Tensor = model(input_ids=ids_bs, use_cache=False).logits
    return logits.float()


def _megatron_logits(config: FANformerConfig, load: Load, ids_bs: Tensor, grid: RankGrid) -> Tensor:
    seed_everything(0)  # megatron-core needs its random states
    (stage,) = build_stages(config, ParallelConfig(), grid, dtype=torch.float32, seed=None)
    for shard in local_shards(sharded_state(stage.eval(), grid)):
        assert shard.data is not None
        shard.data.copy_(_of_shape(shard.global_shape, load(shard.key), shard.key)[shard.global_slice()])
    positions = torch.arange(ids_bs.shape[1]).expand_as(ids_bs)
    logits: Tensor = stage(input_ids=ids_bs, position_ids=positions, attention_mask=None)
    return logits.float()


def _of_shape(shape: Sequence[int], tensor: Tensor, name: str) -> Tensor:
    if tuple(tensor.shape) != tuple(shape):
        raise CorruptError(
            f"the model's {name} has shape {list(shape)}, but what was written has shape {list(tensor.shape)}"
        )
    return tensor


# -- the authors' model


@torch.no_grad()
def reference_logits(config: FANformerConfig, load: Load, ids_bs: Tensor) -> Tensor:
    """Return logits [b, s, v] of ids [b, s] in float32, one layer's weights at a time.

    Source: the paper's equations and the facts in tests/reference/README.md.

    Args:
        load: returns the tensor of one of the reference's names, in float32.
    """
    x = F.embedding(ids_bs, load("transformer.wte.weight"))
    for layer in range(config.num_layers):

        def block(name: str, layer: int = layer) -> Tensor:
            return load(f"transformer.blocks.{layer}.{name}")

        x = x + _attention(config, block, _norm(config, x, block("attn_norm.weight")))
        up, gate = (_norm(config, x, block("ff_norm.weight")) @ block("ff_proj.weight").T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ block("ff_out.weight").T
    head = "transformer.ff_out.weight" if config.untie_embeddings_and_output_weights else "transformer.wte.weight"
    return _norm(config, x, load("transformer.ln_f.weight")) @ load(head).T


def _norm(config: FANformerConfig, x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.layernorm_epsilon) * weight


def _fan(config: FANformerConfig, block: Load, name: str, x: Tensor, width: int) -> Tensor:
    """[b, s, h] -> [b, s, width]; P follows from the map's rows, P + G = width - P."""
    bias = block(f"{name}.input_linear.bias") if config.fan.bias else None
    rows = F.linear(x, block(f"{name}.input_linear.weight"), bias)
    periodic = width - rows.shape[-1]
    phase, linear = rows[..., :periodic], rows[..., periodic:]
    return torch.cat([phase.cos(), phase.sin(), F.gelu(linear) if config.fan.activation == "gelu" else linear], dim=-1)


def _attention(config: FANformerConfig, block: Load, x: Tensor) -> Tensor:
    qkv = config.placement.reference_qkv(config, block, x, partial(_fan, config, block))
    q, k, v = (part.unflatten(-1, (-1, config.kv_channels)).transpose(1, 2) for part in qkv)
    q, k = _rotate(config, q), _rotate(config, k)
    share = config.num_attention_heads // config.query_groups
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(-1, -2) / config.kv_channels**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return context.transpose(1, 2).flatten(2) @ block("attn_out.weight").T


def _rotate(config: FANformerConfig, x: Tensor) -> Tensor:
    """Rotate the halves of each head [b, n, s, d] by rotary positions."""
    exponents = torch.arange(0, config.kv_channels, 2, dtype=torch.float32) / config.kv_channels
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), 1.0 / config.rotary_base**exponents)
    cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
