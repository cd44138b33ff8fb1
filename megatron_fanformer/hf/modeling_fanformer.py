"""FANformer for transformers: forward, key/value cache, generation, gradient checkpointing.

Source: "Reasoning is Periodicity?" (NeurIPS 2025). This file and `configuration_fanformer.py` are copied verbatim into
every export, so they import only torch and transformers.

Shapes: b batch, s tokens, t tokens including those in the cache, h hidden size, n query heads, k key and value heads,
d head size, f inner width of the MLP, v vocabulary.
"""

import warnings
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_fanformer import FANformerConfig

CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""transformers' name of the key/value cache: `cache` from 5.24 on."""
PASSED_ON = {
    *TransformersKwargs.__annotations__,
    # Read by pipeline stages, by the loss, and by `generate` for stop strings.
    *("return_dict", "shift_labels", "ignore_index", "tokenizer"),
    # Continuous batching: read by its attention, and by its sampler.
    *("block_table", "read_index", "write_index", "max_seqlen_q", "max_seqlen_k"),
    *("logits_indices", "logits_processor_args"),
    *("attention_instances", "forward_batch"),  # read by the attention of vLLM and SGLang
}
"""Arguments that `forward` passes on to other code. It refuses all others, which would be ignored silently."""


class FANformerRMSNorm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., h]; the result has the dtype of `x`."""
        normed = x.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class FANActivation(nn.Module):
    """Maps [p | g] to [cos p, sin p, g], which is `width` wide; p is int(p_ratio * width) wide.

    The map to [p | g] is a separate `nn.Linear`, so that quantizers and adapters (peft) can replace it.
    """

    def __init__(self, config: FANformerConfig, width: int, p_ratio: float) -> None:
        super().__init__()
        periodic_size = int(p_ratio * width)
        self.sizes = [periodic_size, width - 2 * periodic_size]
        self.gelu = config.fan_activation == "gelu"

    def forward(self, pre_activation: Tensor) -> Tensor:
        """Map [p | g] to [cos p, sin p, g], [b, s, width]; cos and sin are computed in float32 for every dtype."""
        p, g = pre_activation.split(self.sizes, dim=-1)
        phase = p.float()
        activated = F.gelu(g) if self.gelu else g
        return torch.cat([phase.cos().to(g.dtype), phase.sin().to(g.dtype), activated], dim=-1)


class FANformerRotaryEmbedding(nn.Module):
    """Computes cos and sin of rotary positions; scaled positions follow transformers' formulas.

    The frequencies are not a buffer, which a cast of the model would round; they are computed anew in float32.
    """

    def __init__(self, config: FANformerConfig) -> None:
        super().__init__()
        self.config = copy(config)

    def frequencies(self, position_ids: Tensor) -> tuple[Tensor, float]:
        """Return the frequencies [d / 2], and the factor by which cos and sin are multiplied."""
        kind, device = self.config.rope_parameters["rope_type"], position_ids.device
        if kind == "default":
            exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=device)
            return 1.0 / self.config.rope_parameters["rope_theta"] ** (exponents / self.config.head_dim), 1.0
        lengths = {"seq_len": position_ids.max() + 1} if kind in ("dynamic", "longrope") else {}  # scale by length
        return ROPE_INIT_FUNCTIONS[kind](self.config, device, **lengths)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [b, s, d] for positions [b, s], in float32; `x` is unused: other models take its dtype."""
        frequencies, factor = self.frequencies(position_ids)
        half = position_ids[:, :, None].float() * frequencies
        angles = torch.cat([half, half], dim=-1)
        return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [b, n, s, d] by the angles of cos and sin [b, s, d], in float32; keep the dtype of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]).to(x.dtype)


