"""A configuration from the arguments of Megatron-LM's `pretrain_gpt.py`, and a list of those that it does not hold.

The shell resolves the shell: in a launch script `megatron-fanformer config --from-megatron` stands in the place of
`torchrun … pretrain_gpt.py`, and plain words arrive. Names, and the rules of the model, are in
`convert/megatron_names.py`; here are values in another form, and Megatron-LM's defaults where ours are others.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import yaml

from megatron_fanformer.configuration import describe_fields, overlay, read_overrides, value_problems
from megatron_fanformer.convert.megatron_names import (
    BY_HAND,
    CONVERTED,
    DROPOUT,
    RULES,
    SPECS,
    model_fields,
    model_problems,
    plain,
)
from megatron_fanformer.errors import InputError, escaped
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.train.config import RunConfig, advice

OUR_SPECS = frozenset(module for module, _ in SPECS)
DEFAULT_SPLIT = "969,30,1"
MULTIPLE, RANKS = "make_vocab_size_divisible_by", "tensor_model_parallel_size"
TRAIN_DATA, VALIDATION, SPLIT = "data.train_data", "data.valid_data", "data.split"
TRANSFORMER = "model.fan.placement none is that Transformer; without it, it is the FANformer of the same size"

MODEL_DEFAULTS: dict[str, Any] = {
    "swiglu": False,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "num_query_groups": 1,
    "norm_epsilon": 1e-5,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
"""Megatron-LM's defaults of the model, where no field or rule of ours has the same."""
DEFAULTS: dict[str, Any] = {
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
    "optimizer.adam_eps": 1e-8,
    "schedule.min_lr": 0.0,
    "schedule.lr_decay_style": "linear",
    "training.eval_iters": 100,
    "precision.dtype": "fp32",
}
"""Megatron-LM's defaults, where ours are others."""
FP8_DEFAULTS: dict[str, Any] = {
    "precision.fp8_recipe": "delayed",
    "precision.fp8_amax_history_len": 1,
    "precision.fp8_amax_compute_algo": "most_recent",
}
SET: dict[str, Any] = {
    "bf16": "bf16",
    "grad_reduce_in_bf16": False,
    "recompute_activations": "selective",
    "use_flash_attn": "flash",
    "no_gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": True,
    "enable_cuda_graph": "local",
    "no_check_for_nan_in_loss_and_grad": False,
    "check_for_large_grads": True,
    "sft": "sft",
    "dataloader_inter_document_masking": True,
    "tensorboard_dir": True,
}
"""The value that an argument sets by being given."""
CHOICES: dict[str, dict[str, Any]] = {
    "optimizer": {"adam": "adamw", "muon": "muon"},
    "rerun_mode": {"disabled": False, "validate_results": True},
    "main_grads_dtype": {"fp32": True, "bf16": False},
}
OF_MODEL = {"disable_bias_linear", "group_query_attention", "kv_channels", "max_position_embeddings"}
OF_MODEL |= {"use_rotary_position_embeddings", *RULES, *DROPOUT}
"""Arguments without a field that `_model` reads."""
SAME_NAMES = {plain(field.name): field.name for field in describe_fields(RunConfig) if field.name.count(".") == 1}

Given = dict[str, list[str]]
PROGRAM = re.compile(r"(?:^|.*/)pretrain\w*\.py$")


class Converted(NamedTuple):
    """The configuration that arguments of Megatron-LM make."""

    values: dict[str, Any]
    """The configuration's plain values, in sections."""
    notes: dict[str, list[str]]
    """Arguments that the configuration lacks, and other notes, under titles; only those that have any."""

    def text(self) -> str:
        """Return the YAML file, which begins with the notes."""
        lines = ["# From arguments of Megatron-LM's pretrain_gpt.py, by docs/from-megatron-lm.md."]
        lines += [f"# {line}".rstrip() for line in self.lines()]
        values = json.loads(json.dumps(self.values))  # dicts of their plain type, which alone YAML writes
        sections = {name: values[name] for name in get_type_hints(RunConfig) if name in values}
        return "\n".join([*lines, "", yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)])

    def lines(self) -> list[str]:
        """Return the notes, a line each, under their titles."""
        return [line for title, notes in self.notes.items() for line in ("", f"{title}:", *(f"- {n}" for n in notes))]


