"""The shape of a FANformer, the paper's sizes by name, and the sections `precision` and `kernels`.

Source: "Reasoning is Periodicity?" (NeurIPS 2025), its section on experimental settings, and the sizes of the
authors' published configurations. Field names are Megatron's where Megatron has the field.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megatron_fanformer.errors import InputError, broken_fields
from megatron_fanformer.model.placements import PLACEMENTS, TRANSFORMER, Placement, PlacementName
from megatron_fanformer.model.rope_scaling import RopeScalingConfig

if TYPE_CHECKING:
    import torch

PAPER_VOCAB_SIZE = 50_280  # allenai/gpt-neox-olmo-dolma-v1_5
PAPER_P_RATIO = 0.25
FFN_MULTIPLE = 64  # every usual tensor parallel size divides it

LARGEST_SIZE = 1 << 30  # the bytes of a tensor of two such sizes still fit into 64 bits


@dataclass(frozen=True, kw_only=True)
class FANConfig:
    """The FAN projection, usually in front of the attention's QKV: X_F = [cos p, sin p, g] with [p | g] = W X + b."""

    p_ratio: float = PAPER_P_RATIO
    """Periodic share of the hidden size, in [0, 0.5]: int(p_ratio · hidden_size) rows are `p`."""
    activation: Literal["none", "gelu"] = "none"
    """Activation of the linear rows `g`; `gelu` is the original FAN."""
    bias: bool = True
    """Whether the FAN map has a bias."""
    placement: PlacementName = "qkv"
    """`qkv`: X_F gives Q, K and V (the paper's); `qk_and_v`: Q and K, and V comes from a FAN layer of its own; `ffn`:
    two FAN layers replace the feed-forward network (docs/experiments.md#variants); `none`: a Transformer."""
    v_p_ratio: float | None = None
    """With `qk_and_v`: p_ratio of the values' FAN layer; null: `p_ratio`."""

    @property
    def value_p_ratio(self) -> float:
        """Return the p_ratio of the values' FAN layer."""
        return self.p_ratio if self.v_p_ratio is None else self.v_p_ratio

    def outputs(self, hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return (width, p_ratio) of each output of attention's FAN map: X_F, and the values if FAN makes them."""
        return PLACEMENTS[self.placement].outputs(self, hidden_size, value_size)

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        demand = (
            f"lie in [0, 0.5], since cos and sin of the periodic rows both enter X_F (the paper uses {PAPER_P_RATIO})"
        )
        problems = broken_fields("model.fan", self, demand, lambda value: not 0 <= value <= 0.5, "p_ratio", "v_p_ratio")
        if self.v_p_ratio is not None and not PLACEMENTS[self.placement].has_own_values:
            problems.append(
                f"model.fan.v_p_ratio is {self.v_p_ratio}, but at placement {self.placement} the values have no FAN "
                "layer of their own; set it to null, or placement to qk_and_v"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class FANformerConfig:
    """A decoder-only model: pre-norm RMSNorm, RoPE, SwiGLU, attention whose QKV input passes through FAN."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Inner width of the SwiGLU (d_ff); at placement `ffn`, of the first FAN layer."""
    num_attention_heads: int
    """Query heads; their size, `hidden_size` / `num_attention_heads`, is even."""
    num_query_groups: int | None = None
    """Key and value heads; null: as many as query heads."""
    vocab_size: int
    """Token ids, before padding."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded to a multiple of this."""
    seq_length: int = 2048
    """Tokens per training sample."""
    rotary_base: int = 10_000
    """Base of the rotary positions."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Rotary positions beyond the length of the first training."""
    layernorm_epsilon: float = 1e-6
    """Epsilon of every RMSNorm."""
    qk_layernorm: bool = False
    """Whether each head of queries and keys passes through an RMSNorm, in front of its rotary positions
    (docs/recipe.md#norms-of-queries-and-keys)."""
    untie_embeddings_and_output_weights: bool = False
    """Whether the output head has a weight of its own."""
    fan: FANConfig = field(default_factory=FANConfig)
    """The FAN projection."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "FANformerConfig":
        """Return the configuration of a checkpoint, whose values `dataclasses.asdict` returned when it was saved.

        Raises InputError, with one line for each problem, if no model can be built from the values.
        """
        from megatron_fanformer.configuration import build  # here: beside stock Megatron-LM, msgspec may be missing

        config = build(values, cls, "model.")
        if problems := config.problems():
            raise InputError("\n".join(problems))
        return config

    def stated_problems(self) -> list[str]:
        """Return the fields of a wrong type, which another program's file may state; or else, `problems()`."""
        from megatron_fanformer.configuration import value_problems

        return value_problems(dataclasses.asdict(self), type(self), "model.") or self.problems()

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, and width of the logits."""
        return -(-self.vocab_size // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by

    @property
    def kv_channels(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Return the number of key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def placement(self) -> Placement:
        """Return the placement that `fan.placement` names."""
        return PLACEMENTS[self.fan.placement]

    @property
    def has_fan(self) -> bool:
        """Return whether a FAN map stands in front of attention."""
        return self.placement.is_in_attention

    @property
    def periodic_units(self) -> int:
        """Periodic rows of a layer's FAN map in front of attention, for X_F and the values; 0 without the map."""
        outputs = self.fan.outputs(self.hidden_size, self.value_size)
        return sum(int(p_ratio * width) for width, p_ratio in outputs)

    @property
    def value_size(self) -> int:
        """Width of all key or value heads together."""
        return self.query_groups * self.kv_channels

    @property
    def fan_rows(self) -> int:
        """Rows of a layer's FAN map in front of attention; 0 without the map. A periodic row makes cos p and sin p."""
        return sum(width for width, _ in self.fan.outputs(self.hidden_size, self.value_size)) - self.periodic_units

    @property
    def qkv_rows(self) -> int:
        """Rows of the matrix of Q, K and V, or of Q and K alone (placement qk_and_v)."""
        return self.placement.qkv_rows(self)

    @property
    def ffn_maps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of the feed-forward network's two matrices."""
        return self.placement.ffn_maps(self)

    @property
    def num_parameters(self) -> int:
        """Number of weights of the model, with the vocabulary's padding; tied weights count once."""
        embeddings = self.padded_vocab_size * self.hidden_size * (1 + self.untie_embeddings_and_output_weights)
        return embeddings + self.num_layers * self.placement.parameters(self) + self.hidden_size  # the final norm

    def resolved_fields(self) -> dict[str, Any]:
        """Return the fields by dotted name, with query groups and padding resolved: equal models have equal fields."""
        from megatron_fanformer.configuration import flatten  # as in `from_dict`

        fields = flatten(dataclasses.asdict(dataclasses.replace(self, num_query_groups=self.query_groups)))
        del fields["make_vocab_size_divisible_by"]
        return {**fields, "padded_vocab_size": self.padded_vocab_size}

    def problems(self) -> list[str]:
        """Return the rules that this shape breaks, one line each; an empty list if it can be built."""
        names = [name for name, kind in type(self).__annotations__.items() if kind is int]  # of sizes
        at_most = f"be at most {LARGEST_SIZE}, beyond which no tensor's bytes can be counted"
        problems = [
            *broken_fields("model", self, "be at least 1", lambda value: value < 1, *names),
            *broken_fields("model", self, at_most, lambda value: value > LARGEST_SIZE, *names, "num_query_groups"),
            *broken_fields("model", self, "be at least 1, or null", lambda value: value < 1, "num_query_groups"),
        ]
        if problems:  # the rules between fields need sound sizes
            return problems + self.fan.problems()
        if self.hidden_size % self.num_attention_heads:
            problems.append(
                f"model.hidden_size {self.hidden_size} is not a multiple of model.num_attention_heads "
                f"{self.num_attention_heads}; choose a number of heads that divides it"
            )
        elif self.kv_channels % 2:
            problems.append(
                f"the head size is {self.kv_channels} (hidden_size / num_attention_heads), but RoPE rotates pairs and "
                "needs an even one; change model.num_attention_heads"
            )
        if self.num_attention_heads % self.query_groups:
            problems.append(
                f"model.num_query_groups {self.query_groups} does not divide model.num_attention_heads "
                f"{self.num_attention_heads}; choose a divisor"
            )
        problems += broken_fields("model", self, "lie in [0, 1]", lambda eps: not 0 <= eps <= 1, "layernorm_epsilon")
        if self.rope_scaling.rope_type == "yarn" and self.rotary_base == 1:
            problems.append("model.rotary_base is 1, by which yarn cannot tell frequencies apart; raise it")
        return problems + self.rope_scaling.problems() + self.fan.problems()


def p_ratio_of(periodic_size: int, hidden_size: int) -> float:
    """Return the p_ratio that gives `periodic_size` rows: the quotient, or the next float if rounding costs a row."""
    p_ratio = periodic_size / hidden_size
    return p_ratio if int(p_ratio * hidden_size) == periodic_size else math.nextafter(p_ratio, 1.0)


def nearest_p_ratio(p_ratio: float, width: int, ranks: int) -> float | None:
    """Return the nearest p_ratio at which periodic and linear rows are multiples of `ranks`; None if there is none."""
    if width % ranks:  # 2 periodic + linear = width: a sum of multiples of `ranks` is one, too
        return None
    periodic = round(int(p_ratio * width) / ranks) * ranks
    return p_ratio_of(min(periodic, width // 2 // ranks * ranks), width)  # p_ratio is at most 0.5


def as_transformer(config: FANformerConfig) -> FANformerConfig:
    """Return the model without FAN: the Transformer of the same shape."""
    return dataclasses.replace(config, fan=dataclasses.replace(config.fan, placement=TRANSFORMER))


def with_same_parameters(config: FANformerConfig, multiple: int = FFN_MULTIPLE) -> FANformerConfig:
    """Return the model with d_ff changed so that it has as many parameters as the Transformer of its original shape.

    At p_ratio 0.25 the 1B model goes from 8192 to the paper's 7680. At placement `ffn` d_ff grows: two FAN layers have
    fewer weights than a SwiGLU of the same d_ff. d_ff is rounded to a multiple of `multiple`.
    """
    transformer, placement = as_transformer(config), config.placement
    missing = transformer.placement.parameters(transformer) - placement.parameters(config)  # in each layer
    exact = config.ffn_hidden_size + missing / placement.parameters_per_ffn_unit(config)
    return dataclasses.replace(config, ffn_hidden_size=max(1, round(exact / multiple)) * multiple)


def _paper_size(num_layers: int, hidden_size: int, heads: int, *, untied: bool) -> FANformerConfig:
    return FANformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=heads,
        vocab_size=PAPER_VOCAB_SIZE,
        untie_embeddings_and_output_weights=untied,
    )


_PAPER_SIZES = {
    "fanformer-300m": _paper_size(16, 1024, 16, untied=False),
    "fanformer-600m": _paper_size(16, 1536, 16, untied=False),
    "fanformer-1b": _paper_size(16, 2048, 16, untied=False),
    "fanformer-3b": _paper_size(24, 2560, 20, untied=True),
    "fanformer-7b": _paper_size(24, 4096, 32, untied=True),
}

PRESETS: dict[str, FANformerConfig] = {
    **_PAPER_SIZES,
    **{f"{name}-transformer": as_transformer(size) for name, size in _PAPER_SIZES.items()},
    **{f"{name}-same-params": with_same_parameters(size) for name, size in _PAPER_SIZES.items()},
}
"""The paper's sizes, each with its Transformer twin and its variant with the twin's parameter count."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The number formats of weights, activations and matrix products."""

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of weights and activations; `bf16` keeps float32 main weights; `auto`: `bf16` on GPUs and on CPUs
    with AMX or AVX512-BF16, else `fp32`."""
    grad_reduce_in_fp32: bool = True
    """Gradients are added up over micro batches, and reduced over replicas, in float32; false: in the format of
    weights. In bf16 that saves 2 bytes a parameter and half of the reduction's traffic
    (docs/parallelism.md#gradients-in-bf16)."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Matrix products in FP8 (docs/gpu.md#fp8), with bf16 weights: all `e4m3`, or `hybrid`, with e5m2 gradients."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """Scales come from the current tensor (`tensorwise`), past steps (`delayed`), each block of 128 (`blockwise`), or
    each block of 32 in hardware (`mxfp8`, Blackwell)."""
    fp8_amax_history_len: int = 1024
    """With `delayed`: micro batches in the history."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """With `delayed`: whether the scale follows the history's largest value, or its newest."""
    first_last_layers_bf16: bool = False
    """Keep layers at both ends out of FP8 (not with `delayed`)."""
    num_layers_at_start_in_bf16: int = 1
    """With `first_last_layers_bf16`: number of layers at the start."""
    num_layers_at_end_in_bf16: int = 1
    """With `first_last_layers_bf16`: number of layers at the end."""
    fp8_fan: bool = False
    """The FAN map in FP8 too: phases are over ten times less exact (docs/fp8-phase.md)."""

    def problems(self) -> list[str]:
        """Return the rules that this configuration breaks, one line each."""
        in_bf16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        problems = [
            *broken_fields("precision", self, "be at least 1", lambda value: value < 1, "fp8_amax_history_len"),
            *broken_fields("precision", self, "be at least 0", lambda value: value < 0, *in_bf16),
        ]
        if self.fp8 is None:
            stray = [name for name in ("fp8_fan", "first_last_layers_bf16") if getattr(self, name)]
            return problems + [
                f"precision.{name} is true without precision.fp8; set {name} to false, or set precision.fp8"
                for name in stray
            ]
        if self.dtype == "fp32":
            problems.append(
                f"precision.fp8 is {self.fp8} with precision.dtype fp32, but FP8 products need bf16 weights; set the "
                "latter to bf16, or the former to null"
            )
        if self.first_last_layers_bf16 and self.fp8_recipe == "delayed":
            problems.append(
                "precision.first_last_layers_bf16 is true with precision.fp8_recipe delayed, whose scales are updated "
                "over all layers at once; choose the recipe tensorwise, or set it to false"
            )
        return problems


TransformerImpl = Literal["auto", "local", "transformer_engine"]

LOGITS_BYTES_ON_CPU, LOGITS_BYTES_ON_GPU = 200 * 2**20, 400 * 2**20
"""Bytes of logits that the loss head holds at a time. Every chunk of tokens reads and writes the whole gradient of the
weight, which must take little time beside the matrix products. Measured on a CPU in float32 (vocabulary 50304, width
512), chunks of 512 tokens cost 3% more than chunks of 1,024, and 64 tokens 50% more; in bf16 on AMX a step takes 2%
longer with 1,024 than with 2,048; a Hopper GPU's products in bf16 are so fast that it needs some 4,000 tokens."""
ALIGNED_TOKENS = 64  # chunks are multiples of it: matrix units prefer whole tiles


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Implementations that compute the layers."""

    transformer_impl: TransformerImpl = "auto"
    """Transformer Engine's layers, or megatron-core's and torch's; `auto`: the Engine on a GPU if it imports."""
    attention_backend: Literal["auto", "fused", "flash", "unfused"] = "auto"
    """Transformer Engine's attention: cuDNN's (`fused`), flash-attn's, or plain products; `auto`: Engine's choice."""
    fused_single_qkv_rope: bool = False
    """Rotate queries and keys within the QKV tensor (Transformer Engine; docs/performance.md#gpu)."""
    chunked_loss_head: bool = True
    """Compute logits, loss and gradients by chunks of tokens; false: Megatron's loss head, which keeps all logits."""
    loss_head_chunk_tokens: int | None = None
    """Tokens per chunk; null: 200 MiB of logits on a CPU, 400 MiB on a GPU."""
    cuda_graph_impl: Literal["none", "local"] = "none"
    """`local`: replay each layer as a CUDA graph (docs/gpu.md#cuda-graphs)."""
    gradient_accumulation_fusion: bool | None = None
    """Add weight gradients to their buffer inside the matrix product; null: in training, on a GPU only with
    Transformer Engine's layers or apex's `fused_weight_gradient_mlp_cuda`."""

    def loss_chunk_tokens(self, logit_columns: int, element_bytes: int, *, on_cpu: bool) -> int:
        """Return how many tokens the loss head takes at a time; `logit_columns` are those of one rank."""
        if self.loss_head_chunk_tokens is not None:
            return self.loss_head_chunk_tokens
        tokens = (LOGITS_BYTES_ON_CPU if on_cpu else LOGITS_BYTES_ON_GPU) // (logit_columns * element_bytes)
        return max(1, tokens if tokens < ALIGNED_TOKENS else tokens // ALIGNED_TOKENS * ALIGNED_TOKENS)  # whole tiles

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        demand = "be at least 1, or null"
        return broken_fields("kernels", self, demand, lambda value: value < 1, "loss_head_chunk_tokens")


DEFAULT_KERNELS = KernelsConfig()


def torch_dtype(name: str) -> "torch.dtype":
    """Return torch's type for `fp32` or `bf16`."""
    import torch  # its import takes seconds, and configurations are checked first

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
