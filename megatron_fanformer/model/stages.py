"""A pipeline stage of the model on megatron-core's model class: `HybridModel` from 0.19 on, `GPTModel` before.

The rest of the package relies on the following alone. A stage takes tokens, positions and a mask, and returns logits
[b, s, v], or the losses [b, s] of labels. It has the parts below. Its weights have the same names in every class, in
`named_parameters()` and, with the layers' numbers over all stages, in `sharded_state_dict()`.

- `embedding` if `pre_process` is set, `output_layer` if `post_process` is set;
- `decoder.layers`: megatron-core's TransformerLayers, with `layer_number` counted over all stages, from 1;
- `decoder.final_layernorm`: the norm in front of the head on the last stage, elsewhere None.

Shapes: b micro batch, s sequence, h hidden size, v this tensor parallel rank's rows of the vocabulary.
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
    """The layers of a model, and which chunk of them to build."""

    spec: ModuleSpec
    """Spec of one layer."""
    final_norm: Any
    """Class of the norm in front of the head."""
    segments: list[list[int]]
    """Number of layers by chunk and stage; chunk 0 of all stages comes first in the model."""
    chunk: int
    stage: int


class Stage(torch.nn.Module):
    """One chunk of a pipeline stage; a subclass also inherits from megatron-core's model.

    A chunked loss head, if there is one, computes the losses of labels. In evaluation the vocabulary's padding has no
    probability, as in exports, which have no padding.
    """

    token_columns: int
    """How many of this rank's columns of logits stand for tokens; the others, behind them, are padding."""
    has_stage_sizes_in_config = True
    """Whether megatron-core reads from its configuration how many layers the stages have."""

    @staticmethod
    def arguments(layers: Layers) -> dict[str, Any]:
        """Return the arguments that give megatron-core's model its layers."""
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
            loss_mask: the weights of the tokens in the sum of losses; see `LossHead.losses`.
        """
        head = getattr(self, "output_layer", None)
        positional: tuple[Any, ...] = (input_ids, position_ids, attention_mask)
        if labels is None or not isinstance(head, LossHead):
            output: Tensor = super().forward(*positional, labels=labels, loss_mask=loss_mask, **inputs)
            return output
        with head.scoring(labels.t(), None if loss_mask is None else loss_mask.t(), columns=self._scored_columns):
            losses: Tensor = super().forward(*positional, **inputs)  # transposes the head's losses, as it would logits
        return losses

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses [b, s] of logits [s, b, v] by megatron-core's cross entropy."""
        rule_out_padding(logits, self._scored_columns)
        losses: Tensor = super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
        return losses

    @property
    def _scored_columns(self) -> int | None:
        return None if self.training else self.token_columns  # None: all, with the padding


class GPTStage(Stage, GPTModel):
    """A stage made of GPTModel, megatron-core's model class up to 0.18, deprecated from 0.19 on."""

    @staticmethod
    def arguments(layers: Layers) -> dict[str, Any]:
        """Return a spec for each layer of this chunk; megatron-core numbers the layers by its configuration."""
        specs = [layers.spec] * layers.segments[layers.chunk][layers.stage]
        return {"transformer_layer_spec": TransformerBlockSubmodules(layer_specs=specs, layer_norm=layers.final_norm)}
