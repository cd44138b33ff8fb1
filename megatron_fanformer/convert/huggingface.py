"""Exports, which are folders that transformers opens: writes them, and reads them back.

An export holds the model's code, a verbatim copy of `megatron_fanformer.hf`, so that `trust_remote_code=True` opens it
where this package is not installed.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig

from megatron_fanformer.checkpoint.full_tensors import LazyTensors, meta_of
from megatron_fanformer.convert.model_card import Extras, model_card
from megatron_fanformer.convert.name_table import inferred_p_ratio, layer_row, names_in
from megatron_fanformer.convert.recognition import CONFIG_JSON, recognize
from megatron_fanformer.convert.tokenizer_files import check_fits, write_tokenizer
from megatron_fanformer.convert.weight_files import open_weights, write_shards
from megatron_fanformer.errors import InputError
from megatron_fanformer.hf import FANformerConfig as HuggingFaceConfig
from megatron_fanformer.hf import configuration_fanformer, modeling_fanformer
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.placements import PLACEMENTS
from megatron_fanformer.model.rope_scaling import RopeScalingConfig

AUTO_MAP = {
    "AutoConfig": "configuration_fanformer.FANformerConfig",
    "AutoModel": "modeling_fanformer.FANformerModel",
    "AutoModelForCausalLM": "modeling_fanformer.FANformerForCausalLM",
}
SAME_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
    "use_qk_norm": "qk_layernorm",
}
"""Names of our fields by transformers' names, for the fields whose values are the same in both."""
_PLAIN, _YARN = {"rope_theta", "rope_type"}, {field.name for field in dataclasses.fields(RopeScalingConfig)}
ROPE_KEYS = {"default": _PLAIN, "linear": _PLAIN | {"factor"}, "yarn": _PLAIN | _YARN}
"""The keys of transformers' `rope_parameters` that the trainer supports, by `rope_type`."""


def write_huggingface(folder: Path, config: FANformerConfig, tensors: Mapping[str, Tensor], extras: Extras) -> None:
    """Write an export into an empty folder; `tensors` have transformers' names, and are requested one at a time.

    Raises:
        InputError: the tokenizer cannot be written or does not fit the model, or the shard size is invalid.
    """
    end_id = extras.end_of_text_id
    end_ids = [] if end_id is None else [end_id]
    if extras.tokenizer is not None:
        size, end_ids = write_tokenizer(folder, extras, model_max_length=config.seq_length)
        check_fits(extras.tokenizer, size, config.vocab_size)
    hf_config = to_huggingface_config(config, end_id)
    hf_config.architectures = ["FANformerForCausalLM"]
    hf_config.auto_map = AUTO_MAP
    hf_config.dtype = next(iter(meta_of(tensors).values())).dtype
    hf_config.to_json_file(str(folder / CONFIG_JSON), use_diff=False)
    GenerationConfig(eos_token_id=end_ids if len(end_ids) > 1 else end_id, pad_token_id=end_id).save_pretrained(folder)
    for module in (configuration_fanformer, modeling_fanformer):
        shutil.copyfile(str(module.__file__), folder / Path(str(module.__file__)).name)
    write_shards(folder, tensors, max_shard_size=extras.max_shard_size)
    (folder / "README.md").write_text(model_card(config, extras), encoding="utf-8")


def open_huggingface(folder: Path) -> tuple[FANformerConfig, LazyTensors]:
    """Return the configuration and the tensors of an export; the tensors keep transformers' names, and load on access.

    The configuration pads the vocabulary to Megatron's usual multiple, since an export records none.

    Raises:
        InputError: the folder holds no FANformer for transformers, or its configuration is impossible.
        CorruptError: the configuration or the weights cannot be read, or the weights contradict the stated p_ratio.
    """
    stated = _read_config(folder)
    tensors = open_weights(folder)
    return _checked_config(folder, stated, tensors), tensors


def stated_model(folder: Path) -> tuple[FANformerConfig, torch.dtype, int | None]:
    """Read a folder's config.json: return the model, the weights' type (float32 by default) and the end-of-text id.

    The weights are not read, and need not exist.

    Raises:
        InputError: the folder holds no FANformer for transformers, or its configuration is impossible.
        CorruptError: the configuration cannot be read.
    """
    stated = _read_config(folder)
    dtype = stated.dtype if isinstance(stated.dtype, torch.dtype) else torch.float32
    end_id = stated.eos_token_id if isinstance(stated.eos_token_id, int) else None
    return _checked_config(folder, stated, {}), dtype, end_id


