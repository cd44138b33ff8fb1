"""The FANformer layer as a ModuleSpec of megatron-core: with Transformer Engine's layers, or local (plain torch) ones.

Stock Megatron-LM takes it unchanged: `pretrain_gpt.py --spec megatron_fanformer.model.layer_spec fanformer_layer_spec`
(p_ratio 0.25; for another, a module of your own that calls `layer_spec(FANConfig(...))`).

With Transformer Engine the input norm is fused into the column parallel map that reads the norm: the FAN map, not QKV.
The replicated FAN map of the `sequence` form has a separate norm. The FAN map is not in FP8 unless `fp8_fan` is set.
"""

import functools
import importlib
import sys
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.attention import exchanging_heads
from megatron_fanformer.model.config import FANConfig, TransformerImpl
from megatron_fanformer.model.fan_layer import ActivatedColumnParallelLinear, FANOptions
from megatron_fanformer.model.local_layers import ReplicatedLinear, RMSNorm, TorchCoreAttention
from megatron_fanformer.model.placements import PLACEMENTS
from megatron_fanformer.runtime.layout import FANForm

LayerImpl = Literal["local", "transformer_engine"]


@functools.cache
def transformer_engine_problem() -> str | None:
    """Return why Transformer Engine cannot be used here, or None."""
    try:
        import megatron.core.extensions.transformer_engine as extension

        if extension.HAVE_TE:
            return None
        # HAVE_TE is also false if one of the Engine's dependencies is missing: this import names it.
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken installation raises whatever its libraries raise
        if getattr(error, "name", None) not in ("transformer_engine", "transformer_engine.pytorch"):  # not absent
            return f"it does not import ({type(error).__name__}: {error})"
    return "it is not installed"


def resolve_transformer_impl(transformer_impl: TransformerImpl) -> LayerImpl:
    """Return the implementation; `auto` is Transformer Engine if it imports, else the local layers.

    Raises InputError if Transformer Engine is requested, and cannot be used.
    """
    if transformer_impl == "local":
        return "local"
    problem = transformer_engine_problem()
    if problem is None:
        return "transformer_engine"
    if transformer_impl == "transformer_engine":
        raise InputError(
            f"kernels.transformer_impl is transformer_engine, but {problem}; install megatron_fanformer[gpu] on a "
            "machine with a GPU, or set it to local"
        )
    return "local"


def chosen_engine_attention() -> Literal["flash", "fused", "unfused"] | None:
    """Return the backend that Transformer Engine's attention last used in this process; None before it used any.

    The Engine chooses in its first forward pass, by shapes and by the libraries that load.
    """
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    choice = getattr(module, "_attention_backends", {})
    names: tuple[Literal["flash", "fused", "unfused"], ...] = ("flash", "fused", "unfused")
    return next((name for name in names if choice.get(f"use_{name}_attention")), None)


def layer_spec(
    fan: FANConfig | None = None,
    transformer_impl: TransformerImpl = "auto",
    fan_form: FANForm = "column",
    *,
    fp8_fan: bool = False,
    recompute_fan: bool = False,
    qk_layernorm: bool = False,
    heads_over: dist.ProcessGroup | None = None,
) -> ModuleSpec:
    """Return the spec of one FANformer layer.

    Args:
        fan: None: the paper's FAN.
        fp8_fan: whether the FAN map computes in FP8 if the other maps do.
        recompute_fan: whether backward recomputes X_F from p | g, so that X_F is not kept.
        qk_layernorm: whether queries and keys are normed; megatron-core's configuration must agree.
        heads_over: context parallel ranks that exchange heads (`attention.HeadExchange`). The model's process groups
            must then be those without context parallelism. None: the ranks exchange no heads.

    Raises InputError if Transformer Engine is requested, and cannot be used or does not have this placement.
    """
    fan = fan or FANConfig()
    placement = PLACEMENTS[fan.placement]
    if resolve_transformer_impl(transformer_impl) == "local":
        maps, norm, other_submodules = _local_parts(fan, fan_form)
    else:
        maps, norm, other_submodules = _engine_parts(fan, fan_form, fp8_fan, exchanges_heads=heads_over is not None)
    attention_class, submodules_class = placement.attention()
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    if placement.is_in_attention:
        params["fan"] = FANOptions(fan, fan_form, recompute_fan)
    else:
        del maps["fan_linear"]  # an attention without FAN has no submodule of this name
    if heads_over is not None:
        attention_class, params = exchanging_heads(attention_class), {**params, "context_group": heads_over}
    head_norm = norm if qk_layernorm else None
    submodules = submodules_class(q_layernorm=head_norm, k_layernorm=head_norm, **maps)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(module=attention_class, params=params, submodules=submodules),
            self_attn_bda=get_bias_dropout_add,
            mlp_bda=get_bias_dropout_add,
            **other_submodules,
        ),
    )


