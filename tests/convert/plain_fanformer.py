"""Random weights of every variant of a FANformer, and checkpoints of them as the authors lay them out.

From the facts in tests/reference/README.md alone: nothing of the package is imported, and all names of tensors and
fields are written out here again.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, LAYERS, FFN = 32, 4, 2, 48
HEAD_SIZE = HIDDEN // HEADS
EPSILON = 1e-6


@dataclass(frozen=True)
class Variant:
    """What may differ between two FANformers of one size."""

    placement: str = "qkv"
    p_ratio: float = 0.25
    v_p_ratio: float | None = None
    gelu: bool = False
    groups: int = HEADS
    tied: bool = True
    bias: bool = True
    tokens: int = 90
    rows: int = 128

    @property
    def value_size(self) -> int:
        return self.groups * HEAD_SIZE


BASE = Variant()
VARIANTS = {
    "fanformer": BASE,
    "untied": replace(BASE, tied=False),
    "no bias": replace(BASE, bias=False),
    "grouped queries": replace(BASE, groups=2),
    "multi-query": replace(BASE, groups=1, tied=False),
    "p 0.125": replace(BASE, p_ratio=0.125),
    "p 0.45": replace(BASE, p_ratio=0.45),
    "p 0.5": replace(BASE, p_ratio=0.5),
    "ATL": replace(BASE, p_ratio=0.0),
    "ATM": replace(BASE, p_ratio=0.0, gelu=True),
    "original FAN": replace(BASE, gelu=True),
    "transformer": replace(BASE, placement="none"),
    "transformer, grouped": replace(BASE, placement="none", groups=2, tied=False),
    "qk and v": replace(BASE, placement="qk_and_v"),
    "qk and v, grouped": replace(BASE, placement="qk_and_v", groups=2, gelu=True, bias=False),
    "qk and v, two ratios": replace(BASE, placement="qk_and_v", v_p_ratio=0.125, tied=False),
    "no padding": replace(BASE, tokens=64, rows=64),
    "odd padding": replace(BASE, tokens=90, rows=94, tied=False),
}


def periodic(p_ratio: float, width: int) -> int:
    return int(p_ratio * width)


def fan_shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Of a block, by the ends of their names."""
    if variant.placement == "none":
        return {}
    maps = {"att_proj.fanlayer.input_linear": HIDDEN - periodic(variant.p_ratio, HIDDEN)}
    if variant.placement == "qk_and_v":
        own = variant.p_ratio if variant.v_p_ratio is None else variant.v_p_ratio
        maps["v_fan.input_linear"] = variant.value_size - periodic(own, variant.value_size)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, HIDDEN) for name, rows in maps.items()}
    return shapes | ({f"{name}.bias": (rows,) for name, rows in maps.items()} if variant.bias else {})


def block_shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    projections = 1 if variant.placement == "qk_and_v" else 2
    att_proj = "att_proj" if variant.placement == "none" else "att_proj.linear"
    return fan_shapes(variant) | {
        "attn_norm.weight": (HIDDEN,),
        f"{att_proj}.weight": (HIDDEN + projections * variant.value_size, HIDDEN),
        "attn_out.weight": (HIDDEN, HIDDEN),
        "ff_norm.weight": (HIDDEN,),
        "ff_proj.weight": (2 * FFN, HIDDEN),
        "ff_out.weight": (HIDDEN, FFN),
    }


def random_weights(variant: Variant, seed: int = 0) -> dict[str, Tensor]:
    """Trained-looking: norms are not 1, biases are not 0, and padding rows are not 0 either."""
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (variant.rows, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"transformer.blocks.{layer}.{name}": shape for name, shape in block_shapes(variant).items()}
    shapes["transformer.ln_f.weight"] = (HIDDEN,)
    if not variant.tied:
        shapes["transformer.ff_out.weight"] = (variant.rows, HIDDEN)
    generator = torch.Generator().manual_seed(seed)
    return {name: _draw(name, shape, generator) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.5 * drawn if name.endswith("bias") else 1 + 0.2 * drawn
    return 1.5 * drawn / math.sqrt(shape[1])


def fields(variant: Variant) -> dict[str, Any]:
    """The authors' configuration; p_ratio is left out, as in every published one."""
    return {
        "block_type": "fanformer" if variant.placement == "qk_and_v" else "sequential",
        "d_model": HIDDEN,
        "n_heads": HEADS,
        "n_kv_heads": variant.groups,
        "n_layers": LAYERS,
        "mlp_hidden_size": 2 * FFN,
        "activation_type": "swiglu",
        "use_ATF": variant.placement != "none",
        "attention_activation": "gelu" if variant.gelu else None,
        "rope": True,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "layer_norm_eps": EPSILON,
        "bias_for_layer_norm": False,
        "include_bias": False,
        "weight_tying": variant.tied,
        "vocab_size": variant.tokens,
        "embedding_size": variant.rows,
        "max_sequence_length": 64,
    }


def write(folder: Path, variant: Variant, weights: dict[str, Tensor] | None = None) -> Path:
    """A checkpoint as the authors release it; of random weights, unless they are given."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": fields(variant)}))
    save_file(random_weights(variant) if weights is None else weights, folder / "model.safetensors")
    return folder
