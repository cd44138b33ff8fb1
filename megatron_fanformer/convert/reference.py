"""The authors' checkpoints: `config.yaml` with `model.safetensors` or `model.pt`, or their Hugging Face wrapper.

Field names and defaults are those of the reference's model configuration. Settings of dropout and initialisation leave
no trace in the weights, and are not read.
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

WRAP_PREFIX = "model."
SEQUENTIAL, FANFORMER = "sequential", "fanformer"
OPTIMIZER_FILES = ("optim.pt", "optim.safetensors", "optim", "train.pt", "trainer.pt", "other.pt")
Fields = Mapping[str, Any]


class _Sizes(msgspec.Struct, kw_only=True):
    """The model's sizes, as the authors state them."""

    d_model: int
    n_heads: int
    n_layers: int
    vocab_size: int
    n_kv_heads: int | None = None
    multi_query_attention: bool | None = None
    mlp_hidden_size: int | None = None
    """Both halves of SwiGLU."""
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
"""For each field: the reference's default, the one value that every FANformer here has, and the reason."""


def open_reference(folder: Path) -> tuple[FANformerConfig, LazyTensors]:
    """Return a checkpoint's configuration and its tensors under the reference's names, read one by one.

    p_ratio comes from the weights' shapes; so does whether FAN has a bias.

    Raises:
        InputError: not such a folder, or a model that FANformerConfig cannot express.
        CorruptError: the weights cannot be read, have no FAN map where the configuration says they do, or disagree
            with its p_ratio.
    """
    fields = _stated_fields(folder)
    try:
        sizes = msgspec.convert(dict(fields), _Sizes, strict=False)  # YAML 1.1 reads 1e-5 as text
    except msgspec.ValidationError as error:
        raise InputError(f"the model in {folder} cannot be converted: {error}") from None
    if problems := _problems(fields) + sizes.problems():
        raise InputError(f"the model in {folder} cannot be converted: {'; '.join(problems)}")
    tensors = _unwrapped(open_weights(folder))
    config = _config(sizes, _fan(fields, sizes, tensors.meta))
    if problems := config.stated_problems():
        raise InputError(f"the model in {folder} cannot be built: {'; '.join(problems)}")
    return config, tensors


def stated_end_of_text_id(folder: Path) -> int | None:
    """Return the id that ends a text, if a checkpoint's configuration states one."""
    stated = _stated_fields(folder).get("eos_token_id")
    return stated if type(stated) is int else None


def beyond_reference(config: FANformerConfig) -> str | None:
    """Return a phrase for a part of the model that the format cannot express; None if there is none."""
    if config.placement.reference_fields is None:
        return f"{config.placement.description} (placement {config.fan.placement})"
    if config.rope_scaling.is_scaled:
        return f"scaled positions (rope_scaling {config.rope_scaling.rope_type})"
    if config.placement.is_fanformer and not config.fan.bias:
        return "FAN maps without a bias"
    return "norms of queries and keys (qk_layernorm)" if config.qk_layernorm else None


def optimizer_files(folder: Path) -> list[str]:
    """Return the names of the reference trainer's files next to the weights; they are not converted."""
    return [name for name in OPTIMIZER_FILES if (folder / name).exists()]


def write_reference(
    folder: Path, config: FANformerConfig, tensors: Mapping[str, Tensor], end_of_text_id: int | None = None
) -> None:
    """Write an empty folder for the authors' code and `open_reference`; `tensors` have the reference's names.

    All tensors are in memory at once. There is no safetensors file: the authors' trainer prefers one of this name to
    `model.pt`, and expects pickles for the names of its tensors.
    """
    text = yaml.safe_dump({"model": _fields(config, end_of_text_id)}, sort_keys=False)
    (folder / run_folder.CONFIG).write_text(text)
    # Cloned, for torch saves all of the memory that a tensor is a part of.
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    torch.save(copies, folder / MODEL_PT)


def _stated_fields(folder: Path) -> dict[str, Any]:
    """Return the model's fields: in a section of a training configuration, or at the top level of the wrapper's."""
    path = folder / run_folder.CONFIG
    path = path if path.is_file() else folder / CONFIG_JSON
    config = run_folder.read_mapping(path)
    section = config.get("model")
    return section if isinstance(section, dict) else config


def _problems(fields: Fields) -> list[str]:
    """Return a clause for each field of a model that cannot be expressed here."""
    problems = []
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
    return problems


def _unwrapped(tensors: LazyTensors) -> LazyTensors:
    if not all(name.startswith(WRAP_PREFIX) for name in tensors):
        return tensors
    meta = {name.removeprefix(WRAP_PREFIX): tensor for name, tensor in tensors.meta.items()}
    return LazyTensors(meta, lambda name: tensors[WRAP_PREFIX + name])


def _fan(fields: Fields, sizes: _Sizes, shapes: Mapping[str, Tensor]) -> FANConfig:
    block_type = fields.get("block_type", SEQUENTIAL)
    stated_fan = {"block_type": block_type, "use_ATF": bool(fields.get("use_ATF")) or block_type == FANFORMER}
    placement = next(known for known in PLACEMENTS.values() if known.reference_fields == stated_fan)
    model = _config(sizes, FANConfig(placement=placement.name))
    if model.stated_problems() or not placement.is_fanformer:  # the caller refuses problems
        return model.fan
    maps = placement.maps(model)
    names = [names_in(layer_row(placement.tensor(fan_map.tensor)), 0, "reference")[0] for fan_map in maps]
    if missing := [name for name in names if name not in shapes]:
        raise CorruptError(f"the configuration says that the model has FAN, but the weights have no {missing[0]}")
    stated = (fields.get("p_ratio"), None)  # there is no field for the p_ratio of the values' FAN layer
    rows, widths = [shapes[name].shape[0] for name in names], [fan_map.width for fan_map in maps]
    p_ratio, *value_ratios = map(inferred_p_ratio, rows, widths, stated)
    v_p_ratio = next((ratio for ratio in value_ratios if int(ratio * widths[1]) != int(p_ratio * widths[1])), None)
    return FANConfig(
        p_ratio=p_ratio,
        activation="gelu" if fields.get("attention_activation") == "gelu" else "none",
        bias=names[0].replace(".weight", ".bias") in shapes,
        placement=placement.name,
        v_p_ratio=v_p_ratio,
    )


def _config(sizes: _Sizes, fan: FANConfig) -> FANformerConfig:
    return FANformerConfig(
        num_layers=sizes.n_layers,
        hidden_size=sizes.d_model,
        ffn_hidden_size=sizes.mlp_size // 2,
        num_attention_heads=sizes.n_heads,
        num_query_groups=1 if sizes.multi_query_attention else sizes.n_kv_heads,
        vocab_size=sizes.vocab_size,
        make_vocab_size_divisible_by=vocabulary_multiple(sizes.vocab_size, sizes.embedding_rows),
        seq_length=sizes.max_sequence_length or 1024,
        rotary_base=int(sizes.rope_theta),
        layernorm_epsilon=sizes.layer_norm_eps,
        untie_embeddings_and_output_weights=not sizes.weight_tying,
        fan=fan,
    )


def _fields(config: FANformerConfig, end_of_text_id: int | None) -> dict[str, Any]:
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
