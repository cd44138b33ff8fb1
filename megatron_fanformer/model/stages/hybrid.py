"""A stage made of HybridModel: megatron-core's model class from 0.19 on.

Its pattern has a symbol a layer and a `|` between stages. `*`, an attention layer, is here a whole TransformerLayer
with its MLP, as GPTModel's are: so weights keep their names and numbers, and recomputation its units. (Stock
Megatron-LM writes a Transformer as `*-` repeated, with attention and MLP as layers of their own: see `hybrid_spec`.)
"""

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fanformer.model.stages.base import Layers, Stage


class HybridStage(Stage, HybridModel):
    """A HybridModel."""

    has_boundaries_in_config = False  # they are in the pattern

    @staticmethod
    def arguments(layers: Layers) -> dict[str, Any]:
        """Return the whole pattern, in which megatron-core finds the segment of this chunk by itself."""
        pattern = Symbols.PIPE.join(Symbols.ATTENTION * number for chunk in layers.segments for number in chunk)
        submodules = HybridStackSubmodules(attention_layer=layers.spec)
        stack = ModuleSpec(module=Stack, submodules=submodules, params={"final_norm": layers.final_norm})
        return {"hybrid_stack_spec": stack, "hybrid_layer_pattern": pattern}


class Stack(HybridStack):
    """A HybridStack with any final norm, under the name that checkpoints have for it; its own is the Engine's."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, *, final_norm: Any, post_process: bool = True, **options: Any
    ) -> None:
        super().__init__(config, submodules, post_process=post_process, post_layer_norm=False, **options)
        self.final_layernorm = None
        if post_process:
            self.final_layernorm = build_module(
                final_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return hidden states [s, b, h], normed on the last stage."""
        hidden_sbh: Tensor = super().forward(*inputs, **options)
        return hidden_sbh if self.final_layernorm is None else self.final_layernorm(hidden_sbh)