def final_norm(transformer_impl: LayerImpl) -> Any:
    """Return the class of the norm in front of the head."""
    if transformer_impl == "local":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


Parts = tuple[dict[str, Any], type[torch.nn.Module], dict[str, Any]]
"""The linear maps and core attention of self-attention; the class of norms; the layer's submodules but attention."""


def _local_parts(fan: FANConfig, fan_form: FANForm) -> Parts:
    """Return the parts of a layer in plain torch."""
    placement = PLACEMENTS[fan.placement]
    is_column = placement.is_in_attention and fan_form == "column"
    maps = {
        "linear_qkv": ActivatedColumnParallelLinear if is_column else ColumnParallelLinear,
        "fan_linear": ColumnParallelLinear if is_column else ReplicatedLinear,
        "core_attention": TorchCoreAttention,
        "linear_proj": RowParallelLinear,
    }
    backend = placement.mlp_backend(fan)
    # Despite its name, this flag of megatron-core takes the backend's activation, which is SwiGLU.
    mlp = get_mlp_module_spec_for_backend(backend=backend, use_te_activation_func=not placement.has_fan_mlp)
    return maps, RMSNorm, {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm, "mlp": mlp}


def _engine_parts(fan: FANConfig, fan_form: FANForm, fp8_fan: bool, *, exchanges_heads: bool) -> Parts:
    """Return the parts of a layer by Transformer Engine."""
    placement = PLACEMENTS[fan.placement]
    if not placement.has_engine_layers:
        raise InputError(
            f"model.fan.placement is {fan.placement}, which Transformer Engine's layers do not have; set "
            "kernels.transformer_impl to local"
        )
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    from megatron_fanformer.model import te_layers

    fan_column = te_layers.FANTELayerNormColumnParallelLinear
    fan_replicated = te_layers.ReplicatedTELinear
    if not fp8_fan:
        fan_column = te_layers.BF16FANTELayerNormColumnParallelLinear
        fan_replicated = te_layers.BF16ReplicatedTELinear
    is_sequence = placement.is_in_attention and fan_form == "sequence"
    linear_qkv = TELayerNormColumnParallelLinear
    if placement.is_in_attention:
        linear_qkv = TEColumnParallelLinear if is_sequence else te_layers.WholeInputTEColumnParallelLinear
    maps = {
        "linear_qkv": linear_qkv,
        "fan_linear": fan_replicated if is_sequence else fan_column,
        "core_attention": te_layers.PartOfHeadsTEDotProductAttention if exchanges_heads else TEDotProductAttention,
        "linear_proj": TERowParallelLinear,
    }
    # A norm inside a map is saved under the local layer's name, so that both implementations load the same checkpoints.
    normed_map = "fan.linear" if placement.is_in_attention else "linear_qkv"
    other_submodules = {
        "input_layernorm": TENorm if is_sequence else IdentityOp,
        "pre_mlp_layernorm": IdentityOp,
        "mlp": get_mlp_module_spec_for_backend(backend=TESpecProvider()),
        "sharded_state_dict_keys_map": {
            f"self_attention.{normed_map}.layer_norm_": "input_layernorm.",
            "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
        },
    }
    return maps, TENorm, other_submodules


fanformer_layer_spec = layer_spec()
"""The paper's layer, for `--spec` of stock Megatron-LM."""
