"""A FANformer in plain PyTorch, written from the paper's equations and the reference's facts alone.

Takes the reference's own names and layout of weights; shares no code with the package, so that both can be held
against each other. Any floating-point type.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_logits(weights: dict[str, Tensor], tokens_bs: Tensor, *, heads: int, epsilon: float = 1e-6) -> Tensor:
    """Logits [b, s, v] of tokens [b, s]."""
    layers = 1 + max(int(name.split(".")[2]) for name in weights if ".blocks." in name)
    x = weights["transformer.wte.weight"][tokens_bs]
    for layer in range(layers):
        block = {name.split(".", 3)[3]: w for name, w in weights.items() if f".blocks.{layer}." in name}
        x = x + _attention(block, _norm(x, block["attn_norm.weight"], epsilon), heads)
        x = x + _mlp(block, _norm(x, block["ff_norm.weight"], epsilon))
    head = weights.get("transformer.ff_out.weight", weights["transformer.wte.weight"])
    return _norm(x, weights["transformer.ln_f.weight"], epsilon) @ head.T


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _attention(block: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    if "att_proj.fanlayer.input_linear.weight" in block:
        pre = x @ block["att_proj.fanlayer.input_linear.weight"].T + block["att_proj.fanlayer.input_linear.bias"]
        periodic = x.shape[-1] - pre.shape[-1]  # rows are P + G = h - P
        phase, linear = pre[..., :periodic], pre[..., periodic:]
        x = torch.cat([phase.cos(), phase.sin(), linear], -1)
        projected = x @ block["att_proj.linear.weight"].T
    else:
        projected = x @ block["att_proj.weight"].T
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    scores = _rotate(q) @ _rotate(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return context.transpose(1, 2).flatten(2) @ block["attn_out.weight"].T


def _rotate(x: Tensor) -> Tensor:
    size = x.shape[-1]
    frequencies = 10_000 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequencies).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


def _mlp(block: dict[str, Tensor], x: Tensor) -> Tensor:
    up, gate = (x @ block["ff_proj.weight"].T).chunk(2, -1)
    return (F.silu(gate) * up) @ block["ff_out.weight"].T


def train_plain(
    weights: dict[str, Tensor], stream: Tensor, *, heads: int, lr: float, dtype: torch.dtype
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
        logits = plain_logits(trained, batch[:, :-1], heads=heads)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms, {name: weight.detach() for name, weight in trained.items()}