def _read_config(folder: Path) -> HuggingFaceConfig:
    """Return transformers' configuration in a folder; raise InputError or CorruptError as `stated_model` does."""
    recognize(folder, ("hf",))
    try:
        return HuggingFaceConfig.from_pretrained(folder)
    except Exception as error:  # transformers' own checks may raise anything
        raise InputError(f"the model in {folder} cannot be built: {' '.join(str(error).split())}") from error


def _checked_config(folder: Path, stated: HuggingFaceConfig, tensors: Mapping[str, Tensor]) -> FANformerConfig:
    """Check transformers' configuration, its p_ratio also against the FAN maps in `tensors`, and return ours."""
    rope = stated.rope_parameters
    base, rope_type = rope["rope_theta"], rope["rope_type"]
    if not isinstance(base, int | float) or base % 1:
        raise InputError(f"the model in {folder} has rope_theta {base}, which must be a whole number")
    if rope_type not in ROPE_KEYS:
        raise InputError(
            f"the model in {folder} has rope_parameters with rope_type {rope_type!r}; it must be one of "
            f"{', '.join(ROPE_KEYS)}"
        )
    if unknown := rope.keys() - ROPE_KEYS[rope_type]:
        raise InputError(
            f"the model in {folder} has rope_parameters with {', '.join(sorted(unknown))}; rope_type {rope_type} takes "
            f"only {', '.join(sorted(ROPE_KEYS[rope_type]))}"
        )
    config, meta = from_huggingface_config(stated), meta_of(tensors)
    if problems := config.stated_problems():
        raise InputError(f"the model in {folder} cannot be built: {'; '.join(problems)}")
    for fan_map in config.placement.maps(config):
        (name,) = names_in(layer_row(config.placement.tensor(fan_map.tensor)), 0, "hf")  # in the first layer
        if name in meta:  # raises CorruptError if the stated p_ratio gives another number of rows
            inferred_p_ratio(meta[name].shape[0], fan_map.width, fan_map.p_ratio, fan_map.field)
    return config


def to_huggingface_config(config: FANformerConfig, end_of_text_id: int | None = None) -> HuggingFaceConfig:
    """Return transformers' configuration of the same model, without vocabulary padding."""
    scaling, default = dataclasses.asdict(config.rope_scaling), dataclasses.asdict(RopeScalingConfig())
    changed_scaling = {name: value for name, value in scaling.items() if value != default[name]}
    return HuggingFaceConfig(
        **{theirs: getattr(config, ours) for theirs, ours in SAME_FIELDS.items()},
        num_key_value_heads=config.query_groups,
        rope_parameters={"rope_theta": float(config.rotary_base), **changed_scaling},
        p_ratio=config.fan.p_ratio,
        fan_activation=config.fan.activation,
        fan_bias=config.fan.bias,
        fan_placement=config.fan.placement,
        **({"v_p_ratio": config.fan.value_p_ratio} if config.placement.has_own_values else {}),
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
        eos_token_id=end_of_text_id,
        pad_token_id=end_of_text_id,
    )


def from_huggingface_config(stated: HuggingFaceConfig) -> FANformerConfig:
    """Return our configuration of the same model; the vocabulary is padded to Megatron's usual multiple."""
    v_p_ratio = stated.value_p_ratio if PLACEMENTS[stated.fan_placement].has_own_values else None
    fan = FANConfig(
        p_ratio=stated.p_ratio,
        activation="gelu" if stated.fan_activation == "gelu" else "none",
        bias=stated.fan_bias,
        placement=stated.fan_placement,
        v_p_ratio=None if v_p_ratio == stated.p_ratio else v_p_ratio,
    )
    scaling = {name: value for name, value in stated.rope_parameters.items() if name != "rope_theta"}
    return FANformerConfig(
        **{ours: getattr(stated, theirs) for theirs, ours in SAME_FIELDS.items()},
        num_query_groups=stated.num_key_value_heads,
        rotary_base=int(stated.rope_parameters["rope_theta"]),
        rope_scaling=RopeScalingConfig(**scaling),
        untie_embeddings_and_output_weights=not stated.tie_word_embeddings,
        fan=fan,
    )
