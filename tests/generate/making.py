"""Makes a small checkpoint, its export and its tokenizer for the tests of generation.

The model is a reference case: 250 token ids, embedding rows for 256, trained-looking weights in the padding too.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from megatron_fanformer.checkpoint.full_tensors import write_full_tensors
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.data.chat_template import attached_files
from megatron_fanformer.generate.generate import Continuation, continue_all
from megatron_fanformer.generate.models import TrainedModel, build_model, find_model
from megatron_fanformer.generate.verb import SamplingConfig
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.runtime.layout import DeviceKind
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.tiny import tiny_model
from tests.train.layouts import reference_tensors
from tests.whole_models import export_huggingface

END_OF_TEXT_ID = 0
PROMPT = "def f(x):"


@dataclasses.dataclass
class Bytes:
    """A tokenizer whose ids are bytes; the model's vocabulary goes on to 299."""

    eod_id: int = END_OF_TEXT_ID
    vocab_size: int = 256

    @staticmethod
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def write_tokenizer(folder: Path, vocab_size: int = 250, end_of_text: str = "<|endoftext|>") -> Path:
    """A tokenizer of single characters, each with its code point as id; id 0 is the end of text.

    Args:
        end_of_text: its piece; by any other name it is not known for one.
    """
    vocabulary = {chr(code): code for code in range(1, vocab_size)}
    flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": END_OF_TEXT_ID, "content": end_of_text, **flags}],
        **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor")),
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": {end_of_text: END_OF_TEXT_ID, **vocabulary}, "merges": []},
    }
    path = folder / f"characters-{vocab_size}.json"
    path.write_text(json.dumps(content))
    return path


def grouped_queries() -> tuple[FANformerConfig, dict[str, torch.Tensor]]:
    """A random model whose heads share keys and values, which no reference case has."""
    config = tiny_model(num_query_groups=2, vocab_size=250, seq_length=64, fan=FANConfig(activation="gelu"))
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(config, "megatron")
    return config, {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def model_and_tensors(case: str, dtype: torch.dtype = torch.float32) -> tuple[FANformerConfig, dict[str, torch.Tensor]]:
    config, tensors = grouped_queries() if case == "grouped-queries" else reference_tensors(case)
    return config, {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_checkpoint(run: Path, case: str, tokenizer: Path, precision: str = "fp32") -> Path:
    """A run's folder with one checkpoint; to be called on a rank."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config, tensors = model_and_tensors(case, dtype)
    saved = {"model": dataclasses.asdict(config), "precision": {"dtype": precision}}
    with rank_grid(ParallelConfig(), "cpu"):
        return write_full_tensors(run, tensors, saved, attached_files(tokenizer, None))


def write_export(folder: Path, case: str, tokenizer: Path, chat_template: str | None = None) -> None:
    config, tensors = model_and_tensors(case)
    export_huggingface(
        config,
        tensors,
        folder,
        dtype=torch.float32,
        tokenizer=tokenizer,
        eod_id=END_OF_TEXT_ID,
        chat_template=chat_template,
    )


def with_model(checkpoint: Path, ask: Any, *arguments: Any, device: DeviceKind = "cpu") -> Any:
    """`ask(model, *arguments)`; to be called on a rank."""
    with rank_grid(ParallelConfig(), device) as grid:
        seed_everything(0)  # megatron-core builds layers on a GPU from random states that must exist
        return ask(build_model(find_model(checkpoint), grid), *arguments)


def new_ids(model: TrainedModel, prompts: list[list[int]], counts: list[int], batch_size: int) -> list[list[int]]:
    """Of each prompt its own number of new ids, greedy, decoded in batches; nothing ends them early."""
    rows = [
        Continuation(Bytes(eod_id=-1), prompt, SamplingConfig(), max_new_tokens=count)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    continue_all(model, rows, batch_size)
    return [row.ids for row in rows]


def all_logits(model: TrainedModel, ids_bs: list[list[int]]) -> list[Any]:
    return model.logits(torch.tensor(ids_bs)).tolist()


def logits_read_on(model: TrainedModel, ids_bs: list[list[int]], masks_behind_cache: bool) -> list[Any]:
    """Logits [b, 3, v] after 3 tokens; after the fourth and the first twice; and after all, read behind the fourth.

    Args:
        masks_behind_cache: False: as with an attention that takes one query alone behind a filled cache.
    """
    assert model.masks_behind_cache
    model.masks_behind_cache = masks_behind_cache
    ids = torch.tensor(ids_bs)
    decoder = model.decoder(ids.shape[0], ids.shape[1])
    found = [decoder.next_logits(ids[:, :3]), decoder.next_logits(ids[:, [3, 0, 0]])]
    decoder.rewind(4)
    return torch.stack([found[0], found[1], decoder.next_logits(ids[:, 4:])], dim=1).tolist()


def cached_logits(model: TrainedModel, ids_bs: list[list[int]], prompt_length: int) -> list[Any]:
    """Logits [b, s - prompt_length + 1, v] that the cache gives for the tokens from the prompt's end on."""
    ids = torch.tensor(ids_bs)
    decoder = model.decoder(ids.shape[0], ids.shape[1])
    steps = [ids[:, :prompt_length], *ids[:, prompt_length:].split(1, dim=1)]
    return torch.stack([decoder.next_logits(step) for step in steps], dim=1).tolist()
