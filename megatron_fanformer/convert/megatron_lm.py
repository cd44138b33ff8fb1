"""Reads checkpoints of stock Megatron-LM in its format `torch_dist`, of a FANformer by a layer spec or a Transformer.

    latest_checkpointed_iteration.txt    the iteration of the latest
    iter_0001000/.metadata, *.distcp     table and tensors, as in our own checkpoints
    iter_0001000/common.pt               the parsed arguments, and the progress; from megatron-core 0.19 on they are
                                         among the tensors

There are four differences from our checkpoints. Layers are stacked along a first axis, in one tensor of each kind,
unless Megatron-LM was set to keep them apart. In Megatron-LM's own layers, Transformer Engine fuses a norm into the
linear map that follows, and the norm's name begins with the map's. In a HybridModel each of our layers is two,
attention and MLP (`*-` repeated in --hybrid-layer-pattern), and the final norm has another name. No file states the
model: its fields are in the arguments, and its FAN in the layer spec, which is code.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_fanformer.checkpoint.data_files import Record, read_records
from megatron_fanformer.checkpoint.full_tensors import LazyTensors, StoredTensors
from megatron_fanformer.checkpoint.stored_files import (
    METADATA,
    SavedProgress,
    check_format,
    check_parts,
    common_values,
    read_table,
    stored_parts,
)
from megatron_fanformer.configuration import read_values
from megatron_fanformer.convert.megatron_names import SPECS, Arguments, model_fields, model_problems
from megatron_fanformer.convert.name_table import vocabulary_multiple
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANformerConfig

LAYER = re.compile(r"decoder\.layers\.(?:(?P<number>\d{1,9})\.)?(?P<suffix>.+)", re.ASCII)  # stacked: no number
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.", re.ASCII)
EMBEDDING = "embedding.word_embeddings.weight"
FUSED_NORM = ".layer_norm_weight"
HYBRID_NORM, OUR_NORM = "decoder.final_norm.weight", "decoder.final_layernorm.weight"
HALVES = (("input_layernorm.", "self_attention."), ("pre_mlp_layernorm.", "mlp."))
"""Prefixes of tensors in a hybrid stack's even and odd layers, where attention and MLP alternate."""
LEFT_OUT = "not converted: the optimizer's state; training on the converted weights starts with a fresh one"


