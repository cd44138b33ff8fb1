"""Checkpoints of stock Megatron-LM in its format `torch_dist`, of a model of our layer spec; they are only read.

    latest_checkpointed_iteration.txt    the iteration of the latest
    iter_0001000/.metadata, *.distcp     table and tensors, as in our own checkpoints
    iter_0001000/common.pt               the parsed arguments, and the progress; from megatron-core 0.19 on they are
                                         among the tensors

There are four differences from our checkpoints. Layers are stacked along a first axis, in one tensor of each kind,
unless Megatron-LM was set to keep them apart. In Megatron-LM's own layers, a norm that Transformer Engine fuses into
the map behind it has that map's name. In a HybridModel each of our layers is two, attention and MLP (`*-` repeated in
--hybrid-layer-pattern), and the final norm has another name. No file states the model: its fields are in the arguments,
and its FAN in the layer spec, which is code.
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

LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,9})\.)?(.+)", re.ASCII)
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.", re.ASCII)
EMBEDDING = "embedding.word_embeddings.weight"
FUSED_NORM = ".layer_norm_weight"
HYBRID_NORM, OWN_NORM = "decoder.final_norm.weight", "decoder.final_layernorm.weight"
HALVES = (("input_layernorm.", "self_attention."), ("pre_mlp_layernorm.", "mlp."))
"""Prefixes of tensors in a hybrid stack's even and odd layers, where `*` and `-` take turns."""
LEFT_OUT = "not converted: the optimizer's state; training on the converted weights starts with a fresh one"


def open_megatron_lm(
    folder: Path, config: Path | None = None
) -> tuple[FANformerConfig, LazyTensors, tuple[str, ...], SavedProgress | None]:
    """Return model, tensors, notes on the conversion, and progress of one iteration's checkpoint.

    The tensors have our names, one for each layer, and are read on request.

    Args:
        config: a configuration file, whose section `model` overrides the checkpoint's fields.

    Raises:
        InputError: the model cannot be built here (all reasons at once), or a field of it is not known.
        CorruptError: the checkpoint is damaged.
    """
    check_format(folder)
    table = read_table(folder)
    stored = StoredTensors(folder, table)
    weights = [name for name in stored.described if not OPTIMIZER.match(name)]
    _, common = common_values(folder, table, read_records)
    namespace = common.get("args") if isinstance(common, dict) else None  # a checkpoint may be saved without them
    arguments = namespace.state if isinstance(namespace, Record) and isinstance(namespace.state, dict) else {}
    stated = read_values(config).get("model") if config else {}
    if not isinstance(stated, dict):
        raise InputError(f"{config} has no section model with fields; write those that the checkpoint lacks into it")
    if reasons := model_problems(arguments):  # before the tensors, which another model has in another form
        raise InputError(
            f"the model in {folder} cannot be converted: {'; '.join(reasons)}; it runs in Megatron-LM alone"
        )
    tensors = _one_for_each_layer(folder, stored, weights)
    if HYBRID_NORM in weights and type(layers := arguments.get("num_layers")) is int:
        arguments = {**arguments, "num_layers": layers // 2}
    model = _model(folder, arguments, stated, tensors.meta)
    wanted = set(weights)
    check_parts(folder, (part for part in stored_parts(table) if part.name in wanted))
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


def _one_for_each_layer(folder: Path, stored: StoredTensors, weights: list[str]) -> LazyTensors:
    """Return the weights under our names; each layer's are read out of their stack."""
    places: dict[str, tuple[str, int | None]] = {}
    is_hybrid = HYBRID_NORM in weights
    for name in weights:
        layer = LAYER.fullmatch(name)
        if layer is None:
            places[OWN_NORM if name == HYBRID_NORM else name] = name, None
        elif layer[1] is not None:
            number = int(layer[1])
            if is_hybrid and not layer[2].startswith(HALVES[number % 2]):
                raise InputError(
                    f"the model in {folder} has {name}: its layers are not attention and MLP in turn (`*-` repeated in "
                    "--hybrid-layer-pattern), as a FANformer's are; it runs in Megatron-LM alone"
                )
            places[_own_name(number // 2 if is_hybrid else number, layer[2])] = name, None
        else:
            described = stored.described[name]
            layers, parts = described.size[0] if described.size else 0, len(described.chunks)
            if layers > parts:  # each layer is a part of its own; so there are no more names than parts
                raise CorruptError(
                    f"{folder / METADATA} has {name} of {layers} layers in {parts} parts; use another checkpoint"
                )
            places.update({_own_name(number, layer[2]): (name, number) for number in range(layers)})
    return LazyTensors(
        {own: stored.meta(*place) for own, place in places.items()}, lambda own: stored.read(*places[own])
    )


def _own_name(layer: int, rest: str) -> str:
    if rest.endswith(FUSED_NORM):
        rest = "input_layernorm.weight" if rest.startswith("self_attention.") else "pre_mlp_layernorm.weight"
    return f"decoder.layers.{layer}.{rest}"


# -- the model


def _model(
    folder: Path, arguments: Arguments, stated: Mapping[str, Any], shapes: Mapping[str, Tensor]
) -> FANformerConfig:
    rows = shapes[EMBEDDING].shape[0] if EMBEDDING in shapes else 0
    arguments = _with_end_of_text(arguments, rows)
    values = {**model_fields(arguments), **stated, "fan": _fan(folder, arguments, stated)}
    vocab_size = values.setdefault("vocab_size", rows)
    if type(vocab_size) is int and 0 < vocab_size <= rows:
        values["make_vocab_size_divisible_by"] = vocabulary_multiple(vocab_size, rows)
    try:
        return FANformerConfig.from_dict(values)
    except InputError as error:
        reasons = "; ".join(str(error).splitlines())
        raise InputError(f"the model in {folder} cannot be built: {reasons}; state it by --config FILE") from None


def _with_end_of_text(arguments: Arguments, rows: int) -> Arguments:
    """Return the arguments with a vocabulary that includes NullTokenizer's end of text.

    In megatron-core 0.16 that is one id more than --vocab-size; in 0.19, which has an argument for it, one of them.
    """
    size = arguments.get("vocab_size")
    is_one_more = arguments.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in arguments
    return {**arguments, "vocab_size": size + 1} if is_one_more and type(size) is int and size < rows else arguments


def _fan(folder: Path, arguments: Arguments, stated: Mapping[str, Any]) -> Any:
    """Return the fields of FAN: those that the user states, or the defaults of our layer specs."""
    spec = arguments.get("spec")
    if "fan" in stated or spec in SPECS:
        return stated.get("fan") or {}
    if not spec:
        return {"placement": "none"}
    raise InputError(
        f"whether {folder} has FAN is in its layer spec ({' '.join(map(str, spec))}), which is code and not read; "
        "add --config FILE, with model: {fan: {placement: qkv, p_ratio: 0.25, activation: none}} or the like in it"
    )