def convert(words: Sequence[str]) -> Converted:
    """Return the configuration of a run with Megatron-LM's arguments.

    Those with a section, such as `--model.vocab_size N`, are ours.

    Raises:
        InputError: there are none, or one with a section is no field.
    """
    words = words[1 + max((place for place, word in enumerate(words) if PROGRAM.match(word)), default=-1) :]
    given, ours = _grouped(words)
    if not given and not ours:
        raise InputError(
            "--from-megatron has no arguments; put it in the place of `torchrun … pretrain_gpt.py` in the launch script"
        )
    model, of_model, not_carried = _model(given)
    fields = {**DEFAULTS, **(FP8_DEFAULTS if "fp8_format" in given else {}), **model}
    for name, argument in given.items():
        field = CONVERTED[name].field if name in CONVERTED else SAME_NAMES.get(name)
        is_resumed = name == "load" and argument == given.get("save")  # as a run here does by itself
        if name in OF_MODEL or is_resumed or (field and field.startswith("model.") and name not in BY_HAND):
            continue
        try:
            if name in BY_HAND:
                raise ValueError(f"{BY_HAND[name]} is for you to state")
            if field is None:
                raise ValueError("no field here")
            value = _value(name, field, given)
            if problems := _wrong(field, value):
                raise ValueError(problems[0])
        except ValueError as reason:
            flag = "--" + name.replace("_", "-")
            not_carried.append(f"{' '.join([flag, *argument])}: {reason}")
            continue
        fields[field] = {**fields.get(field, {}), **value} if field == VALIDATION else value
    if "data_path" in given and not {SPLIT, VALIDATION} & fields.keys():
        fields[SPLIT] = DEFAULT_SPLIT
    values = overlay({}, {**fields, **read_overrides(ours, advice=advice)})
    fan = values.get("model", {}).get("fan", {})
    is_transformer = isinstance(fan, Mapping) and fan.get("placement") == "none"
    notes = {
        "FAN layers": [TRANSFORMER] if is_transformer else [],
        "Another model than there": of_model,
        "Not carried over": not_carried,
    }
    shown = {title: [" ".join(escaped(line).split()) for line in lines] for title, lines in notes.items() if lines}
    return Converted(values, shown)


def _grouped(words: Sequence[str]) -> tuple[Given, list[str]]:
    """Return the values of each argument by its plain name (the last, if it is repeated), and the words of ours."""
    given: Given = {}
    ours: list[str] = []
    last = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            if "." in name:
                last = ours
                ours.append(word)
            else:
                last = given[plain(name)] = [value] if has_value else []
        elif last is None:
            raise InputError(f"{word} is no argument of pretrain_gpt.py; begin with the first one")
        else:
            last.append(word)
    return given, ours


# -- values


def _value(name: str, field: str, given: Given) -> Any:
    """Return the value of a field. Raises ValueError: the argument's has no counterpart."""
    words = given[name]
    if name in SET:
        return SET[name]
    if name in CHOICES:
        if len(words) != 1 or words[0] not in CHOICES[name]:
            raise ValueError(f"{field} has no such value")
        return CHOICES[name][words[0]]
    if name.endswith("_samples"):
        numbers = [_number(word) for word in (*words, *given.get("global_batch_size", []))]
        if "rampup_batch_size" in given or len(numbers) != 2 or not all(type(n) is int and n > 0 for n in numbers):
            raise ValueError(f"{field} is in steps, which follow from samples by one --global-batch-size alone")
        return numbers[0] // numbers[1]
    if name == "data_args_path":
        return [f"@{word}" for word in words]
    blend = [part for word in words for part in word.split()]
    if field == VALIDATION:
        return {name.partition("_")[0]: blend}
    if field == SPLIT:
        return ",".join(re.findall(r"[.0-9]+", " ".join(words)))  # as there
    return blend if field == TRAIN_DATA else _typed(field, words)


def _typed(field: str, words: list[str]) -> Any:
    """Return words as the value of a field: a switch, one value or a list, of numbers where those are allowed."""
    numbers = [_number(word) for word in words]
    forms = [numbers, words] if len(words) != 1 else [*numbers, *words, numbers, words]
    return next((form for form in ([True] if not words else forms) if not _wrong(field, form)), forms[0])


def _number(text: str) -> Any:
    """Return a value as argparse reads it: YAML's octal, hexadecimal and sexagesimal numbers are none there."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _wrong(name: str, value: Any) -> list[str]:
    """Return why a field cannot have a value; empty if it can."""
    return [line for line in value_problems(overlay({}, {name: value}), RunConfig) if line.startswith(f"{name} is ")]


# -- the model


def _model(given: Given) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the model's fields, its differences from Megatron-LM's model, and the values that no field can have."""
    arguments = dict(MODEL_DEFAULTS)
    for name, words in given.items():
        values = [_number(word) for word in words]
        arguments[name] = True if not values else values[0] if len(values) == 1 else values
    arguments["add_bias_linear"] = "disable_bias_linear" not in given
    if "use_rotary_position_embeddings" in given:
        arguments["position_embedding_type"] = "rope"
    width = arguments.get("hidden_size")
    if "ffn_hidden_size" not in arguments and type(width) is int:  # as validate_args computes it
        arguments["ffn_hidden_size"] = int(4 * width * 2 / 3 / 64) * 64 if arguments.get("swiglu") else 4 * width
    multiple, ranks = arguments.get(MULTIPLE, FANformerConfig.make_vocab_size_divisible_by), arguments.get(RANKS, 1)
    if type(multiple) is type(ranks) is int and ranks > 1:  # there it is of each rank
        arguments[MULTIPLE] = multiple * ranks
    differences = model_problems(arguments)
    differences += [f"{name} is {arguments[name]}, but there is no dropout" for name in DROPOUT if arguments.get(name)]
    is_ours = not OUR_SPECS.isdisjoint(given.get("spec", []))
    if arguments.get("spec") and not is_ours:
        differences.append(
            f"--spec {' '.join(given['spec'])} is code, and not read: state model.fan, if it has FAN layers"
        )
    fields = {f"model.{name}": value for name, value in model_fields(arguments).items()}
    if not is_ours:
        fields["model.fan.placement"] = "none"
    wrong = {name: problem for name, value in fields.items() for problem in _wrong(name, value)}
    fields = {name: value for name, value in fields.items() if name not in wrong}
    return fields, differences, list(wrong.values())
