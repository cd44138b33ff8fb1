"""Verification of a conversion: its result is read back from the files and compared with the source, for a receipt.

    names        every tensor of the source was used, and the destination's tensors are exactly its model's
    round trip   converted back, they are the source's, bit for bit
    logits       the models of both sides, run in float32 on fixed prompts, agree

The round trip cannot see a fault that is in both directions of a transform; the logits can. A checkpoint of ours runs
through megatron-core's model class, a Hugging Face folder through its own, a reference checkpoint through the equations
below: the authors' code is not installed here. Dropped rows of vocabulary padding are reported, not a fault.

Shapes: b batch, s sequence, h hidden size, n query heads, k query groups, d head size, v rows of the head.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from megatron_fanformer.terminal import table

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


def verify(source: Checkpoint, used: set[str], destination: Checkpoint, grid: RankGrid) -> Json:
    """Return the results of all checks by name, with `passed` and the measured numbers.

    Args:
        used: the names of the source's tensors that the conversion has read.
        destination: reopened from its files.
    """
    written = UsedTensors(destination)
    checks = {
        "round_trip": _round_trip(source, destination),
        "logits": _logits(UsedTensors(source, _dtype(source, destination)), written, grid),
    }
    return {"names": _names(source, used, destination, written.used), **checks}


def failures(checks: Json) -> str:
    """Return the problems of failed checks in one line; empty if all passed."""
    return "; ".join(f"{name}: {check['problem']}" for name, check in checks.items() if not check["passed"])


def check_lines(checks: Json) -> list[str]:
    """Return the results of passed checks as a table for a terminal."""
    names, round_trip, logits = (checks[name] for name in ("names", "round_trip", "logits"))
    tensors = f"{names['source_tensors']:,} tensors"
    rounded = f", rounded to {round_trip['rounded_to'].removeprefix('torch.')}" if round_trip["rounded_to"] else ""
    rows = {
        "names": f"all {tensors} used; the {names['destination_tensors']:,} written are the model's",
        "round trip": f"converted back, the {tensors} are the source's, bit for bit{rounded}",
        "logits": f"differ by {logits['max_abs_error']:.1e} at most; {logits['allowed']:.1e} is allowed",
    }
    return table(("check", "passed"), rows.items(), align="ll")


def report(
    source: Checkpoint, destination: Checkpoint, checks: Json | None, rows: Json, published: Path, *, hashed: bool
) -> Json:
    """Return the receipt as JSON: checks (None where none were requested), hashes, shapes, versions.

    Args:
        rows: the result of `vocabulary`.
        published: the path that the destination's folder gets when it is published.
        hashed: read the files once more for their SHA-256.
    """
    return {
        "passed": None if checks is None else not failures(checks),
        "checks": checks,
        "vocabulary": rows,
        "source": side(source, source.path, hashed),
        "destination": side(destination, published, hashed),
        "versions": versions(),
    }


def side(checkpoint: Checkpoint, path: Path, hashed: bool) -> Json:
    """Return the part of a receipt on one checkpoint: its model, files and tensors."""
    files = checkpoint.weight_files()
    with ThreadPoolExecutor(2) as pool:
        hashes = list(pool.map(sha256_of, files)) if hashed else [None] * len(files)
    return {
        "format": checkpoint.format,
        "path": str(path),
        "model": asdict(checkpoint.config),
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256}
            for file, sha256 in zip(files, hashes, strict=True)
        },
        "tensors": {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in checkpoint.tensors.meta.items()
        },
        "not_converted": list(checkpoint.not_converted),
    }


# -- names


def _names(source: Checkpoint, used: set[str], destination: Checkpoint, requested: set[str]) -> Json:
    """Check that all tensors were used; `requested` are those that the model asked for, whatever the table says."""
    unused = [name for name in source.tensors if name not in used]
    unexpected = [name for name in destination.tensors if requested and name not in requested]
    problems = [
        f"{text}: {listed(names)}"
        for text, names in (("unused", unused), ("written, but not the model's", unexpected))
        if names
    ]
    return {
        "passed": not problems,
        "problem": "; ".join(problems),
        "source_tensors": len(source.tensors),
        "destination_tensors": len(destination.tensors),
        "unused": unused,
        "not_the_models": unexpected,
    }


# -- round trip


def _dtype(source: Checkpoint, destination: Checkpoint) -> torch.dtype | None:
    """Return the type to which the conversion rounded; None where nothing was rounded."""
    before, after = ({tensor.dtype for tensor in side.tensors.meta.values()} for side in (source, destination))
    return None if before == after or len(after) != 1 else after.pop()


def _round_trip(source: Checkpoint, destination: Checkpoint) -> Json:
    dtype = _dtype(source, destination)
    vocabulary_names = {
        name
        for row, layer in rows_of(source.config)
        if row.is_vocabulary
        for name in names_in(row, layer, source.format)
    }
    rows = min(_vocabulary_rows(source), _vocabulary_rows(destination))
    different = []
    try:
        back = convert(
            destination.tensors, destination.config, destination.format, source.format, target_config=source.config
        )
        for name, returned in back.items():
            original = source.tensors[name]
            original = original if dtype is None else original.to(dtype)
            if name in vocabulary_names:
                original, returned = original[:rows], returned[:rows]
            if not _same_bits(original, returned):
                different.append(name)
    except (FanformerError, RuntimeError) as error:
        return {"passed": False, "problem": _reason(error), "different": different}
    return {
        "passed": not different,
        "problem": f"came back different: {listed(different)}" if different else "",
        "different": different,
        "rounded_to": str(dtype) if dtype else None,
    }


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def _vocabulary_rows(checkpoint: Checkpoint) -> int:
    row = next(row for row, _ in rows_of(checkpoint.config) if row.is_vocabulary)
    (name,) = names_in(row, None, checkpoint.format)
    return checkpoint.tensors.meta[name].shape[0] if name in checkpoint.tensors else 0


def vocabulary(source: Checkpoint, destination: Checkpoint) -> Json:
    """Return the embedding's rows on both sides, and the dropped or added ones."""
    before, after = _vocabulary_rows(source), _vocabulary_rows(destination)
    dropped = {}
    for row, layer in rows_of(source.config) if after < before else ():
        if row.is_vocabulary:
            (name,) = names_in(row, layer, source.format)
            dropped[name] = "zero" if not source.tensors[name][after:].any() else "not zero"
    return {
        "tokens": source.config.vocab_size,
        "source_rows": before,
        "destination_rows": after,
        "dropped_rows": max(0, before - after),
        "dropped_rows_were": dropped,
        "added_rows": max(0, after - before),
    }


