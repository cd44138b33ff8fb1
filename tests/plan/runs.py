"""Configurations of tiny models in large worlds."""

from typing import Any

from megatron_fanformer.train.config import RunConfig, config_from_dict

# Sizes that no padding fits by itself: the FAN bias has 48 rows, the vocabulary 250 ids.
MODEL = dict(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=104,
    num_attention_heads=4,
    vocab_size=250,
    make_vocab_size_divisible_by=8,
    seq_length=32,
)


def run_config(
    model: dict[str, Any] | None = None,
    *,
    samples: int = 8,
    micro_batch_size: int = 2,
    dtype: str = "bf16",
    kernels: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **parallel: Any,
) -> RunConfig:
    """A run of the tiny model; `samples` are those of a step."""
    return config_from_dict(
        {
            "model": {**MODEL, **(model or {})},
            "parallel": parallel,
            "kernels": {"transformer_impl": "local", **(kernels or {})},
            "precision": {"dtype": dtype},
            "data": {"train_data": ["none"]},
            "optimizer": optimizer or {},
            "schedule": {"lr_warmup_iters": 1},
            "training": {
                "run_dir": "none",
                "train_iters": 10,
                "global_batch_size": samples,
                "micro_batch_size": micro_batch_size,
            },
        }
    )
