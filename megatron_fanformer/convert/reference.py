"""The authors' checkpoints: `config.yaml` with `model.safetensors` or `model.pt`, or their Hugging Face wrapper.

Field names and defaults are those of the reference's model configuration. Dropout and initialisation settings
are not read: they leave no trace in the weights.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import LazyTensors
from megatron_fanformer.convert.name_table import inferred_p_ratio, layer_row, names_in, vocabulary_multiple
from megatron_fanformer.convert.recognition import CONFIG_JSON
from megatron_fanformer.convert.weight_files import MODEL_PT, open_weights
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.placements import PLACEMENTS

WRAP_PREFIX = "model."
SEQUENTIAL, FANFORMER = "sequential", "fanformer"
OPTIMIZER_FILES = ("optim.pt", "optim.safetensors", "optim", "train.pt", "trainer.pt", "other.pt")
_REQUIRED = ("d_model", "n_heads", "n_layers", "vocab_size")
_WHOLE = (*_REQUIRED, "mlp_hidden_size", "embedding_size", "n_kv_heads", "max_sequence_length")
_NUMBERS = ("mlp_ratio", "rope_theta", "layer_norm_eps")

_RULES: dict[str, tuple[Any, Any, str]] = {
    "block_group_size": (1, 1, "grouped blocks have other tensor names"),
    "rope": (False, True, "positions are rotary"),
    "alibi": (False, False, "positions are rotary"),
    "layer_norm_type": ("default", "rms", "norms are RMSNorm"),
    "layer_norm_with_affine": (True, True, "norms have weights"),
    "bias_for_layer_norm": (False, False, "norms have no bias"),
    "attention_layer_norm": (False, False, "queries and keys are not normalized"),
    "embedding_layer_norm": (False, False, "embeddings are not normalized"),
    "norm_after": (False, False, "norms come before attention and MLP"),
    "activation_type": ("swiglu", "swiglu", "the MLP is SwiGLU"),
    "include_bias": (True, False, "only FAN has a bias"),
    "clip_qkv": (None, None, "queries, keys and values are not clipped"),
    "scale_logits": (False, False, "logits are not scaled"),
}
"""For each field: the reference's default, the one value that every FANformer here has, and why."""


def open_reference(folder: Path) -> tuple[FANformerConfig, LazyTensors]:
    """Return a checkpoint's configuration and its tensors under the reference's names, read one by one.

    p_ratio comes from the weights' shapes; so does whether FAN has a bias.

    Raises:
        InputError: not such a folder, or a model that FANformerConfig cannot express (all reasons at once).
        CorruptError: the weights cannot be read, have no FAN map where the configuration says they do, or disagree
            with its p_ratio.
    """
    fields = _stated_fields(folder)
    if problems := _problems(fields):
        raise InputError(f"the model in {folder} cannot be converted: {'; '.join(problems)}")
    tensors = _unwrapped(open_weights(folder))
    config = _config(fields, _fan(fields, tensors.meta))
    if problems := config.stated_problems():
        raise InputError(f"the model in {folder} cannot be built: {'; '.join(problems)}")
    return config, tensors


def stated_end_of_text_id(folder: Path) -> int | None:
    """Return the id that ends a text, if a checkpoint's configuration states one."""
    stated = _stated_fields(folder).get("eos_token_id")
    return stated if type(stated) is int else None


def beyond_reference(config: FANformerConfig) -> str | None:
    """Return what a model has that the format cannot express, as a phrase; None: nothing."""
    if config.placement.reference_fields is None:
        return f"{config.placement.in_words} (placement {config.fan.placement})"
    if config.rope_scaling.is_scaled:
        return f"scaled positions (rope_scaling {config.rope_scaling.rope_type})"
    if config.placement.is_fanformer and not config.fan.bias:
        return "FAN maps without a bias"
    return "norms of queries and keys (qk_layernorm)" if config.qk_layernorm else None


def optimizer_files(folder: Path) -> list[str]:
    """Return the reference trainer's files next to the weights; they are not converted."""
    return [name for name in OPTIMIZER_FILES if (folder / name).exists()]


