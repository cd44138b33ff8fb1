"""Trained models in one process: find them without reading weights, load them, and compute logits.

A checkpoint of any layout and an exported Hugging Face folder both become a single stage of megatron-core with the
whole model, at tensor and pipeline parallel size 1.

Shapes: b batch, s sequence, v vocabulary without padding.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.training_state import load_weights
from megatron_fanformer.convert.name_table import convert
from megatron_fanformer.convert.recognition import RUNNABLE, checkpoint_of, recognize
from megatron_fanformer.data.tokenizer import GENERATION_CONFIG, Tokenizer, load_tokenizer, read_beside
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.local_layers import TorchCoreAttention
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid, distributed
from megatron_fanformer.runtime.seeding import local_shards, seed_everything


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A trained model that was found; its weights are not read yet."""

    path: Path
    """The checkpoint or exported folder itself."""
    config: FANformerConfig
    dtype: torch.dtype
    """Number format of the saved weights."""
    tokenizer: Path | None
    """The tokenizer next to the weights, if there is one."""
    end_of_text_id: int | None
    """The id that ends a document, if it is stated: next to the weights, or by the user."""
    fill: Callable[[list[Any], RankGrid], None]
    """Reads the weights into a stage's chunks."""

    def refuse_larger(self, tokenizer: Tokenizer) -> None:
        """Raise InputError if a tokenizer's ids lead out of the model's vocabulary."""
        if tokenizer.vocab_size > self.config.vocab_size:
            raise InputError(
                f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} ids, the model's vocabulary "
                f"{self.config.vocab_size}; name the tokenizer that the model was trained with"
            )


def find_model(checkpoint: Path, *, eod_id: int | None = None) -> ModelSource:
    """Find a trained model: in a run's folder (its latest), one checkpoint, or an exported Hugging Face folder.

    A document ends with `eod_id`, whatever is stated next to the weights.

    Raises:
        InputError: there is none, or it cannot be built.
        CorruptError: its configuration cannot be read.
    """
    target = recognize(checkpoint, RUNNABLE)
    folder = checkpoint_of(target)
    if target.kind == "hf":
        from megatron_fanformer.convert.huggingface import stated_model  # imports transformers: over a second

        config, dtype, end_of_text_id = stated_model(folder)
        is_bf16 = dtype == torch.bfloat16
    else:
        config = run_folder.saved_model(folder)
        end = read_beside(folder / GENERATION_CONFIG).get("eos_token_id")
        end_of_text_id = end if type(end) is int else None
        is_bf16 = run_folder.saved_config(folder).get("precision", {}).get("dtype") == "bf16"
    return ModelSource(
        path=folder,
        config=config,
        dtype=torch.bfloat16 if is_bf16 else torch.float32,
        tokenizer=run_folder.attached_tokenizer(folder),
        end_of_text_id=end_of_text_id if eod_id is None else eod_id,
        fill=functools.partial(_fill_from_huggingface if target.kind == "hf" else load_weights, folder),
    )


def find_model_and_tokenizer(
    checkpoint: str, stated_tokenizer: str | None = None, *, eod_id: int | None = None
) -> tuple[ModelSource, Tokenizer]:
    """Find a model by `find_model`, and the tokenizer that is stated, or else lies next to it."""
    source = find_model(Path(checkpoint), eod_id=eod_id)
    path = stated_tokenizer or source.tokenizer
    if path is None:
        raise InputError(f"{source.path} holds no tokenizer; name one with --tokenizer")
    tokenizer = load_tokenizer(path, eod_id=source.end_of_text_id)
    source.refuse_larger(tokenizer)
    return source, tokenizer


@torch.no_grad()
def _fill_from_huggingface(folder: Path, stages: list[Any], grid: RankGrid) -> None:
    from megatron_fanformer.convert.huggingface import open_huggingface

    config, tensors = open_huggingface(folder)
    whole = convert(tensors, config, "hf", "megatron")
    for shard in local_shards({str(number): sharded_state(chunk, grid) for number, chunk in enumerate(stages)}):
        shard.data.copy_(whole[shard.key][shard.global_slice()])