def eager_attention_forward(
    module: "FANformerAttention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Unpack[TransformersKwargs],
) -> tuple[Tensor, Tensor]:
    """Attend with queries [b, n, s, d] to keys, values [b, k, t, d]; return [b, s, n, d] and weights [b, n, s, t]."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class FANformerAttention(nn.Module):
    """Self-attention of a Transformer; the classes below override how queries, keys and values are computed."""

    def __init__(self, config: FANformerConfig, layer_idx: int) -> None:
        super().__init__()
        heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = heads // key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True  # read by transformers' attention functions
        self.add_inputs(config)
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_heads * self.head_dim, bias=False)
        self.add_values(config, key_value_heads * self.head_dim)
        if config.use_qk_norm:
            self.q_norm = FANformerRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = FANformerRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = residual_linear(heads * self.head_dim, config.hidden_size, layer_idx)

    def add_inputs(self, config: FANformerConfig) -> None:
        """Add the modules that precede the projections of queries and keys; a Transformer has none."""

    def add_values(self, config: FANformerConfig, value_size: int) -> None:
        """Add the modules that compute the values; a Transformer has one linear map."""
        self.v_proj = nn.Linear(config.hidden_size, value_size, bias=False)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [b, s, h] to queries [b, s, n d], keys and values [b, s, k d]."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to hidden states [b, s, h]; return [b, s, h], and the weights [b, n, s, t] or None.

        Raises ValueError if vLLM splits heads whose values are whole. It runs this before it serves, and reads it.
        """
        served = getattr(self, "attn", None) or (kwargs.get("attention_instances") or {}).get(self.layer_idx)
        if hasattr(self, "v_fan") and served and served.num_heads != self.config.num_attention_heads:
            raise ValueError("fan_placement qk_and_v cannot be split by heads; serve it with --tensor-parallel-size 1")
        shape = hidden_states.shape[:-1]
        query, key, value = (
            heads.view(*shape, -1, self.head_dim).transpose(1, 2) for heads in self.queries_keys_values(hidden_states)
        )
        if self.config.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if (cache := kwargs.pop(CACHE_NAME, None)) is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attention(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape, -1)), weights


class FANformerFANAttention(FANformerAttention):
    """Self-attention that projects queries, keys and values from FAN's output."""

    def add_inputs(self, config: FANformerConfig) -> None:
        """Add the FAN map."""
        self.fan_activation = FANActivation(config, config.hidden_size, config.p_ratio)
        self.fan = nn.Linear(config.hidden_size, sum(self.fan_activation.sizes), bias=config.fan_bias)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [b, s, h] to FAN's output, and this to queries [b, s, n d], keys and values [b, s, k d]."""
        return super().queries_keys_values(self.fan_activation(self.fan(x)))


class FANformerFANValueAttention(FANformerFANAttention):
    """Self-attention that projects queries and keys from FAN's output, and takes a second FAN's output as values."""

    def add_values(self, config: FANformerConfig, value_size: int) -> None:
        """Add the FAN that computes the values."""
        self.v_fan_activation = FANActivation(config, value_size, config.value_p_ratio)
        self.v_fan = nn.Linear(config.hidden_size, sum(self.v_fan_activation.sizes), bias=config.fan_bias)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [b, s, h] by one FAN to queries [b, s, n d] and keys [b, s, k d], by another to values [b, s, k d]."""
        x_f = self.fan_activation(self.fan(x))
        return self.q_proj(x_f), self.k_proj(x_f), self.v_fan_activation(self.v_fan(x))


def residual_linear(in_features: int, out_features: int, layer_idx: int, *, bias: bool = False) -> nn.Linear:
    """Return a linear map into the residual stream, marked with the layer's index, which scales its initial weights.

    A subclass of `nn.Linear` would not do: bitsandbytes replaces only `nn.Linear` itself.
    """
    linear = nn.Linear(in_features, out_features, bias=bias)
    linear.layer_idx = layer_idx  # type: ignore[assignment]
    return linear


class FANformerMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: FANformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = residual_linear(config.intermediate_size, config.hidden_size, layer_idx)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, h] to [b, s, h]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FANformerFANLayers(nn.Module):
    """Two FAN layers in place of SwiGLU."""

    def __init__(self, config: FANformerConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.fan_bias
        self.activation_1 = FANActivation(config, inner, config.p_ratio)
        self.activation_2 = FANActivation(config, hidden, config.p_ratio)
        self.fan_1 = nn.Linear(hidden, sum(self.activation_1.sizes), bias=bias)
        self.fan_2 = residual_linear(inner, sum(self.activation_2.sizes), layer_idx, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, h] to [b, s, f] by the first layer, and on to [b, s, h] by the second."""
        x = self.activation_1(self.fan_1(x))
        return self.activation_2(self.fan_2(x))


