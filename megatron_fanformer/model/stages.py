"""A pipeline stage of the model on megatron-core's model class: `HybridModel` from 0.19 on, `GPTModel` before.

The rest of the package relies on this alone: a stage is called with tokens, positions and a mask, and gives logits
[b, s, v], or the losses [b, s] of labels; it has the parts below, and its weights the same names in every class, in
`named_parameters()` and, global over the stages, in `sharded_state_dict()`.

- `embedding` where `pre_process` is set, `output_layer` where `post_process` is;
- `decoder.layers`: megatron-core's TransformerLayers, each with its `layer_number` over all stages, from 1;
- `decoder.final_layernorm`: the norm in front of the head, on the last stage; else None.

Shapes: b micro batch, s sequence, v this tensor parallel rank's rows of the vocabulary.
"""

import importlib.util
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_fanformer.model.loss_head import LossHead, rule_out_padding

HAS_HYBRID_MODEL = importlib.util.find_spec("megatron.core.models.hybrid") is not None  # from 0.19 on


class Layers(NamedTuple):
    """The layers of a model, and the chunk of them that is built."""

    spec: ModuleSpec
    """Of each layer."""
    final_norm: Any
    """Class of the norm in front of the head."""
    segments: list[list[int]]
    """Layers of each chunk, by chunk and stage: those of chunk 0 over all stages come first in the model."""
    chunk: int
    stage: int


class Stage(torch.nn.Module):
    """One chunk of a pipeline stage; a subclass inherits also from megatron-core's model.

    It returns the losses of its labels through the chunked loss head, where it has one. In evaluation the vocabulary's
    padding has no probability, as in exports, which have no padding.
    """

    own_tokens: int
    """Number of this rank's first rows of the output layer that are tokens, not padding."""
    has_boundaries_in_config = True
    """True if megatron-core reads uneven stages from its configuration."""

    @staticmethod
    def arguments(layers: Layers) -> dict[str, Any]:
        """Return the arguments by which megatron-core's model gets its layers."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return hidden states [s, b, h], or on the last stage logits [b, s, v], or losses [b, s] if there are labels.

        Args:
            loss_mask: the weights by which losses will be summed; see `LossHead`.
        """
        head = getattr(self, "output_layer", None)
        given: tuple[Any, ...] = (input_ids, position_ids, attention_mask)
        if labels is None or not isinstance(head, LossHead):
            out: Tensor = super().forward(*given, labels=labels, loss_mask=loss_mask, **inputs)
            return out
        with head.scoring(labels.t(), None if loss_mask is None else loss_mask.t(), columns=self._scored_columns):
            losses: Tensor = super().forward(*given, **inputs)  # transposed as logits [s, b, v] would be
        return losses

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses [b, s] of logits [s, b, v], by megatron-core's own cross entropy."""
        rule_out_padding(logits, self._scored_columns)
        losses: Tensor = super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
        return losses

    @property
    def _scored_columns(self) -> int | None:
        return None if self.training else self.own_tokens


class GPTStage(Stage, GPTModel):
    """A stage made of GPTModel, megatron-core's model class up to 0.18; from 0.19 on it is deprecated."""

    @staticmethod
    def arguments(layers: Layers) -> dict[str, Any]:
        """Return as many layers as this chunk has; megatron-core numbers them by its configuration."""
        specs = [layers.spec] * layers.segments[layers.chunk][layers.stage]
        return {"transformer_layer_spec": TransformerBlockSubmodules(layer_specs=specs, layer_norm=layers.final_norm)}
