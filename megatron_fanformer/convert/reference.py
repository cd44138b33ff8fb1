"""Reads and writes the authors' checkpoints, `config.yaml` with `model.safetensors` or `model.pt`.

Folders of the authors' Hugging Face wrapper are read, too. Field names and defaults are those of the reference's model
configuration. Settings of dropout and initialization are not read: they do not change what trained weights compute.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
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

WRAP_PREFIX = "model."  # of names in weights of the authors' Hugging Face wrapper
SEQUENTIAL, FANFORMER = "sequential", "fanformer"
OPTIMIZER_FILES = ("optim.pt", "optim.safetensors", "optim", "train.pt", "trainer.pt", "other.pt")  # not converted
Fields = Mapping[str, Any]


class _Sizes(msgspec.Struct, kw_only=True):
    """The model's sizes, as the authors state them."""

    d_model: int
    n_heads: int
    n_layers: int
    vocab_size: int
    n_kv_heads: int | None = None
    multi_query_attention: bool | None = None
    mlp_hidden_size: int | None = None  # of both halves of SwiGLU together
    mlp_ratio: float = 4
    embedding_size: int | None = 50_304
    max_sequence_length: int | None = None
    rope_theta: float = 10_000
    layer_norm_eps: float = 1e-5
    weight_tying: bool = True

    @property
    def mlp_size(self) -> int:
        return int(self.mlp_ratio * self.d_model) if self.mlp_hidden_size is None else self.mlp_hidden_size

    @property
    def embedding_rows(self) -> int:
        return self.vocab_size if self.embedding_size is None else self.embedding_size

    def problems(self) -> list[str]:
        """Return a clause for each number that no model here can have."""
        numbers = {"mlp_ratio": self.mlp_ratio, "rope_theta": self.rope_theta, "layer_norm_eps": self.layer_norm_eps}
        problems = [f"{name} is {number}" for name, number in numbers.items() if not math.isfinite(number)]
        if not problems and self.rope_theta % 1:
            problems.append(f"rope_theta is {self.rope_theta} and must be a whole number")
        return problems


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
"""By field: the reference's default, the only value that can be converted, and the reason."""


def open_reference(folder: Path) -> tuple[FANformerConfig, LazyTensors]:
    """Return a checkpoint's configuration and its tensors, which keep the reference's names and load on access.

    The weights' shapes give p_ratio if the configuration does not state it; their names tell whether FAN has a bias.

    Raises:
        InputError: the folder holds no checkpoint of the authors, or FANformerConfig cannot express the model.
        CorruptError: the weights cannot be read, lack a FAN map that the configuration states, or contradict p_ratio.
    """
    fields = _stated_fields(folder)
    try:
        sizes = msgspec.convert(dict(fields), _Sizes, strict=False)  # YAML 1.1 reads 1e-5 as text
    except msgspec.ValidationError as error:
        raise InputError(f"the model in {folder} cannot be converted: {error}") from None
    if problems := _problems(fields) + sizes.problems():
        raise InputError(f"the model in {folder} cannot be converted: {'; '.join(problems)}")
    tensors = _strip_wrap_prefix(open_weights(folder))
    config = _model_config(sizes, _fan_config(fields, sizes, tensors.meta))
    if problems := config.stated_problems():
        raise InputError(f"the model in {folder} cannot be built: {'; '.join(problems)}")
    return config, tensors


def stated_end_of_text_id(folder: Path) -> int | None:
    """Return the id that ends a text; None if the checkpoint's configuration states none."""
    stated = _stated_fields(folder).get("eos_token_id")
    return stated if type(stated) is int else None


def unsupported_part(config: FANformerConfig) -> str | None:
    """Return a phrase for a part of the model that the authors' format cannot express; None if there is none."""
    if config.placement.reference_fields is None:
        return f"{config.placement.description} (placement {config.fan.placement})"
    if config.rope_scaling.is_scaled:
        return f"scaled positions (rope_scaling {config.rope_scaling.rope_type})"
    if config.placement.is_fanformer and not config.fan.bias:
        return "FAN maps without a bias"
    return "norms of queries and keys (qk_layernorm)" if config.qk_layernorm else None


def write_reference(
    folder: Path, config: FANformerConfig, tensors: Mapping[str, Tensor], end_of_text_id: int | None = None
) -> None:
    """Write a checkpoint for the authors' code into an empty folder; `tensors` have the reference's names.

    All tensors are in memory at once. No safetensors file is written: the authors' trainer would prefer it to
    `model.pt`, and expect pickles as the names of its tensors.
    """
    text = yaml.safe_dump({"model": _reference_fields(config, end_of_text_id)}, sort_keys=False)
    (folder / run_folder.CONFIG).write_text(text)
    # Cloned: torch.save would write all of the memory that a tensor is a part of.
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    torch.save(copies, folder / MODEL_PT)