class TrainedModel:
    """A whole model on this process, without gradients."""

    def __init__(self, stage: torch.nn.Module, config: FANformerConfig, device: torch.device) -> None:
        self.config = config
        self.reads_on = any(isinstance(module, TorchCoreAttention) for module in stage.modules())
        """True if its attention can mask several tokens behind a filled cache."""
        self._stage = stage.eval()
        self._device = device

    def logits(self, ids_bs: Tensor) -> Tensor:
        """Return logits [b, s, v] of every position of token ids [b, s], in float32, without vocabulary padding."""
        return self._forward(ids_bs, first_position=0, cache=None)

    def decoder(self, batch_size: int, max_length: int) -> "Decoder":
        """Return a decoder of `batch_size` sequences of up to `max_length` tokens."""
        return Decoder(self, StaticInferenceContext(batch_size, max_length))

    @torch.no_grad()
    def _forward(self, ids_bs: Tensor, *, first_position: int, cache: StaticInferenceContext | None) -> Tensor:
        ids_bs = ids_bs.to(self._device)
        positions = torch.arange(first_position, first_position + ids_bs.shape[1], device=self._device)
        logits = self._stage(
            input_ids=ids_bs,
            position_ids=positions.expand_as(ids_bs),
            attention_mask=None,  # the layers' own: causal, or none for a single query on a filled cache
            inference_context=cache,
            runtime_gather_output=True,
        )
        return logits[..., : self.config.vocab_size].float()


class Decoder:
    """Decodes token by token: keys and values of the tokens given so far stay in megatron-core's cache."""

    def __init__(self, model: TrainedModel, cache: StaticInferenceContext) -> None:
        self._model, self._cache = model, cache

    def next_logits(self, ids_bs: Tensor) -> Tensor:
        """Return logits [b, v] of the token after `ids_bs` [b, s], which follow the tokens given so far."""
        # A filled cache turns megatron-core's causal mask off. Where the attention does not put it back, several
        # queries would see each other's future.
        one_by_one = self._cache.sequence_len_offset > 0 and not self._model.reads_on
        for part_bs in ids_bs.split(1 if one_by_one else ids_bs.shape[1], dim=1):
            length = self._cache.sequence_len_offset
            logits = self._model._forward(part_bs, first_position=length, cache=self._cache)
            self._cache.increment_sequence_len_offset(part_bs.shape[1])
            self._cache.enable_decode_mode()
        return logits[:, -1]

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens of each row."""
        if length == 0:
            self._cache.reset()
        self._cache.sequence_len_offset = length

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the batch alone, in this order."""
        memory = self._cache.key_value_memory_dict  # of each layer [s, b, n, d]; sized by its tensors, not the context
        for layer, keys_and_values in memory.items():
            memory[layer] = tuple(tensor[:, rows] for tensor in keys_and_values)


def build_model(source: ModelSource, grid: RankGrid) -> TrainedModel:
    """Build a model and read its weights: in bf16 if they were saved so and there is a GPU, else in float32."""
    dtype = source.dtype if grid.device == "cuda" else torch.float32
    (stage,) = build_stages(source.config, ParallelConfig(), grid, dtype=dtype, seed=None)
    source.fill([stage], grid)
    return TrainedModel(stage, source.config, grid.torch_device)


@contextmanager
def load_model(checkpoint: Path) -> Iterator[TrainedModel]:
    """Yield the model of a checkpoint, in a process group of this process alone; there must be none yet."""
    source = find_model(checkpoint)
    with distributed(ParallelConfig()) as grid:
        seed_everything(0)  # megatron-core builds layers on a GPU from random states that must exist
        yield build_model(source, grid)
