"""Finds a trained model without reading its weights, loads it into one process, and computes logits.

From a checkpoint of any layout or an exported Hugging Face folder, the full model is loaded as one stage of
megatron-core, at tensor and pipeline parallel size 1.

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
from megatron_fanformer.data.tokenizer import GENERATION_CONFIG, Tokenizer, load_tokenizer, read_json_config
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.local_layers import TorchCoreAttention
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid, distributed
from megatron_fanformer.runtime.seeding import local_shards, seed_everything


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A trained model whose weights have not been read."""

    path: Path
    """The checkpoint (not the run's folder), or the exported folder."""
    config: FANformerConfig
    dtype: torch.dtype
    """Number format of the saved weights."""
    tokenizer: Path | None
    """The tokenizer next to the weights, if there is one."""
    end_of_text_id: int | None
    """The id that ends a document, if the user or a file next to the weights states one; None: the tokenizer's."""
    read_weights: Callable[[list[Any], RankGrid], None]
    """Reads the weights into this rank's chunks of the model."""

    def refuse_larger(self, tokenizer: Tokenizer) -> None:
        """Raise InputError if a tokenizer has ids outside the model's vocabulary."""
        if tokenizer.vocab_size > self.config.vocab_size:
            raise InputError(
                f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} ids, the model's vocabulary "
                f"{self.config.vocab_size}; name the tokenizer that the model was trained with"
            )


def find_model(checkpoint: Path, *, eod_id: int | None = None) -> ModelSource:
    """Find the model of a checkpoint, of the latest checkpoint in a run's folder, or of a Hugging Face folder.

    `eod_id` replaces the end of text that is stated next to the weights.

    Raises:
        InputError: there is no model at this path, or it cannot be built.
        CorruptError: the model's configuration cannot be read.
    """
    target = recognize(checkpoint, RUNNABLE)
    folder = checkpoint_of(target)
    if target.kind == "hf":
        from megatron_fanformer.convert.huggingface import stated_model  # imports transformers: over a second

        config, dtype, end_of_text_id = stated_model(folder)
        is_bf16 = dtype == torch.bfloat16
    else:
        config = run_folder.saved_model(folder)
        stated_id = read_json_config(folder / GENERATION_CONFIG).get("eos_token_id")
        end_of_text_id = stated_id if type(stated_id) is int else None
        is_bf16 = run_folder.saved_config(folder).get("precision", {}).get("dtype") == "bf16"
    return ModelSource(
        path=folder,
        config=config,
        dtype=torch.bfloat16 if is_bf16 else torch.float32,
        tokenizer=run_folder.attached_tokenizer(folder),
        end_of_text_id=end_of_text_id if eod_id is None else eod_id,
        read_weights=functools.partial(_read_huggingface if target.kind == "hf" else load_weights, folder),
    )


def find_model_and_tokenizer(
    checkpoint: str, stated_tokenizer: str | None = None, *, eod_id: int | None = None
) -> tuple[ModelSource, Tokenizer]:
    """Find a model, and the stated tokenizer, else the one next to the weights. InputError if either is missing."""
    source = find_model(Path(checkpoint), eod_id=eod_id)
    path = stated_tokenizer or source.tokenizer
    if path is None:
        raise InputError(f"{source.path} holds no tokenizer; name one with --tokenizer")
    tokenizer = load_tokenizer(path, eod_id=source.end_of_text_id)
    source.refuse_larger(tokenizer)
    return source, tokenizer


@torch.no_grad()
def _read_huggingface(folder: Path, chunks: list[Any], grid: RankGrid) -> None:
    """Read the weights of an exported folder into this rank's chunks of the model."""
    from megatron_fanformer.convert.huggingface import open_huggingface

    config, tensors = open_huggingface(folder)
    full_tensors = convert(tensors, config, "hf", "megatron")
    for shard in local_shards({str(number): sharded_state(chunk, grid) for number, chunk in enumerate(chunks)}):
        shard.data.copy_(full_tensors[shard.key][shard.global_slice()])