def open_megatron_lm(
    folder: Path, config: Path | None = None
) -> tuple[FANformerConfig, LazyTensors, tuple[str, ...], SavedProgress | None]:
    """Read the checkpoint of one iteration.

    Args:
        config: a configuration file, whose section `model` overrides the checkpoint's fields.

    Returns:
        The model; its tensors under our names, those of each layer apart, read on request; notes on the conversion; and
        the progress of the training, None if the checkpoint does not state it.

    Raises:
        InputError: the model cannot be built here (the message has all reasons), or a field of the model is missing.
        CorruptError: the checkpoint is damaged.
    """
    check_format(folder)
    table = read_table(folder)
    stored = StoredTensors(folder, table)
    weights = [name for name in stored.described if not OPTIMIZER.match(name)]
    _, common = common_values(folder, table, read_records)
    namespace = common.get("args") if isinstance(common, dict) else None  # Megatron-LM can save without arguments
    arguments = namespace.state if isinstance(namespace, Record) and isinstance(namespace.state, dict) else {}
    stated = read_values(config).get("model") if config else {}
    if not isinstance(stated, dict):
        raise InputError(f"{config} has no section model with fields; write those that the checkpoint lacks into it")
    if reasons := model_problems(arguments):  # before tensors are read: those of another model would look like damage
        raise InputError(
            f"the model in {folder} cannot be converted: {'; '.join(reasons)}; it runs in Megatron-LM alone"
        )
    tensors = _unstack_layers(folder, stored, weights)
    num_layers = arguments.get("num_layers")
    if HYBRID_NORM in weights and type(num_layers) is int:
        arguments = {**arguments, "num_layers": num_layers // 2}  # two layers of a HybridModel are one of ours
    model = _model_config(folder, arguments, stated, tensors.meta)
    weight_names = set(weights)
    check_parts(folder, (part for part in stored_parts(table) if part.name in weight_names))
    notes: tuple[str, ...] = (LEFT_OUT,) if len(weights) < len(stored.described) else ()
    if arguments.get("vocab_size") is None and "vocab_size" not in stated:
        notes += (
            "the arguments do not say how many rows of the embedding are token ids (--vocab-size): all are taken for "
            "ids; if some are padding, state model.vocab_size by --config FILE",
        )
    iteration = common.get("iteration") if isinstance(common, dict) else None
    samples = arguments.get("consumed_train_samples")
    progress = SavedProgress(iteration, samples) if type(iteration) is type(samples) is int else None
    return model, tensors, notes, progress


# -- tensors


def _unstack_layers(folder: Path, stored: StoredTensors, weights: list[str]) -> LazyTensors:
    """Return the weights under our names, each layer's apart; a stacked tensor is read layer by layer."""
    places: dict[str, tuple[str, int | None]] = {}  # by our name: the stored name, and the index in a stack if stacked
    is_hybrid = HYBRID_NORM in weights
    for name in weights:
        match = LAYER.fullmatch(name)
        if match is None:
            places[OUR_NORM if name == HYBRID_NORM else name] = name, None
        elif match["number"] is not None:
            number = int(match["number"])
            if is_hybrid and not match["suffix"].startswith(HALVES[number % 2]):
                raise InputError(
                    f"the model in {folder} has {name}: its layers are not attention and MLP in turn (`*-` repeated in "
                    "--hybrid-layer-pattern), as a FANformer's are; it runs in Megatron-LM alone"
                )
            places[_our_name(number // 2 if is_hybrid else number, match["suffix"])] = name, None
        else:
            described = stored.described[name]
            layers, parts = described.size[0] if described.size else 0, len(described.chunks)
            if layers > parts:  # each layer has a part; a damaged file could claim enough layers to fill the memory
                raise CorruptError(
                    f"{folder / METADATA} has {name} of {layers} layers in {parts} parts; use another checkpoint"
                )
            places.update({_our_name(number, match["suffix"]): (name, number) for number in range(layers)})
    meta = {name: stored.meta(*place) for name, place in places.items()}
    return LazyTensors(meta, lambda name: stored.read(*places[name]))


def _our_name(layer: int, suffix: str) -> str:
    """Return our name of a layer's tensor; `suffix` follows the layer's number in Megatron-LM's name."""
    if suffix.endswith(FUSED_NORM):
        suffix = "input_layernorm.weight" if suffix.startswith("self_attention.") else "pre_mlp_layernorm.weight"
    return f"decoder.layers.{layer}.{suffix}"


# -- the model


def _model_config(
    folder: Path, arguments: Arguments, stated: Mapping[str, Any], shapes: Mapping[str, Tensor]
) -> FANformerConfig:
    """Return the model's configuration, from the arguments and the fields that the user states."""
    rows = shapes[EMBEDDING].shape[0] if EMBEDDING in shapes else 0
    arguments = _include_end_of_text(arguments, rows)
    values = {**model_fields(arguments), **stated, "fan": _fan_fields(folder, arguments, stated)}
    vocab_size = values.setdefault("vocab_size", rows)
    if type(vocab_size) is int and 0 < vocab_size <= rows:
        values["make_vocab_size_divisible_by"] = vocabulary_multiple(vocab_size, rows)
    try:
        return FANformerConfig.from_dict(values)
    except InputError as error:
        reasons = "; ".join(str(error).splitlines())
        raise InputError(f"the model in {folder} cannot be built: {reasons}; state it by --config FILE") from None


def _include_end_of_text(arguments: Arguments, rows: int) -> Arguments:
    """Return the arguments with a vocab_size that includes the end of text of Megatron-LM's NullTokenizer.

    In megatron-core 0.16 this id follows the --vocab-size ids, so it is added here if the embedding has a row for it
    (`rows`). In 0.19 it is one of the --vocab-size ids, and the argument null_tokenizer_eod_id names it.
    """
    size = arguments.get("vocab_size")
    is_added = arguments.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in arguments
    return {**arguments, "vocab_size": size + 1} if is_added and type(size) is int and size < rows else arguments


def _fan_fields(folder: Path, arguments: Arguments, stated: Mapping[str, Any]) -> Any:
    """Return the fields of FAN: the user's or, without any, the defaults if the spec is ours, `none` without a spec."""
    spec = arguments.get("spec")
    if "fan" in stated or spec in SPECS:
        return stated.get("fan") or {}  # {}: the defaults
    if not spec:
        return {"placement": "none"}
    raise InputError(
        f"whether {folder} has FAN is in its layer spec ({' '.join(map(str, spec))}), which is code and not read; "
        "add --config FILE, with model: {fan: {placement: qkv, p_ratio: 0.25, activation: none}} or the like in it"
    )
