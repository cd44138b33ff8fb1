"""Verifies a conversion and writes its receipt: reads the result back from its files, and compares it with the source.

    round trip   the result, converted back, has the source's tensors, bit for bit
    logits       the models of source and result, run in float32 on fixed prompts, agree

A transform that is wrong in both directions passes the round trip; the logits show it. A checkpoint of ours runs
through megatron-core's model class, a Hugging Face folder through its own model class, a reference checkpoint through
the equations below, since the authors' code is not installed here. Rows of vocabulary padding that only source or
result has are not compared.

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
from megatron_fanformer.convert.name_table import EMBEDDING, HEAD, convert, names_in
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import CorruptError, FanformerError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid
from megatron_fanformer.runtime.seeding import local_shards, seed_everything
from megatron_fanformer.terminal import some

# Few prompts: a 1B model takes seconds per pass on a laptop's cores.
PROMPTS, PROMPT_TOKENS, PROMPT_SEED = 4, 8, 20_250_211
# Relative to the largest logit. Rounding in float32 makes 1e-6 to 1e-5 (measured on the reference cases and at 1B);
# exchanging the query and key of one head, the smallest of the planted faults, makes 1e-3 and more.
LOGITS_TOLERANCE = 1e-4

Json: TypeAlias = dict[str, Any]
Load = Callable[[str], Tensor]


def verify(source: Checkpoint, destination: Checkpoint, dtype: torch.dtype | None, grid: RankGrid) -> Json:
    """Compare a conversion's result with its source; return the receipt's checks, whose `problem` is empty if all pass.

    Args:
        destination: the result, reopened from its files.
        dtype: the type to which the conversion rounded; None if it did not round.
    """
    try:
        if different := different_tensors(source, destination, dtype):
            return {"problem": f"converted back, tensors are different: {some(different)} ({len(different)} in all)"}
        ids_bs = prompts(min(source.config.vocab_size, destination.config.vocab_size))
        source_logits = _logits(source, dtype, grid, ids_bs)  # one model at a time: two would need twice the memory
        logits = _logits(destination, None, grid, ids_bs)
    except (FanformerError, RuntimeError, IndexError) as error:
        return {"problem": " ".join(str(error).split()) or type(error).__name__}
    columns = min(source_logits.shape[-1], logits.shape[-1])  # without vocabulary padding that one model alone has
    difference = (source_logits[..., :columns] - logits[..., :columns]).abs().max().item()
    allowed = LOGITS_TOLERANCE * source_logits[..., :columns].abs().max().item()
    is_close = difference <= allowed  # False for NaN
    return {
        "problem": "" if is_close else f"logits differ by {difference:.1e}, and {allowed:.1e} is allowed",
        "round_trip": "bit for bit" + (f", after rounding to {str(dtype).removeprefix('torch.')}" if dtype else ""),
        "logits_max_abs_error": difference,
        "logits_allowed": allowed,
    }


def receipt(source: Checkpoint, destination: Checkpoint, checks: Json, path: Path) -> Json:
    """Return the receipt of a conversion whose destination will be published at `path`."""
    return {
        "checks": checks,
        "source": describe_checkpoint(source, source.path),
        "destination": describe_checkpoint(destination, path),
        "versions": versions(),
    }


def describe_checkpoint(checkpoint: Checkpoint, path: Path) -> Json:
    """Return a receipt's entry for a checkpoint: format, the last part of `path` as its name, model, weight files."""
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
    """Convert the destination's tensors back, and return the names of those that differ from the source's.

    Raises:
        CorruptError: the destination's tensors do not match its configuration.
    """
    back = convert(
        destination.tensors, destination.config, destination.format, source.format, target_config=source.config
    )
    vocabulary = {name for row in (EMBEDDING, HEAD) for name in names_in(row, None, source.format)}
    shared_rows = min(
        checkpoint.config.vocab_size if checkpoint.format == "hf" else checkpoint.config.padded_vocab_size
        for checkpoint in (source, destination)
    )
    different = []
    for name, returned in back.items():
        original = source.tensors[name]
        # Parts that the conversion joined have the widest type among them, and keep this type when split again.
        original = original.to(dtype or torch.promote_types(original.dtype, returned.dtype))
        if name in vocabulary:
            original, returned = original[:shared_rows], returned[:shared_rows]
        if not _same_bits(original, returned):
            different.append(name)
    return different


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether tensors are equal bit for bit: NaN equals itself, and 0.0 differs from -0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


# -- logits


