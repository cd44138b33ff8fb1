"""Configuration of FANformer for transformers.

This file and `modeling_fanformer.py` are copied verbatim into every export, so they import only torch and transformers.
"""

from typing import Any, ClassVar, NamedTuple

import transformers

OLDEST_TRANSFORMERS = "5.4"  # 5.3 fails in its masks; generation was tested up to 5.24
_installed, _oldest = (
    tuple(map(int, version.split(".")[:2])) for version in (transformers.__version__, OLDEST_TRANSFORMERS)
)
if _installed < _oldest:  # checked in the file that transformers reads first: the others import what 5.3 lacks
    raise ImportError(
        f"FANformer needs transformers {OLDEST_TRANSFORMERS} or later, and {transformers.__version__} is installed; "
        "run pip install --upgrade transformers"
    )

FAN_ACTIVATIONS = ("none", "gelu")
# How transformers splits attention and SwiGLU over ranks. Every rank keeps the whole FAN map: its rows are [p | g], and
# a plain split would give one rank p and another g.
TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# Every rank has the same norm of heads, and computes a gradient from a part of the heads, so gradients are summed.
HEAD_NORMS_TP_PLAN = {f"layers.*.self_attn.{part}_norm": "replicated_with_grad_allreduce" for part in "qk"}
# Values that are a FAN output are whole on every rank, so every rank attends with all heads, and queries are gathered.
OWN_VALUES_TP_PLAN = {
    **{name: style for name, style in TP_PLAN.items() if not name.endswith("v_proj")},
    "layers.*.self_attn.q_proj": "colwise_gather_output",
    "layers.*.self_attn.k_proj": "colwise_gather_output",
    "layers.*.self_attn.o_proj": "rowwise_split_input",
}
# Every rank keeps the whole FAN layers in place of the MLP.
FFN_TP_PLAN = {name: style for name, style in TP_PLAN.items() if ".mlp." not in name}


class Placement(NamedTuple):
    """Properties of a configuration that depend on the placement of FAN."""

    tp_plan: dict[str, str] = TP_PLAN
    has_v_p_ratio: bool = False  # whether the values are the output of a FAN projection


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
        ValueError: a field breaks a rule, which the message names.
    """

    model_type: ClassVar[str] = "fanformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    base_model_tp_plan = TP_PLAN
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50_280  # token ids, without padding
    hidden_size: int = 2048
    intermediate_size: int = 8192  # inner width of SwiGLU; with `fan_placement` ffn, of the first FAN layer's output
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None  # None: as many as query heads
    max_position_embeddings: int = 2048  # sequence length in training; rotary positions continue beyond it
    rms_norm_eps: float = 1e-6
    rope_parameters: Any = None
    """Rotary positions, as in transformers' models: `rope_theta` (10,000), `rope_type` and the keys of that type. Older
    exports have the fields `rope_theta` and `rope_scaling` instead."""
    p_ratio: float = 0.25
    """Periodic share of the hidden size, in [0, 0.5]: int(p_ratio * hidden_size) rows of W are p. With `fan_placement`
    ffn it is the share of each FAN layer's output."""
    fan_activation: str = "none"  # the activation of g: `none` or `gelu`
    fan_bias: bool = True  # whether there is b, on all rows
    fan_placement: str = "qkv"
    """`qkv`: queries, keys and values are projected from FAN's output; `qk_and_v`: queries and keys are, and the values
    are the output of another FAN projection; `ffn`: two FAN projections in place of SwiGLU, and a Transformer's
    attention; `none`: an ordinary Transformer."""
    v_p_ratio: float | None = None  # of the values' FAN projection (`qk_and_v`), a share of their width; None: p_ratio
    use_qk_norm: bool = False  # an RMSNorm on each head of queries and keys, before rotary positions
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.fan_placement in tuple(FAN_PLACEMENTS):  # others, even unhashable ones, are left to `_problems`
            placement = FAN_PLACEMENTS[self.fan_placement]
            has_split_norms = self.use_qk_norm and not placement.has_v_p_ratio  # else a rank has all heads
            self.base_model_tp_plan = {**placement.tp_plan, **(HEAD_NORMS_TP_PLAN if has_split_norms else {})}
        super().__post_init__(**kwargs)
        problems = self._problems()
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_dim(self) -> int:
        """Return the size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def value_p_ratio(self) -> float:
        """Return `v_p_ratio`, or `p_ratio` if that is None."""
        return self.p_ratio if self.v_p_ratio is None else self.v_p_ratio

    def _problems(self) -> list[str]:
        problems = []
        if self.hidden_size % (2 * self.num_attention_heads):
            problems.append(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_attention_heads "
                f"{self.num_attention_heads}, since rotary positions rotate pairs"
            )
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            problems.append(
                f"num_key_value_heads {self.num_key_value_heads} must divide num_attention_heads "
                f"{self.num_attention_heads}"
            )
        for name in ("p_ratio", "v_p_ratio"):
            ratio = getattr(self, name)
            if ratio is not None and not 0.0 <= ratio <= 0.5:
                problems.append(f"{name} {ratio} must lie in [0, 0.5], since both cos and sin of p are used")
        if self.fan_activation not in FAN_ACTIVATIONS:
            problems.append(f"fan_activation {self.fan_activation!r} must be one of {FAN_ACTIVATIONS}")
        if self.fan_placement not in tuple(FAN_PLACEMENTS):
            problems.append(f"fan_placement {self.fan_placement!r} must be one of {tuple(FAN_PLACEMENTS)}")
        placements = [name for name, placement in FAN_PLACEMENTS.items() if placement.has_v_p_ratio]
        if self.v_p_ratio is not None and self.fan_placement not in placements:
            problems.append(
                f"v_p_ratio {self.v_p_ratio} applies only to fan_placement "
                f"{' or '.join(map(repr, placements))}, not {self.fan_placement!r}"
            )
        return problems
