"""The rows that describe a model and the files beside its weights, whatever its format."""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import store
from megatron_fanformer.data.chat_template import own_template
from megatron_fanformer.model.config import FANformerConfig


def model_rows(config: FANformerConfig) -> list[tuple[str, str]]:
    """Return sizes, FAN and parameters, for people."""
    heads = f"{config.num_attention_heads} heads"
    if config.query_groups != config.num_attention_heads:
        heads += f", {config.query_groups} query groups"
    scaling, positions = config.rope_scaling, []
    if scaling.is_scaled:
        yarn = f", from sequences of {scaling.original_max_position_embeddings}" if scaling.rope_type == "yarn" else ""
        positions = [("positions", f"scaled: {scaling.rope_type}, factor {scaling.factor:g}{yarn}")]
    head = "untied head" if config.untie_embeddings_and_output_weights else "tied head"
    return [
        ("model", f"{config.placement.title}: {config.num_layers} layers, h {config.hidden_size}, {heads}"),
        ("", f"d_ff {config.ffn_hidden_size}, sequences of {config.seq_length} tokens, {head}"),
        ("", f"vocabulary {config.vocab_size:,}, padded to {config.padded_vocab_size:,}"),
        *positions,
        ("FAN", _fan(config)),
        ("parameters", f"{config.num_parameters:,}"),
    ]


def model_facts(config: FANformerConfig) -> dict[str, Any]:
    """Return the configuration, and what `model_rows` says beyond it, for programs."""
    counts = {"parameters": config.num_parameters, "padded_vocab_size": config.padded_vocab_size}
    return {**dataclasses.asdict(config), **counts}


def text_facts(folder: Path) -> dict[str, Any]:
    """Return the tokenizer beside the weights, and whether it has a chat template; for programs.

    Raises:
        CorruptError: a checkpoint's tokenizer is a link to somewhere else.
        InputError: the chat template cannot be read.
    """
    tokenizer = store.attached_tokenizer(folder)
    return {
        "tokenizer": tokenizer.name if tokenizer else None,
        "chat_template": own_template(folder) is not None,
    }


def text_row(facts: dict[str, Any]) -> tuple[str, str]:
    """Return what `text_facts` says, for people."""
    template = ", with a chat template" if facts["chat_template"] else ""
    return "tokenizer", f"{facts['tokenizer'] or 'none'}{template}"


def _fan(config: FANformerConfig) -> str:
    fan = config.fan
    if not config.placement.is_fanformer:
        return "none"
    values = f", of the values {fan.v_p_ratio:g}" if fan.v_p_ratio is not None else ""
    activation = f", activation {fan.activation}" if fan.activation != "none" else ""
    bias = "" if fan.bias else ", no bias"
    first, *_ = config.placement.maps(config)
    periodic = int(first.p_ratio * first.width)
    rows = f"{periodic} periodic and {first.width - 2 * periodic} linear rows{config.placement.rows_are_of}"
    return f"p_ratio {fan.p_ratio:g}{values}, placement {fan.placement}: {rows}{activation}{bias}"
