"""Arguments of Megatron-LM by the names of its parser: the model's fields, and the refusal of other models.

They come from a checkpoint (`megatron_lm.py`), or from a command line (`train/megatron_arguments.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_fanformer.convert import foreign_names
from megatron_fanformer.model.config import FANformerConfig

MOST_SHOWN = 80  # characters of a wrong value
SECTIONS = ("fan", "rope_scaling")
FIELDS = tuple(field.name for field in dataclasses.fields(FANformerConfig) if field.name not in SECTIONS)
Arguments = Mapping[str, Any]
SPECS = (
    ["megatron_fanformer.model.layer_spec", "fanformer_layer_spec"],
    ["megatron_fanformer.model.hybrid_spec", "fanformer_stack_spec"],
)
"""Ours, as `--spec` names them."""

RULES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "swiglu": ("--swiglu", (True,)),
    "glu_linear_offset": ("--glu-linear-offset", (0.0, None)),
    "activation_func_clamp_value": ("--activation-func-clamp-value", (None,)),
    "normalization": ("--normalization", ("RMSNorm",)),
    "apply_layernorm_1p": ("--apply-layernorm-1p", (False,)),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", (False,)),
    "apply_residual_connection_post_layernorm": ("--apply-residual-connection-post-layernorm", (False,)),
    "position_embedding_type": ("--position-embedding-type", ("rope",)),
    "no_rope_freq": ("--no-rope-freq", (None,)),
    "rotary_percent": ("--rotary-percent", (1.0,)),
    "rotary_interleaved": ("--rotary-interleaved", (False,)),
    "use_rope_scaling": ("--use-rope-scaling", (False,)),
    "softmax_type": ("--softmax-type", ("vanilla",)),
    "window_size": ("--window-size", (None,)),
    "add_bias_linear": ("--disable-bias-linear", (False,)),
    "add_qkv_bias": ("--add-qkv-bias", (False,)),
    "mtp_num_layers": ("--mtp-num-layers", (None, 0)),
    "use_mup": ("--use-mup", (False,)),
    "qk_l2_norm": ("--qk-l2-norm", (False,)),
    "num_experts": ("--num-experts", (None, 0)),
    "multi_latent_attention": ("--multi-latent-attention", (False,)),
}
"""By argument: its flag, whose reason `foreign_names` has, and what it must be, as every model here is built.

But for `LAYERS`, no tensor would show it. The first is taken where a version of Megatron-LM has no such argument.
"""
LAYERS = ("num_experts", "multi_latent_attention")  # which a --spec states in their place; ours has neither
DROPOUT = ("hidden_dropout", "attention_dropout")  # leaves no trace in a model that does not train


def problems(arguments: Arguments) -> list[str]:
    """Return why there is no such model here, a clause for each argument."""
    reasons = [
        _problem(name, arguments[name], flag)
        for name, (flag, required) in RULES.items()
        if arguments.get(name, required[0]) not in required and not (name in LAYERS and arguments.get("spec"))
    ]
    width, heads, size = (arguments.get(name) for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    if type(width) is type(heads) is type(size) is int and width != heads * size:
        reasons.append(_problem("kv_channels", size, "--kv-channels"))
    return reasons


def _problem(name: str, value: Any, flag: str) -> str:
    row = foreign_names.row_of(foreign_names.plain(flag))
    assert row is not None, flag
    return f"{name} ({flag}) is {value!r:.{MOST_SHOWN}}, but {row.note}"


def model_fields(arguments: Arguments) -> dict[str, Any]:
    """Return the model's fields, but for `fan`: under the same names, or those that `foreign_names` has for them."""
    rows = [row for row in foreign_names.MEGATRON_LM["Model"] if row.field]
    others = {row.field: foreign_names.plain(row.names.split()[-1]) for row in reversed(rows)}
    values = {name: arguments.get(name, arguments.get(others[f"model.{name}"])) for name in FIELDS}
    if not arguments.get("group_query_attention"):
        values["num_query_groups"] = None  # Megatron-LM's own default of 1 has no effect then
    if (factor := arguments.get("rotary_seq_len_interpolation_factor")) not in (None, 1):
        values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return {name: value for name, value in values.items() if value is not None}
