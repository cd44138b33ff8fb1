"""Epochs as steps: how many a run over packed conversations takes, known once their lengths are."""

import dataclasses
import math
from collections.abc import Callable

from megatron_fanformer.data.chat_dataset import ChatDataset, training_conversations
from megatron_fanformer.training.config import RunConfig


def with_steps(config: RunConfig, *, tell: Callable[[str], None] = lambda _: None) -> RunConfig:
    """The configuration with `training.epochs` as `train_iters`, where it is of chats; else as it is.

    Args:
        tell: is called with a line about the samples that the conversations make, and one about the steps.

    Raises:
        InputError: there are no such files, or no conversations to train on.
        CorruptError: files disagree with one another.
    """
    if not config.data.is_chats:
        return config
    training = config.training
    samples = ChatDataset(
        training_conversations(config.data), seq_length=config.model.seq_length, seed=training.seed
    )
    tell(samples.in_words())
    if training.epochs is None:
        return config
    steps = math.ceil(training.epochs * samples.epoch_samples / training.global_batch_size)
    tell(f"{training.epochs:g} epochs are {steps:,} steps of {training.global_batch_size:,} samples")
    return dataclasses.replace(config, training=dataclasses.replace(training, train_iters=steps, epochs=None))
