"""The rows that describe a model's shape, whatever its format."""

from typing import Any

from megatron_fanformer.model.config import FANformerConfig


def model_rows(config: FANformerConfig) -> list[tuple[str, str]]:
    """Sizes, FAN and parameters, for people."""
    heads = f"{config.num_attention_heads} heads"
    if config.query_groups != config.num_attention_heads:
        heads += f", {config.query_groups} query groups"
    head = "untied head" if config.untie_embeddings_and_output_weights else "tied head"
    return [
        ("model", f"{_name(config)}: {config.num_layers} layers, h {config.hidden_size}, {heads}"),
        ("", f"d_ff {config.ffn_hidden_size}, sequences of {config.seq_length} tokens, {head}"),
        ("", f"vocabulary {config.vocab_size:,}, padded to {config.padded_vocab_size:,}"),
        ("FAN", _fan(config)),
        ("parameters", f"{config.num_parameters:,}"),
    ]


def model_facts(config: FANformerConfig) -> dict[str, Any]:
    """What `model_rows` says that a configuration does not state, for programs."""
    return {"parameters": config.num_parameters, "padded_vocab_size": config.padded_vocab_size}


def _name(config: FANformerConfig) -> str:
    if config.fan.in_ffn:
        return "Transformer with FAN layers for its MLP"
    return "FANformer" if config.has_fan else "Transformer"


def _fan(config: FANformerConfig) -> str:
    fan = config.fan
    if fan.placement == "none":
        return "none"
    values = f", of the values {fan.v_p_ratio:g}" if fan.v_p_ratio is not None else ""
    activation = f", activation {fan.activation}" if fan.activation != "none" else ""
    bias = "" if fan.bias else ", no bias"
    width = config.ffn_hidden_size if fan.in_ffn else config.hidden_size
    periodic = int(fan.p_ratio * width)
    rows = f"{periodic} periodic and {width - 2 * periodic} linear rows{' in the first layer' * fan.in_ffn}"
    return f"p_ratio {fan.p_ratio:g}{values}, placement {fan.placement}: {rows}{activation}{bias}"