def write_reference(
    folder: Path, config: FANformerConfig, tensors: Mapping[str, Tensor], end_of_text_id: int | None = None
) -> None:
    """Fill an empty folder for the authors' code and `open_reference`; `tensors` have the reference's names.

    All tensors are in memory at once. There is no safetensors file: the authors' trainer prefers one of this name to
    `model.pt`, and expects pickles for the names of its tensors.
    """
    text = yaml.safe_dump({"model": _fields(config, end_of_text_id)}, sort_keys=False)
    (folder / run_folder.CONFIG).write_text(text)
    # Cloned, for torch saves all of the memory that a tensor is a part of.
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    torch.save(copies, folder / MODEL_PT)


def _stated_fields(folder: Path) -> dict[str, Any]:
    """Return the model's fields: a full training configuration has them in a section, the wrapper at the top level."""
    path = next((folder / name for name in (run_folder.CONFIG, CONFIG_JSON) if (folder / name).is_file()), None)
    if path is None:
        raise InputError(
            f"{folder} is not a reference checkpoint, which must hold {run_folder.CONFIG} or {CONFIG_JSON}"
        )
    config = run_folder.read_mapping(path)
    section = config.get("model")
    return section if isinstance(section, dict) else config


def _problems(fields: Mapping[str, Any]) -> list[str]:
    problems = [f"it does not state {name}" for name in _REQUIRED if name not in fields] + _type_problems(fields)
    for name, (default, required, reason) in _RULES.items():
        value = fields.get(name, default)
        if value is None and name == "bias_for_layer_norm":
            value = fields.get("include_bias", True)
        if value != required:
            problems.append(f"{name} is {value!r} and must be {required!r}, since {reason}")
    if (block := fields.get("block_type", SEQUENTIAL)) not in (SEQUENTIAL, FANFORMER):
        problems.append(
            f"block_type is {block!r} and must be {SEQUENTIAL!r} or {FANFORMER!r}, since no other is supported"
        )
    if fields.get("attention_activation") not in (None, "none", "gelu"):
        problems.append(f"attention_activation is {fields['attention_activation']!r} and must be gelu or null")
    return problems + ([] if problems else _size_problems(fields))


def _type_problems(fields: Mapping[str, Any]) -> list[str]:
    whole = [name for name in _WHOLE if name in fields and type(fields[name]) is not int]
    wrong = [name for name in whole if name in _REQUIRED or fields[name] is not None]
    wrong += [name for name in _NUMBERS if name in fields and not _is_number(fields[name])]
    return [
        f"{name} is {fields[name]!r}, which is not {'an integer' if name in _WHOLE else 'a number'}" for name in wrong
    ]


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))  # strings are accepted: YAML 1.1 reads 1e-5 as one
    except (TypeError, ValueError):
        return False


def _size_problems(fields: Mapping[str, Any]) -> list[str]:
    problems = []
    heads, multi_query = fields.get("n_kv_heads"), fields.get("multi_query_attention")
    if None not in (heads, multi_query) and heads != (1 if multi_query else fields["n_heads"]):
        problems.append(f"n_kv_heads is {heads}, which contradicts multi_query_attention {multi_query}")
    if _mlp_size(fields) % 2:
        problems.append(
            f"mlp_hidden_size is {_mlp_size(fields)} and must be even, since it counts both halves of SwiGLU"
        )
    if _embedding_size(fields) < fields["vocab_size"]:
        problems.append(f"embedding_size is {_embedding_size(fields)}, less than vocab_size {fields['vocab_size']}")
    if float(fields.get("rope_theta", 10_000)) % 1:
        problems.append(f"rope_theta is {fields['rope_theta']} and must be a whole number")
    return problems


def _mlp_size(fields: Mapping[str, Any]) -> int:
    stated = fields.get("mlp_hidden_size")
    return int(float(fields.get("mlp_ratio", 4)) * fields["d_model"]) if stated is None else int(stated)


def _embedding_size(fields: Mapping[str, Any]) -> int:
    stated = fields.get("embedding_size", 50_304)
    return int(fields["vocab_size"] if stated is None else stated)


