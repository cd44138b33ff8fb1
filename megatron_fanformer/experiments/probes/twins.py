"""A FANformer and its twins, as the model for transformers: what the probes compare.

That model is plain PyTorch, so that a probe of a minute needs no process group, and is what an export runs as.
"""

import dataclasses
import math

import torch

from megatron_fanformer.formats.huggingface import to_huggingface_config
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANformerConfig, as_transformer

TRANSFORMER = "Transformer"
SAME_SIZE = "FANformer"
SAME_PARAMETERS = "FANformer, same parameters"
FFN_RATIO = 4
"""d_ff over the hidden size."""


def twins(config: FANformerConfig) -> dict[str, FANformerConfig]:
    """Return the Transformer of a FANformer's shape, the FANformer, and the one with the Transformer's parameters.

    What FAN adds is taken from d_ff, not rounded as in the presets: these models are small and run on one process.
    """
    transformer = as_transformer(config)
    added = (config.num_parameters - transformer.num_parameters) / config.num_layers
    narrower = config.ffn_hidden_size - round(added / (3 * config.hidden_size))
    return {
        TRANSFORMER: transformer,
        SAME_SIZE: config,
        SAME_PARAMETERS: dataclasses.replace(config, ffn_hidden_size=narrower),
    }


def fresh_model(config: FANformerConfig, seed: int) -> FANformerForCausalLM:
    """Return the model at random weights of a seed, in float32; torch's own random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FANformerForCausalLM(to_huggingface_config(config))


def cosine(step: int, steps: int) -> float:
    """Return the share of the learning rate in a step, falling from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))
