"""A FANformer in plain PyTorch, written from the paper's equations and the reference's facts alone.

Takes the authors' own names and layout of weights, whose shapes say where FAN is, its p_ratio and how many heads share
keys and values. Shares no code with the package, so that both can be held against each other. Any floating-point type.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_logits(
    weights: Mapping[str, Tensor], tokens_bs: Tensor, *, heads: int, gelu: bool = False, epsilon: float = 1e-6
) -> Tensor:
    """Logits [b, s, v] of tokens [b, s]; `gelu` is FAN's activation, which no shape tells."""
    x = weights["transformer.wte.weight"][tokens_bs]
    for layer in range(1 + max(int(name.split(".")[2]) for name in weights if ".blocks." in name)):
        block = {name.split(".", 3)[3]: w for name, w in weights.items() if f".blocks.{layer}." in name}
        x = x + _attention(block, _norm(x, block["attn_norm.weight"], epsilon), heads, gelu, epsilon)
        x = x + _mlp(block, _norm(x, block["ff_norm.weight"], epsilon), gelu)
    head = weights.get("transformer.ff_out.weight", weights["transformer.wte.weight"])
    return _norm(x, weights["transformer.ln_f.weight"], epsilon) @ head.T


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an export, under the authors' names and stacked as they stack them."""
    renamed = {"embed_tokens": "wte", "norm": "ln_f"}
    own = {f"transformer.{new}.weight": weights[f"model.{old}.weight"] for old, new in renamed.items()}
    own["transformer.ff_out.weight"] = weights["lm_head.weight"]
    for layer in range(1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)):
        theirs = {name.split(".", 3)[3]: w for name, w in weights.items() if f".layers.{layer}." in name}
        block = {
            "attn_norm.weight": theirs["input_layernorm.weight"],
            "attn_out.weight": theirs["self_attn.o_proj.weight"],
            "ff_norm.weight": theirs["post_attention_layernorm.weight"],
        }
        if "mlp.fan_1.weight" in theirs:
            fans = {name: w for name, w in theirs.items() if name.startswith("mlp.fan_")}
            block |= {f"ff_fan_{name[8]}.input_linear.{name[10:]}": w for name, w in fans.items()}
        else:
            block["ff_proj.weight"] = torch.cat([theirs["mlp.up_proj.weight"], theirs["mlp.gate_proj.weight"]])
            block["ff_out.weight"] = theirs["mlp.down_proj.weight"]
        is_fan = "self_attn.fan.weight" in theirs
        projections = [theirs[name] for part in "qkv" if (name := f"self_attn.{part}_proj.weight") in theirs]
        block["att_proj.linear.weight" if is_fan else "att_proj.weight"] = torch.cat(projections)
        for old, new in (("fan", "att_proj.fanlayer.input_linear"), ("v_fan", "v_fan.input_linear")):
            for kind in ("weight", "bias"):
                if f"self_attn.{old}.{kind}" in theirs:
                    block[f"{new}.{kind}"] = theirs[f"self_attn.{old}.{kind}"]
        block |= {
            f"{part}_norm.weight": w for part in "qk" if (w := theirs.get(f"self_attn.{part}_norm.weight")) is not None
        }
        own |= {f"transformer.blocks.{layer}.{name}": weight for name, weight in block.items()}
    return own


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _fan(block: Mapping[str, Tensor], name: str, x: Tensor, width: int, gelu: bool) -> Tensor:
    """[cos p | sin p | g]: of P + G rows with 2 P + G = width, P are `width` less the rows."""
    rows = x @ block[f"{name}.input_linear.weight"].T
    if f"{name}.input_linear.bias" in block:
        rows = rows + block[f"{name}.input_linear.bias"]
    periodic = width - rows.shape[-1]
    phase, linear = rows[..., :periodic], rows[..., periodic:]
    return torch.cat([phase.cos(), phase.sin(), F.gelu(linear) if gelu else linear], -1)


def _attention(block: Mapping[str, Tensor], x: Tensor, heads: int, gelu: bool, epsilon: float) -> Tensor:
    width = x.shape[-1]
    is_fan = "att_proj.fanlayer.input_linear.weight" in block
    x_f = _fan(block, "att_proj.fanlayer", x, width, gelu) if is_fan else x
    projected = x_f @ block["att_proj.linear.weight" if is_fan else "att_proj.weight"].T
    if "v_fan.input_linear.weight" in block:  # only queries and keys are projected
        query, key = projected.split([width, projected.shape[-1] - width], -1)
        value = _fan(block, "v_fan", x, key.shape[-1], gelu)
    else:
        shared = (projected.shape[-1] - width) // 2
        query, key, value = projected.split([width, shared, shared], -1)
    q, k, v = (part.unflatten(-1, (-1, width // heads)).transpose(1, 2) for part in (query, key, value))
    if "q_norm.weight" in block:  # of each head, for which the authors have no names
        q, k = (_norm(part, block[f"{name}_norm.weight"], epsilon) for name, part in (("q", q), ("k", k)))
    k, v = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (_rotate(k), v))
    scores = _rotate(q) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return context.transpose(1, 2).flatten(2) @ block["attn_out.weight"].T


def _rotate(x: Tensor) -> Tensor:
    """Pairs (i, i + d/2) of each head, turned by position * 10000^(-2i/d)."""
    size = x.shape[-1]
    frequencies = 10_000 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequencies).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


def _mlp(block: Mapping[str, Tensor], x: Tensor, gelu: bool) -> Tensor:
    if "ff_fan_1.input_linear.weight" in block:  # two FAN layers, for which the authors have no names
        inner = block["ff_fan_2.input_linear.weight"].shape[1]
        return _fan(block, "ff_fan_2", _fan(block, "ff_fan_1", x, inner, gelu), x.shape[-1], gelu)
    up, gate = (x @ block["ff_proj.weight"].T).chunk(2, -1)
    return (F.silu(gate) * up) @ block["ff_out.weight"].T


def train_plain(
    weights: dict[str, Tensor], stream: Tensor, *, heads: int, lr: float, dtype: torch.dtype, gelu: bool = False
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of training on `stream` [steps, b, s + 1] by the reference's recipe."""
    trained = {name: weight.to(dtype).clone().requires_grad_() for name, weight in weights.items()}
    decayed = [w for name, w in trained.items() if w.ndim == 2 and "wte" not in name]
    others = [w for name, w in trained.items() if not (w.ndim == 2 and "wte" not in name)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-5)
    losses, norms = [], []
    for batch in stream:
        optimizer.zero_grad()
        logits = plain_logits(trained, batch[:, :-1], heads=heads, gelu=gelu)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms, {name: weight.detach() for name, weight in trained.items()}
