"""Stock Megatron-LM's training loop, called as `pretrain_gpt.py` and `pretrain_hybrid.py` do, which no package brings.

Takes Megatron-LM's flags, and two of its own.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from megatron_fanformer.model.build import initialize
from megatron_fanformer.model.config import FANformerConfig
from tests.stock_megatron import own_name

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def own_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags that are not Megatron-LM's."""
    parser.add_argument("--meet-at", required=True, help="a file that is not there yet, at which the ranks meet")
    parser.add_argument("--fanformer-seed", type=int, help="begin with our initial weights of this seed")
    return parser


def give_our_weights(
    stages: list[torch.nn.Module], model: FANformerConfig, seed: int, *, is_hybrid: bool
) -> list[torch.nn.Module]:
    """Put our initial weights in the place of Megatron's own, by their global names."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for stage in stages:
        names = {"non_homogeneous_layers": True, "dp_cp_group": group}  # one name a layer, as in our own checkpoints
        state = stage.sharded_state_dict(metadata=names)  # type: ignore[operator]
        if is_hybrid:
            for value in nested_values(state):
                value.key = own_name(value.key)
        initialize(state, model, seed)
    return stages


def datasets(numbers_of_samples: list[int]) -> Any:
    """Training, validation and test sets.

    With --mock-data each document counts up, so that the next token can be learned.
    """
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.mock_data else (args.data_path, None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, numbers_of_samples, lambda: True, config).build()


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
    arguments = parse_and_validate_args(own_flags)
    is_hybrid = arguments.hybrid_layer_pattern is not None
    model_of = hybrid_config_from_args if is_hybrid else gpt_config_from_args
    configuration = pretrain_cfg_container_from_args(arguments, model_of(arguments))
    if arguments.fanformer_seed is not None:
        sizes = {name: getattr(arguments, name) for name in SIZES}
        if is_hybrid:
            sizes["num_layers"] //= 2  # a `*` and a `-` are one of ours
        ours = partial(
            give_our_weights, model=FANformerConfig(**sizes), seed=arguments.fanformer_seed, is_hybrid=is_hybrid
        )
        configuration.model.pre_wrap_hooks.append(ours)
    store = torch.distributed.FileStore(arguments.meet_at, arguments.world_size)
    pretrain(configuration, datasets, ModelType.encoder_or_decoder, forward_step, store=store)
    torch.distributed.destroy_process_group()