def _stated_fields(folder: Path) -> dict[str, Any]:
    """Return the model's fields: section `model` of a training configuration, or the wrapper's whole config.json."""
    path = folder / run_folder.CONFIG
    config = run_folder.read_mapping(path if path.is_file() else folder / CONFIG_JSON)
    section = config.get("model")
    return section if isinstance(section, dict) else config


def _problems(fields: Fields) -> list[str]:
    """Return a clause for each field that states a property which no model here can have."""
    problems = []
    for name, (default, required, reason) in _RULES.items():
        value = fields.get(name, default)
        if value is None and name == "bias_for_layer_norm":
            value = fields.get("include_bias", True)  # as the authors' code reads null
        if value != required:
            problems.append(f"{name} is {value!r} and must be {required!r}, since {reason}")
    if (block := fields.get("block_type", SEQUENTIAL)) not in (SEQUENTIAL, FANFORMER):
        problems.append(
            f"block_type is {block!r} and must be {SEQUENTIAL!r} or {FANFORMER!r}, since no other is supported"
        )
    if fields.get("attention_activation") not in (None, "none", "gelu"):
        problems.append(f"attention_activation is {fields['attention_activation']!r} and must be gelu or null")
    return problems


def _strip_wrap_prefix(tensors: LazyTensors) -> LazyTensors:
    """Return the tensors; if all their names begin with the wrapper's prefix, under names without this prefix."""
    if not all(name.startswith(WRAP_PREFIX) for name in tensors):
        return tensors
    meta = {name.removeprefix(WRAP_PREFIX): tensor for name, tensor in tensors.meta.items()}
    return LazyTensors(meta, lambda name: tensors[WRAP_PREFIX + name])


def _fan_config(fields: Fields, sizes: _Sizes, shapes: Mapping[str, Tensor]) -> FANConfig:
    """Return FAN's configuration: the placement from the fields, ratios and bias from the first layer's FAN maps."""
    block_type = fields.get("block_type", SEQUENTIAL)
    stated = {"block_type": block_type, "use_ATF": bool(fields.get("use_ATF")) or block_type == FANFORMER}
    placement = next(placement for placement in PLACEMENTS.values() if placement.reference_fields == stated)
    model = _model_config(sizes, FANConfig(placement=placement.name))
    if model.stated_problems() or not placement.is_fanformer:  # open_reference reports the problems
        return model.fan
    maps = placement.maps(model)  # one map for queries, keys and values; or one for queries and keys, one for values
    names = [names_in(layer_row(placement.tensor(fan_map.tensor)), 0, "reference")[0] for fan_map in maps]
    ratios: list[float] = []
    for name, fan_map in zip(names, maps, strict=True):
        if name not in shapes:
            raise CorruptError(f"the configuration says that the model has FAN, but the weights have no {name}")
        stated_ratio = fields.get("p_ratio") if fan_map is maps[0] else None  # no field states that of values
        ratios.append(inferred_p_ratio(shapes[name].shape[0], fan_map.width, stated_ratio))
    # v_p_ratio is needed only if p_ratio would give the map for values another number of periodic rows.
    differs_for_values = int(ratios[-1] * maps[-1].width) != int(ratios[0] * maps[-1].width)
    return FANConfig(
        p_ratio=ratios[0],
        activation="gelu" if fields.get("attention_activation") == "gelu" else "none",
        bias=names[0].replace(".weight", ".bias") in shapes,
        placement=placement.name,
        v_p_ratio=ratios[-1] if differs_for_values else None,
    )


def _model_config(sizes: _Sizes, fan: FANConfig) -> FANformerConfig:
    return FANformerConfig(
        num_layers=sizes.n_layers,
        hidden_size=sizes.d_model,
        ffn_hidden_size=sizes.mlp_size // 2,  # `mlp_size` is of gate and up together
        num_attention_heads=sizes.n_heads,
        num_query_groups=1 if sizes.multi_query_attention else sizes.n_kv_heads,
        vocab_size=sizes.vocab_size,
        make_vocab_size_divisible_by=vocabulary_multiple(sizes.vocab_size, sizes.embedding_rows),
        seq_length=sizes.max_sequence_length or 1024,  # the reference's default
        rotary_base=int(sizes.rope_theta),
        layernorm_epsilon=sizes.layer_norm_eps,
        untie_embeddings_and_output_weights=not sizes.weight_tying,
        fan=fan,
    )


def _reference_fields(config: FANformerConfig, end_of_text_id: int | None) -> dict[str, Any]:  # by authors' names
    fan = config.placement.reference_fields
    assert fan is not None, "`convert` refuses a model that the format cannot express"
    fields = {
        "block_type": fan["block_type"],
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
        "use_ATF": fan["use_ATF"],
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
