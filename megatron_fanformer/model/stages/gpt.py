"""A stage made of GPTModel: megatron-core's model class up to 0.18. From 0.19 on it is deprecated."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fanformer.model.stages.base import Segments, Stage


class GPTStage(Stage, GPTModel):
    """A GPTModel."""

    @classmethod
    def build(
        cls,
        config: TransformerConfig,
        layer: ModuleSpec,
        final_norm: Any,
        segments: Segments,
        place: tuple[int, int],
        **shared: Any,
    ) -> "GPTStage":
        """Build as many layers as this chunk has; megatron-core numbers them by its configuration."""
        chunk, stage = place
        block = TransformerBlockSubmodules(layer_specs=[layer] * segments[chunk][stage], layer_norm=final_norm)
        return cls(config=config, transformer_layer_spec=block, **shared)