LAYER_PARTS: dict[str, tuple[type[FANformerAttention], type[nn.Module]]] = {
    "qkv": (FANformerFANAttention, FANformerMLP),
    "qk_and_v": (FANformerFANValueAttention, FANformerMLP),
    "ffn": (FANformerAttention, FANformerFANLayers),
    "none": (FANformerAttention, FANformerMLP),
}
"""The attention and the MLP of each placement; `FAN_PLACEMENTS` has the other properties of placements."""


class FANformerDecoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU (or two FAN layers), each after its norm and added to the residual stream."""

    def __init__(self, config: FANformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = FANformerRMSNorm(config.hidden_size, config.rms_norm_eps)
        attention, mlp = LAYER_PARTS[config.fan_placement]
        self.self_attn = attention(config, layer_idx)
        self.post_attention_layernorm = FANformerRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp(config, layer_idx)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Map hidden states [b, s, h] to [b, s, h]; the other arguments go to the attention."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class FANformerPreTrainedModel(PreTrainedModel):
    """Base class of both models: initial weights, and the features of transformers that the models support."""

    config: FANformerConfig
    config_class = FANformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FANformerDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": FANformerDecoderLayer, "attentions": FANformerAttention}

    def _init_weights(self, module: nn.Module) -> None:
        """Draw normal weights of deviation 1/sqrt(fan in), cut at 3 deviations, as in the reference (`mitchell`).

        For maps into the residual stream, the standard deviation is 1/sqrt(2 * fan in * (layer + 1)), layers from 0.
        """
        if isinstance(module, FANformerRMSNorm):
            init.ones_(module.weight)
        if not isinstance(module, nn.Linear | nn.Embedding):
            return
        variance = 1.0 / module.weight.shape[1]
        if (layer_idx := getattr(module, "layer_idx", None)) is not None:
            variance /= 2 * (layer_idx + 1)
        std = variance**0.5
        init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        bias = getattr(module, "bias", None)
        if bias is not None:
            init.zeros_(bias)


class FANformerModel(FANformerPreTrainedModel):
    """The decoder, which maps token ids to hidden states."""

    def __init__(self, config: FANformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FANformerDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = FANformerRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = FANformerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Map ids [b, s], or their embeddings [b, s, h], to hidden states [b, s, h] after the last norm.

        Args:
            past_key_values: keys and values of past tokens; from transformers 5.24 on a deprecated name of `cache`.
            cache: keys and values of past tokens; before transformers 5.24, the pages of continuous batching.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds` were given.
            TypeError: nothing reads one of the arguments.
        """
        kwargs.update(kwargs.pop("kwargs", {}))  # nested by transformers' pipeline stages
        if unknown := kwargs.keys() - PASSED_ON:
            raise TypeError(f"forward got {', '.join(sorted(unknown))}, which FANformer does not know; leave it out")
        if CACHE_NAME == "past_key_values":
            if cache is not None:
                kwargs |= {"cache": cache}  # pages, for the attention of continuous batching
            cache = past_key_values
        elif past_key_values is not None:
            warnings.warn("`past_key_values` is deprecated; pass it as `cache`", FutureWarning, stacklevel=2)
            cache = past_key_values
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("both or neither of input_ids and inputs_embeds were given; pass exactly one of them")
        hidden_states: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE_NAME: cache},
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:  # early-exit drafting lowers this number
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE_NAME: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: cache})


class FANformerForCausalLM(FANformerPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: FANformerConfig) -> None:
        super().__init__(config)
        self.model = FANformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Map ids [b, s] to logits [b, s, v]; also return the mean next-token loss if `labels` [b, s] are given.

        Args:
            labels: the same ids, not shifted, with -100 in place of tokens that do not count.
            logits_to_keep: the number of last tokens whose logits are returned (0: all), or those tokens' positions.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