class TrainedModel:
    """A full model in this process, for inference."""

    def __init__(self, stage: torch.nn.Module, config: FANformerConfig, device: torch.device) -> None:
        self.config = config
        self.masks_behind_cache = any(isinstance(module, TorchCoreAttention) for module in stage.modules())
        """Whether the attention is causal on a filled cache, too, so that it can read several tokens at once there."""
        self._stage = stage.eval()
        self._device = device

    def logits(self, ids_bs: Tensor) -> Tensor:
        """Return the logits [b, s, v] of token ids [b, s], in float32, without vocabulary padding."""
        return self._forward(ids_bs, first_position=0, cache=None)

    def decoder(self, batch_size: int, max_length: int) -> "Decoder":
        """Return a decoder for `batch_size` sequences of up to `max_length` tokens."""
        return Decoder(self, StaticInferenceContext(batch_size, max_length))

    @torch.no_grad()
    def _forward(self, ids_bs: Tensor, *, first_position: int, cache: StaticInferenceContext | None) -> Tensor:
        ids_bs = ids_bs.to(self._device)
        positions = torch.arange(first_position, first_position + ids_bs.shape[1], device=self._device)
        logits = self._stage(
            input_ids=ids_bs,
            position_ids=positions.expand_as(ids_bs),
            attention_mask=None,  # the layers mask causally, or not at all for one query on a filled cache
            inference_context=cache,
            runtime_gather_output=True,
        )
        return logits[..., : self.config.vocab_size].float()


class Decoder:
    """Reads tokens and returns the next token's logits; megatron-core's cache keeps the keys and values."""

    def __init__(self, model: TrainedModel, cache: StaticInferenceContext) -> None:
        self._model, self._cache = model, cache

    def next_logits(self, ids_bs: Tensor) -> Tensor:
        """Read the next tokens `ids_bs` [b, s] of all rows; return the logits [b, v] of the token after them."""
        # A filled cache turns megatron-core's causal mask off. An attention that does not mask by itself must read the
        # tokens one by one, or they would see each other's future.
        is_one_by_one = self._cache.sequence_len_offset > 0 and not self._model.masks_behind_cache
        for part_bs in ids_bs.split(1 if is_one_by_one else ids_bs.shape[1], dim=1):
            length = self._cache.sequence_len_offset
            logits = self._model._forward(part_bs, first_position=length, cache=self._cache)
            self._cache.increment_sequence_len_offset(part_bs.shape[1])
            self._cache.enable_decode_mode()
        return logits[:, -1]

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens of each row."""
        if length == 0:
            self._cache.reset()  # also leaves decode mode, so that megatron-core masks later tokens again
        self._cache.sequence_len_offset = length

    def keep_rows(self, rows: list[int]) -> None:
        """Reduce the batch to these rows, in this order."""
        memory = self._cache.key_value_memory_dict  # tensors [s, b, ...], which state the batch size
        for layer, keys_and_values in memory.items():
            memory[layer] = tuple(tensor[:, rows] for tensor in keys_and_values)


def build_model(source: ModelSource, grid: RankGrid) -> TrainedModel:
    """Build a model and read its weights: in bf16 if they were saved in bf16 and there is a GPU, else in float32."""
    dtype = source.dtype if grid.device == "cuda" else torch.float32
    (stage,) = build_stages(source.config, ParallelConfig(), grid, dtype=dtype, seed=None)
    source.read_weights([stage], grid)
    return TrainedModel(stage, source.config, grid.torch_device)


@contextmanager
def load_model(checkpoint: Path) -> Iterator[TrainedModel]:
    """Yield the model of a checkpoint, in a new process group of this process alone; no other group may exist."""
    source = find_model(checkpoint)
    with distributed(ParallelConfig()) as grid:
        seed_everything(0)  # creates the random states that megatron-core needs to build layers on a GPU
        yield build_model(source, grid)
