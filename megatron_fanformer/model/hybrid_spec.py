"""HybridModel, megatron-core's model class from 0.19 on: our pipeline stage, and layers for stock Megatron-LM.

    --spec megatron_fanformer.model.hybrid_spec fanformer_stack_spec --hybrid-layer-pattern '*-*-|*-*-'

In this pattern `*` is attention behind FAN, and `-` the MLP; `*-` repeated is a FANformer. The other symbols are
Megatron's own layers (`M` Mamba, `G` gated delta net, `E` experts), so FAN attention also serves in hybrid stacks.
(p_ratio is 0.25; for another, write a module that calls `stack_spec(FANConfig(...))`.)

In the pattern of `HybridStage`, `*` is a whole TransformerLayer with its MLP, as in GPTModel, and `|` separates stages:
weights keep GPTModel's names and layer numbers, and recomputation its units.
"""

import dataclasses
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_fanformer.model.config import FANConfig, TransformerImpl
from megatron_fanformer.model.layer_spec import final_norm, layer_spec, resolve_transformer_impl
from megatron_fanformer.model.stages import Layers, Stage


def stack_spec(fan: FANConfig | None = None, transformer_impl: TransformerImpl = "auto", **options: Any) -> ModuleSpec:
    """Return a stack whose `*` and `-` are the two halves of the layer that `layer_spec` returns for the arguments."""
    layer = layer_spec(fan, transformer_impl, **options).submodules
    new_keys = layer.sharded_state_dict_keys_map  # by a module's prefix of names: the prefix in checkpoints
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
        sharded_state_dict_keys_map={old: new for old, new in new_keys.items() if old.startswith("self_attention.")},
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm,
        mlp=layer.mlp,
        mlp_bda=layer.mlp_bda,
        sharded_state_dict_keys_map={old: new for old, new in new_keys.items() if old.startswith("mlp.")},
    )
    is_local = resolve_transformer_impl(transformer_impl) == "local"
    return ModuleSpec(
        module=_LocalStack if is_local else HybridStack,
        submodules=dataclasses.replace(
            hybrid_stack_spec.submodules,
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


class _LocalStack(HybridStack):
    """A HybridStack with the local layers' final norm, for stock Megatron-LM without the Engine."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, post_layer_norm=False, **options)  # without the Engine's norm
        self.post_layer_norm = True  # else forward would not apply `final_norm`
        if self.post_process:
            self.final_norm = final_norm("local")(config, config.hidden_size, config.layernorm_epsilon)


fanformer_stack_spec = stack_spec()
"""The paper's layers, for `--spec` of stock Megatron-LM with `--hybrid-layer-pattern`."""


class HybridStage(Stage, HybridModel):
    """A stage made of HybridModel."""

    has_stage_sizes_in_config = False  # the pattern states them

    @staticmethod
    def arguments(layers: Layers) -> dict[str, Any]:
        """Return the stack, and the pattern of the whole model, in which megatron-core finds this chunk's segment."""
        pattern = Symbols.PIPE.join(Symbols.ATTENTION * count for counts in layers.segments for count in counts)
        submodules = HybridStackSubmodules(attention_layer=layers.spec)
        stack = ModuleSpec(module=Stack, submodules=submodules, params={"final_norm": layers.final_norm})
        return {"hybrid_stack_spec": stack, "hybrid_layer_pattern": pattern}


class Stack(HybridStack):
    """A HybridStack with any final norm (megatron-core's is the Engine's), under GPTModel's name of the norm."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, *, final_norm: Any, post_process: bool = True, **options: Any
    ) -> None:
        super().__init__(config, submodules, post_process=post_process, post_layer_norm=False, **options)  # see below
        self.final_layernorm = None
        if post_process:
            self.final_layernorm = build_module(
                final_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return hidden states [sequence, batch, width]; on the last stage they have passed through the final norm."""
        hidden_sbh: Tensor = super().forward(*inputs, **options)
        return hidden_sbh if self.final_layernorm is None else self.final_layernorm(hidden_sbh)