# -- logits


class UsedTensors:
    """A checkpoint's tensors by name in float32; records the requested names in `used`.

    Args:
        dtype: the type to round to first; None: none.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        self.checkpoint, self._dtype = checkpoint, dtype
        self.used: set[str] = set()

    def __call__(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CorruptError: there is none of this name.
        """
        if name not in self.checkpoint.tensors:
            raise CorruptError(f"the model asks for {name}, which was not written")
        self.used.add(name)
        tensor = self.checkpoint.tensors[name]
        return (tensor if self._dtype is None else tensor.to(self._dtype)).float()


def prompts(vocab_size: int) -> Tensor:
    """Return the fixed prompts [b, s]: drawn ids, among them the first and the last of the vocabulary."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    ids_bs = torch.randint(vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator)
    ids_bs[0, 0], ids_bs[1, 1] = 0, vocab_size - 1
    return ids_bs


def _logits(source: UsedTensors, destination: UsedTensors, grid: RankGrid) -> Json:
    try:
        ids_bs = prompts(min(side.checkpoint.config.vocab_size for side in (source, destination)))
        before = logits_of(source, grid)(ids_bs)  # one model at a time: two would need twice the memory
        after = logits_of(destination, grid)(ids_bs)
    except (FanformerError, RuntimeError, IndexError) as error:
        return {"passed": False, "problem": _reason(error)}
    columns = min(before.shape[-1], after.shape[-1])
    difference = (before[..., :columns] - after[..., :columns]).abs().max().item()
    allowed = LOGITS_TOLERANCE * before[..., :columns].abs().max().item()
    return {
        "passed": difference <= allowed,  # False for NaN
        "problem": "" if difference <= allowed else f"they differ by {difference:.1e}, and {allowed:.1e} is allowed",
        "max_abs_error": difference,
        "allowed": allowed,
        "prompts": [PROMPTS, PROMPT_TOKENS],
        "columns": columns,
    }


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def logits_of(tensors: UsedTensors, grid: RankGrid) -> Logits:
    """Return a function that computes the logits of a checkpoint's model.

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