def prompts(vocab_size: int) -> Tensor:
    """Return the fixed prompts [b, s]: random ids, and the first and the last id of the vocabulary."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    ids_bs = torch.randint(vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator)
    ids_bs[0, 0], ids_bs[1, 1] = 0, vocab_size - 1
    return ids_bs


@torch.no_grad()
def _logits(checkpoint: Checkpoint, dtype: torch.dtype | None, grid: RankGrid, ids_bs: Tensor) -> Tensor:
    """Return the logits of a checkpoint's model in float32, with its weights first rounded to `dtype` (None: not)."""

    def load(name: str) -> Tensor:
        if name not in checkpoint.tensors:
            raise CorruptError(f"{name}, which the model has, is not among the tensors")
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
        parameter.copy_(_require_shape(name, load(name), parameter.shape))
    logits: Tensor = model(input_ids=ids_bs, use_cache=False).logits
    return logits.float()


def _megatron_logits(config: FANformerConfig, load: Load, ids_bs: Tensor, grid: RankGrid) -> Tensor:
    seed_everything(0)  # megatron-core needs its random states
    (stage,) = build_stages(config, ParallelConfig(), grid, dtype=torch.float32, seed=None)
    for shard in local_shards(sharded_state(stage.eval(), grid)):
        assert shard.data is not None
        shard.data.copy_(_require_shape(shard.key, load(shard.key), shard.global_shape)[shard.global_slice()])
    positions = torch.arange(ids_bs.shape[1]).expand_as(ids_bs)
    logits: Tensor = stage(input_ids=ids_bs, position_ids=positions, attention_mask=None)
    return logits.float()


def _require_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(tensor.shape) != tuple(shape):
        raise CorruptError(
            f"the model's {name} has shape {list(shape)}, but the stored tensor has shape {list(tensor.shape)}"
        )
    return tensor


# -- the authors' model


@torch.no_grad()
def reference_logits(config: FANformerConfig, load: Load, ids_bs: Tensor) -> Tensor:
    """Return logits [b, s, v] of ids [b, s] in float32, one layer's weights at a time.

    Source: the paper's equations and the facts in tests/reference/README.md.

    Args:
        load: returns a tensor in float32 by its name in the authors' format.
    """
    x = F.embedding(ids_bs, load("transformer.wte.weight"))
    for layer in range(config.num_layers):

        def load_in_block(name: str, layer: int = layer) -> Tensor:
            return load(f"transformer.blocks.{layer}.{name}")

        x = x + _attention(config, load_in_block, _norm(config, x, load_in_block("attn_norm.weight")))
        normed = _norm(config, x, load_in_block("ff_norm.weight"))
        up, gate = (normed @ load_in_block("ff_proj.weight").T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ load_in_block("ff_out.weight").T
    head = "transformer.ff_out.weight" if config.untie_embeddings_and_output_weights else "transformer.wte.weight"
    return _norm(config, x, load("transformer.ln_f.weight")) @ load(head).T


def _norm(config: FANformerConfig, x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.layernorm_epsilon) * weight


def _fan(config: FANformerConfig, load_in_block: Load, name: str, x: Tensor, width: int) -> Tensor:
    """Apply the FAN layer `name`: [b, s, h] -> [b, s, width]. A periodic row of its map gives two outputs."""
    bias = load_in_block(f"{name}.input_linear.bias") if config.fan.bias else None
    rows = F.linear(x, load_in_block(f"{name}.input_linear.weight"), bias)
    periodic = width - rows.shape[-1]
    phase, linear = rows[..., :periodic], rows[..., periodic:]
    return torch.cat([phase.cos(), phase.sin(), F.gelu(linear) if config.fan.activation == "gelu" else linear], dim=-1)


def _attention(config: FANformerConfig, load_in_block: Load, x: Tensor) -> Tensor:  # [b, s, h] -> [b, s, h]
    qkv = config.placement.reference_qkv(config, load_in_block, x, partial(_fan, config, load_in_block))
    q, k, v = (part.unflatten(-1, (-1, config.kv_channels)).transpose(1, 2) for part in qkv)  # [b, heads, s, d]
    q, k = _rotate(config, q), _rotate(config, k)
    heads_per_group = config.num_attention_heads // config.query_groups
    k, v = k.repeat_interleave(heads_per_group, dim=1), v.repeat_interleave(heads_per_group, dim=1)
    scores = q @ k.transpose(-1, -2) / config.kv_channels**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return context.transpose(1, 2).flatten(2) @ load_in_block("attn_out.weight").T


def _rotate(config: FANformerConfig, x: Tensor) -> Tensor:
    """Rotate the halves of each head [b, n, s, d] by rotary positions."""
    exponents = torch.arange(0, config.kv_channels, 2, dtype=torch.float32) / config.kv_channels
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), 1.0 / config.rotary_base**exponents)
    cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