def _unwrapped(tensors: LazyTensors) -> LazyTensors:
    if not all(name.startswith(WRAP_PREFIX) for name in tensors):
        return tensors
    meta = {name.removeprefix(WRAP_PREFIX): tensor for name, tensor in tensors.meta.items()}
    return LazyTensors(meta, lambda name: tensors[WRAP_PREFIX + name])


def _fan(fields: Mapping[str, Any], shapes: Mapping[str, Tensor]) -> FANConfig:
    block_type = fields.get("block_type", SEQUENTIAL)
    own_fields = {"block_type": block_type, "use_ATF": bool(fields.get("use_ATF")) or block_type == FANFORMER}
    placement = next(each for each in PLACEMENTS.values() if each.reference_fields == own_fields)
    model = _config(fields, FANConfig(placement=placement.name))
    if model.stated_problems() or not placement.is_fanformer:  # the caller refuses problems
        return model.fan
    maps = placement.maps(model)
    names = [names_in(layer_row(placement.tensor(each.tensor)), 0, "reference")[0] for each in maps]
    if missing := [name for name in names if name not in shapes]:
        raise CorruptError(f"the configuration says that the model has FAN, but the weights have no {missing[0]}")
    stated = (fields.get("p_ratio"), None)  # they have no field for the p_ratio of the values' own layer
    rows, widths = [shapes[name].shape[0] for name in names], [each.width for each in maps]
    p_ratio, *others = map(inferred_p_ratio, rows, widths, stated)
    values = [own for own in others if int(own * widths[1]) != int(p_ratio * widths[1])]
    return FANConfig(
        p_ratio=p_ratio,
        activation="gelu" if fields.get("attention_activation") == "gelu" else "none",
        bias=names[0].replace(".weight", ".bias") in shapes,
        placement=placement.name,
        v_p_ratio=values[0] if values else None,
    )


def _config(fields: Mapping[str, Any], fan: FANConfig) -> FANformerConfig:
    vocab_size, embedding_size = fields["vocab_size"], _embedding_size(fields)
    return FANformerConfig(
        num_layers=fields["n_layers"],
        hidden_size=fields["d_model"],
        ffn_hidden_size=_mlp_size(fields) // 2,
        num_attention_heads=fields["n_heads"],
        num_query_groups=1 if fields.get("multi_query_attention") else fields.get("n_kv_heads"),
        vocab_size=vocab_size,
        make_vocab_size_divisible_by=vocabulary_multiple(vocab_size, embedding_size),
        seq_length=fields.get("max_sequence_length") or 1024,
        rotary_base=int(float(fields.get("rope_theta", 10_000))),
        layernorm_epsilon=float(fields.get("layer_norm_eps", 1e-5)),  # YAML 1.1 reads 1e-5 as a string
        untie_embeddings_and_output_weights=not fields.get("weight_tying", True),
        fan=fan,
    )


def _fields(config: FANformerConfig, end_of_text_id: int | None) -> dict[str, Any]:
    of_fan = config.placement.reference_fields
    assert of_fan is not None, "`convert` refuses a model that the authors have not"
    fields = {
        "block_type": of_fan["block_type"],
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_query_groups,
        "n_layers": config.num_layers,
        "mlp_hidden_size": 2 * config.ffn_hidden_size,
        "weight_tying": not config.untie_embeddings_and_output_weights,
        "rope_theta": config.rotary_base,
        "layer_norm_eps": config.layernorm_epsilon,
        "max_sequence_length": config.seq_length,
        "vocab_size": config.vocab_size,
        "embedding_size": config.padded_vocab_size,
        "use_ATF": of_fan["use_ATF"],
        "p_ratio": config.fan.p_ratio,
        "attention_activation": None if config.fan.activation == "none" else config.fan.activation,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_layer_norm_with_affine": False,
        "init_fn": "mitchell",
        **{name: required for name, (_, required, _) in _RULES.items()},
    }
    return fields if end_of_text_id is None else {**fields, "eos_token_id": end_of_text_id}
