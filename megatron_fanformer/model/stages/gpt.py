"""A stage made of GPTModel: megatron-core's model class up to 0.18. From 0.19 on it is deprecated."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_fanformer.model.stages.base import Layers, Stage


class GPTStage(Stage, GPTModel):
    """A GPTModel."""

    @staticmethod
    def arguments(layers: Layers) -> dict[str, Any]:
        """Return as many layers as this chunk has; megatron-core numbers them by its configuration."""
        own = [layers.spec] * layers.segments[layers.chunk][layers.stage]
        return {"transformer_layer_spec": TransformerBlockSubmodules(layer_specs=own, layer_norm=layers.final_norm)}
