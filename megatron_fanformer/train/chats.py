"""Fine-tuning on chats: turns epochs into steps."""

import dataclasses
import math
from collections.abc import Callable

from megatron_fanformer.data.chats import pack
from megatron_fanformer.data.check import training_conversations, validation_conversations
from megatron_fanformer.train.config import RunConfig


def with_steps(config: RunConfig, *, report: Callable[[str], None] = lambda _: None) -> RunConfig:
    """Return the configuration with `training.epochs` as `train_iters`, where it is of chats; else as it is.

    Args:
        report: is called with a line about the samples that the conversations make, and one about the steps.

    Raises:
        InputError: there are no such files, or no conversations to train or to validate on.
        CorruptError: files disagree with one another.
    """
    if not config.data.is_chats:
        return config
    training = config.training
    for name, conversations in validation_conversations(config.data).items():  # refused now, where there are none
        conversations.refuse_unlearned(name, config.model.seq_length)
    packing = pack(training_conversations(config.data).lengths, config.model.seq_length, seed=training.seed)
    report(packing.describe())
    if training.epochs is None:
        return config
    steps = math.ceil(training.epochs * len(packing) / training.global_batch_size)
    report(f"{training.epochs:g} epochs are {steps:,} steps of {training.global_batch_size:,} samples")
    return with_train_iters(config, steps)


def with_train_iters(config: RunConfig, steps: int) -> RunConfig:
    """Return the configuration of a run of so many steps, however it says its length itself."""
    return dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=steps, epochs=None))
