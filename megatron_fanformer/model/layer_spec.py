"""The FANformer layer as a ModuleSpec of megatron-core: by Transformer Engine, or by local (plain torch) layers.

Stock Megatron-LM takes it as it is: `pretrain_gpt.py --spec megatron_fanformer.model.layer_spec fanformer_layer_spec`
(p_ratio 0.25; a module of one's own that calls `layer_spec(FANConfig(...))` for another).

With Transformer Engine the input norm is fused into the first linear map that reads it: the FAN map, not QKV.
"""

import functools
from typing import Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.attention import (
    FANSelfAttention,
    FANSelfAttentionSubmodules,
    RMSNorm,
    TorchCoreAttention,
    WholeInputColumnParallelLinear,
)
from megatron_fanformer.model.config import FANConfig

TransformerImpl = Literal["auto", "local", "transformer_engine"]


@functools.cache
def transformer_engine_problem() -> str | None:
    """Why Transformer Engine cannot be used here, or None."""
    try:
        import megatron.core.extensions.transformer_engine as extension
    except Exception as error:  # a broken installation raises whatever its libraries raise
        return f"it does not import ({type(error).__name__}: {error})"
    return None if extension.HAVE_TE else "it is not installed"


def resolve_transformer_impl(wanted: TransformerImpl) -> Literal["local", "transformer_engine"]:
    """`auto` takes Transformer Engine where it imports.

    Raises:
        InputError: Transformer Engine is asked for and cannot be used.
    """
    if wanted == "local":
        return "local"
    problem = transformer_engine_problem()
    if problem is None:
        return "transformer_engine"
    if wanted == "transformer_engine":
        raise InputError(
            f"parallel.transformer_impl is transformer_engine, but {problem}; install megatron_fanformer[gpu] on a "
            "machine with a GPU, or set it to local"
        )
    return "local"


def layer_spec(fan: FANConfig | None = None, transformer_impl: TransformerImpl = "auto") -> ModuleSpec:
    """One FANformer layer (the paper's p_ratio where `fan` is not given)."""
    fan = fan or FANConfig()
    if resolve_transformer_impl(transformer_impl) == "transformer_engine":
        return _transformer_engine_layer(fan)
    return _local_layer(fan)


def block_spec(
    fan: FANConfig, num_layers: int, transformer_impl: Literal["local", "transformer_engine"]
) -> TransformerBlockSubmodules:
    """`num_layers` FANformer layers and the final norm: one pipeline stage's block."""
    norm: type[torch.nn.Module] = RMSNorm
    if transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    layers = [layer_spec(fan, transformer_impl)] * num_layers
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local_layer(fan: FANConfig) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_local_attention(fan),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(backend=LocalSpecProvider()),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _local_attention(fan: FANConfig) -> ModuleSpec:
    if fan.placement == "none":
        return ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, core_attention=TorchCoreAttention, linear_proj=RowParallelLinear
            ),
        )
    return ModuleSpec(
        module=FANSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "fan": fan},
        submodules=FANSelfAttentionSubmodules(
            linear_qkv=WholeInputColumnParallelLinear,
            core_attention=TorchCoreAttention,
            linear_proj=RowParallelLinear,
            fan_linear=ColumnParallelLinear,
        ),
    )


def _transformer_engine_layer(fan: FANConfig) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    # The norm stands inside the map that reads it; checkpoints name it as the local layer does.
    normed_map = "linear_qkv" if fan.placement == "none" else "fan.linear"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,
            self_attention=_transformer_engine_attention(fan),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=get_mlp_module_spec_for_backend(backend=TESpecProvider()),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                f"self_attention.{normed_map}.layer_norm_": "input_layernorm.",
                "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
            },
        ),
    )


def _transformer_engine_attention(fan: FANConfig) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine import (
        TEDotProductAttention,
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
    )

    if fan.placement == "none":
        return ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=TELayerNormColumnParallelLinear,
                core_attention=TEDotProductAttention,
                linear_proj=TERowParallelLinear,
            ),
        )
    from megatron_fanformer.model.te_layers import WholeInputTEColumnParallelLinear

    return ModuleSpec(
        module=FANSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "fan": fan},
        submodules=FANSelfAttentionSubmodules(
            linear_qkv=WholeInputTEColumnParallelLinear,
            core_attention=TEDotProductAttention,
            linear_proj=TERowParallelLinear,
            fan_linear=TELayerNormColumnParallelLinear,
        ),
    )


fanformer_layer_spec = layer_spec()
"""The paper's layer, for `--spec` of stock Megatron-LM."""
