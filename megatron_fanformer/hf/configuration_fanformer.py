"""Configuration of FANformer for transformers.

This file and `modeling_fanformer.py` are copied verbatim into every exported folder, so they import torch and
transformers alone.
"""

import warnings
from typing import Any, ClassVar, NamedTuple

import transformers

OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = "5.4", "5.24"
"""The minor versions that generation was tested with; 5.3 fails in its masks."""
_installed, _oldest, _newest = (
    tuple(map(int, version.split(".")[:2]))
    for version in (transformers.__version__, OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS)
)
if _installed < _oldest:  # of an export this file is read first: before anything that older versions lack
    raise ImportError(
        f"FANformer needs transformers {OLDEST_TRANSFORMERS} or later, and {transformers.__version__} is installed; "
        "run pip install --upgrade transformers"
    )
if _installed > _newest:
    warnings.warn(
        f"transformers {transformers.__version__} is newer than {NEWEST_TRANSFORMERS}, the newest that FANformer was "
        "tested with; if it generates nonsense, compare with use_cache=False, or install the tested one",
        stacklevel=2,
    )

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402 (after the check of the version)

FAN_ACTIVATIONS = ("none", "gelu")
# For attention and SwiGLU only: FAN's rows are [p | g], and a plain split would give one rank p and another g, so every
# rank keeps the whole map.
TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# Weights of the heads' norms are whole on every rank, and their gradients are of its own heads.
HEAD_NORMS_TP_PLAN = {f"layers.*.self_attn.{part}_norm": "replicated_with_grad_allreduce" for part in "qk"}
# Values straight out of FAN are whole on every rank, so all attention heads are too: only the matrices are split.
OWN_VALUES_TP_PLAN = {
    **{name: style for name, style in TP_PLAN.items() if not name.endswith("v_proj")},
    "layers.*.self_attn.q_proj": "colwise_gather_output",
    "layers.*.self_attn.k_proj": "colwise_gather_output",
    "layers.*.self_attn.o_proj": "rowwise_split_input",
}
# FAN layers in place of the MLP are whole on every rank, as all FAN maps are.
FFN_TP_PLAN = {name: style for name, style in TP_PLAN.items() if ".mlp." not in name}


class Placement(NamedTuple):
    """Properties of a configuration that follow from the placement of FAN."""

    tp_plan: dict[str, str] = TP_PLAN
    has_v_p_ratio: bool = False
    """Whether the values have a FAN projection of their own."""


FAN_PLACEMENTS = {
    "qkv": Placement(),
    "qk_and_v": Placement(OWN_VALUES_TP_PLAN, has_v_p_ratio=True),
    "ffn": Placement(FFN_TP_PLAN),
    "none": Placement(),
}


class FANformerConfig(transformers.PreTrainedConfig):
    """Shape of a decoder-only language model whose attention input passes through a FAN projection.

    Pre-norm RMSNorm, rotary positions, SwiGLU, no biases except FAN's. The FAN projection maps the normed
    hidden state x, `hidden_size` wide, to [cos p, sin p, g] with [p | g] = W x + b, of the same width.

    Raises:
        ValueError: a value that no FANformer can have; the message names the rule.
    """

    model_type: ClassVar[str] = "fanformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    base_model_tp_plan = TP_PLAN
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50_280
    """Token ids; rows of the embedding, without padding."""
    hidden_size: int = 2048
    """Width of the residual stream."""
    intermediate_size: int = 8192
    """Inner width of SwiGLU; at `fan_placement` ffn of the first FAN layer's output."""
    num_hidden_layers: int = 16
    """Decoder layers."""
    num_attention_heads: int = 16
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; None for as many as query heads."""
    max_position_embeddings: int = 2048
    """Sequence length of the training, in tokens; rotary positions continue beyond it."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    rope_parameters: Any = None
    """Rotary positions as transformers' models have them: `rope_theta` (10,000), `rope_type` and the keys of that type;
    older exports have `rope_theta` and `rope_scaling` beside each other."""
    p_ratio: float = 0.25
    """Share of the hidden size that is periodic, in [0, 0.5]; int(p_ratio * hidden_size) rows of W are p. (At
    `fan_placement` ffn it is the share of each FAN layer's output.)"""
    fan_activation: str = "none"
    """Applied to g alone: `none` or `gelu`."""
    fan_bias: bool = True
    """Whether the FAN projection has a bias b, on all rows."""
    fan_placement: str = "qkv"
    """`qkv`: queries, keys and values are projected from FAN's output; `qk_and_v`: queries and keys are, and the values
    are the output of a FAN projection of their own; `ffn`: two FAN projections in place of SwiGLU, and attention as a
    Transformer's; `none`: an ordinary Transformer."""
    v_p_ratio: float | None = None
    """p_ratio of the values' own FAN projection (placement `qk_and_v`), a share of their width; None for p_ratio."""
    use_qk_norm: bool = False
    """Whether each head of queries and keys passes through an RMSNorm, in front of its rotary positions."""
    tie_word_embeddings: bool = True
    """Whether the output head is the embedding."""
    use_cache: bool = True
    """Whether keys and values of past tokens are kept while generating."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.fan_placement in tuple(FAN_PLACEMENTS):
            placement = FAN_PLACEMENTS[self.fan_placement]
            has_split_norms = self.use_qk_norm and not placement.has_v_p_ratio
            self.base_model_tp_plan = {**placement.tp_plan, **(HEAD_NORMS_TP_PLAN if has_split_norms else {})}
        super().__post_init__(**kwargs)
        problems = self._problems()
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def value_p_ratio(self) -> float:
        """`v_p_ratio` resolved."""
        return self.p_ratio if self.v_p_ratio is None else self.v_p_ratio

    def _problems(self) -> list[str]:
        found = []
        if self.hidden_size % (2 * self.num_attention_heads):
            found.append(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_attention_heads "
                f"{self.num_attention_heads}, since rotary positions rotate pairs"
            )
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            found.append(
                f"num_key_value_heads {self.num_key_value_heads} must divide num_attention_heads "
                f"{self.num_attention_heads}"
            )
        for name in ("p_ratio", "v_p_ratio"):
            ratio = getattr(self, name)
            if ratio is not None and not 0.0 <= ratio <= 0.5:
                found.append(f"{name} {ratio} must lie in [0, 0.5], since both cos and sin of p are used")
        if self.fan_activation not in FAN_ACTIVATIONS:
            found.append(f"fan_activation {self.fan_activation!r} must be one of {FAN_ACTIVATIONS}")
        if self.fan_placement not in tuple(FAN_PLACEMENTS):
            found.append(f"fan_placement {self.fan_placement!r} must be one of {tuple(FAN_PLACEMENTS)}")
        of_values = [name for name, placement in FAN_PLACEMENTS.items() if placement.has_v_p_ratio]
        if self.v_p_ratio is not None and self.fan_placement not in of_values:
            found.append(
                f"v_p_ratio {self.v_p_ratio} applies only to fan_placement {' or '.join(map(repr, of_values))}, not "
                f"{self.fan_placement!r}"
            )
        rope_type = self.rope_parameters["rope_type"]
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            found.append(
                f"rope_parameters has rope_type {rope_type!r}, which must be one of default, "
                f"{', '.join(ROPE_INIT_FUNCTIONS)}"
            )
        return found
