"""Stock Megatron-LM's training loop on its mock data: what `pretrain_gpt.py`, which no package brings, asks of it.

Takes Megatron-LM's flags; one rank.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets import utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(numbers_of_samples: list[int]) -> Any:
    """Mock training, validation and test sets: each document counts up, so that the next token can be learned."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, numbers_of_samples, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank builds them


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Losses of the next micro batch, and what makes one of them."""
    batch = {name: value.cuda() for name, value in next(batches).items()}
    mask = batch["loss_mask"]
    losses = model(
        batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"], loss_mask=mask
    )
    return losses, partial(summed_loss, mask)


def summed_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over the tokens that count, their number, and both of them for the log."""
    loss, tokens = (losses.float() * mask).sum(), mask.sum()
    return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens])}


if __name__ == "__main__":
    # Megatron compiles its data helpers when it starts, and ends if it cannot; the package has them compiled, and no
    # Makefile.
    utils.compile_helpers = lambda: None
    arguments = parse_and_validate_args()
    configuration = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(configuration, datasets, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()
