"""Converts arguments of Megatron-LM's `pretrain_gpt.py` to a configuration, and lists those without a place in it.

The user replaces `torchrun … pretrain_gpt.py` in a launch script by `megatron-fanformer config --from-megatron` and
runs the script, so the shell expands its variables. `convert/megatron_names.py` has the names and the rules of the
model; this module converts values, and knows the defaults of Megatron-LM that differ from ours.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import yaml

from megatron_fanformer.configuration import describe_fields, flatten, overlay, read_overrides, value_problems
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

DEFAULT_SPLIT = "969,30,1"
MULTIPLE, RANKS = "make_vocab_size_divisible_by", "tensor_model_parallel_size"
TRAIN_DATA, VALIDATION, SPLIT = "data.train_data", "data.valid_data", "data.split"
TRANSFORMER = "model.fan.placement none makes it that Transformer; remove it for the FANformer of the same size"

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
"""Megatron-LM's defaults of model arguments, where ours differ or do not exist."""
DEFAULTS: dict[str, Any] = {
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
    "optimizer.adam_eps": 1e-8,
    "schedule.min_lr": 0.0,
    "schedule.lr_decay_style": "linear",
    "training.eval_iters": 100,
    "precision.dtype": "fp32",
}
"""Megatron-LM's defaults of other fields, where ours differ."""
FP8_DEFAULTS: dict[str, Any] = {
    "precision.fp8_recipe": "delayed",
    "precision.fp8_amax_history_len": 1,
    "precision.fp8_amax_compute_algo": "most_recent",
}
SWITCHES: dict[str, Any] = {
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
"""Values of fields by the argument whose presence alone, with any value or none, sets the field."""
CHOICES: dict[str, dict[str, Any]] = {
    "optimizer": {"adam": "adamw", "muon": "muon"},
    "rerun_mode": {"disabled": False, "validate_results": True},
    "main_grads_dtype": {"fp32": True, "bf16": False},
}
MODEL_ARGUMENTS = {"disable_bias_linear", "group_query_attention", "kv_channels", "max_position_embeddings"}
MODEL_ARGUMENTS |= {"use_rotary_position_embeddings", *RULES, *DROPOUT}
"""Arguments that `_convert_model` reads although no field has their name."""
SAME_NAMES = {plain(field.name): field.name for field in describe_fields(RunConfig) if field.name.count(".") == 1}

Arguments = dict[str, list[str]]  # the words after each argument, by the argument's plain name
PROGRAM = re.compile(r"(?:^|.*/)pretrain\w*\.py$")


class Converted(NamedTuple):
    """A converted configuration, and the notes about what could not be converted."""

    values: dict[str, Any]  # the configuration's plain values, by section
    notes: dict[str, list[str]]  # by title, such as "Not carried over"; titles without notes are left out

    def text(self) -> str:
        """Return the YAML file, which begins with the notes as comments."""
        lines = ["# From arguments of Megatron-LM's pretrain_gpt.py, by docs/from-megatron-lm.md."]
        lines += [f"# {line}".rstrip() for line in self.lines()]
        values = json.loads(json.dumps(self.values))  # plain dicts: YAML writes no other mappings
        sections = {name: values[name] for name in get_type_hints(RunConfig) if name in values}
        return "\n".join([*lines, "", yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)])

    def lines(self) -> list[str]:
        """Return the titles, each after an empty line, and the notes, one line each."""
        lines: list[str] = []
        for title, notes in self.notes.items():
            lines += ["", f"{title}:", *[f"- {note}" for note in notes]]
        return lines


def convert(words: Sequence[str]) -> Converted:
    """Convert the words of a command line for Megatron-LM; words up to the name of the program are ignored.

    Arguments with a section, such as `--model.vocab_size N`, set our fields directly.

    Raises:
        InputError: there are no arguments, or an argument with a section names no field.
    """
    program = max((place for place, word in enumerate(words) if PROGRAM.match(word)), default=-1)
    arguments, overrides = _group_words(words[program + 1 :])
    if not arguments and not overrides:
        raise InputError(
            "--from-megatron has no arguments; put it in the place of `torchrun … pretrain_gpt.py` in the launch script"
        )
    model, differences, not_carried = _convert_model(arguments)
    fields = {**DEFAULTS, **(FP8_DEFAULTS if "fp8_format" in arguments else {}), **model}
    for name, argument_words in arguments.items():
        field = CONVERTED[name].field if name in CONVERTED else SAME_NAMES.get(name)
        is_model_field = field is not None and field.startswith("model.") and name not in BY_HAND
        is_resume = name == "load" and argument_words == arguments.get("save")  # a run here resumes without a field
        if is_model_field or name in MODEL_ARGUMENTS or is_resume:  # `_convert_model` has converted the model's
            continue
        try:
            if name in BY_HAND:
                raise ValueError(f"{BY_HAND[name]} is for you to state")
            if field is None:
                raise ValueError("no field here")
            value = _convert_value(name, field, arguments)
            if problems := _value_problems(field, value):
                raise ValueError(problems[0])
        except ValueError as reason:
            flag = "--" + name.replace("_", "-")
            not_carried.append(f"{' '.join([flag, *argument_words])}: {reason}")
            continue
        if field == VALIDATION:  # one argument has the data of the set `valid`, another those of `test`
            value = {**fields.get(VALIDATION, {}), **value}
        fields[field] = value
    if "data_path" in arguments and not {SPLIT, VALIDATION} & fields.keys():
        fields[SPLIT] = DEFAULT_SPLIT
    values = overlay({}, {**fields, **read_overrides(overrides, advice=advice)})
    is_transformer = flatten(values).get("model.fan.placement") == "none"
    notes = {
        "FAN layers": [TRANSFORMER] if is_transformer else [],
        "Another model than there": differences,
        "Not carried over": not_carried,
    }
    one_line_notes = {  # a line break, which an argument may contain, would end the comment in the file
        title: [" ".join(escaped(note).split()) for note in listed] for title, listed in notes.items() if listed
    }
    return Converted(values, one_line_notes)


def _group_words(words: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Separate the arguments of Megatron-LM (the last, if one is repeated) from `--section.field` overrides."""
    arguments: Arguments = {}
    overrides: list[str] = []
    current = None  # the list that the next value belongs to
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            if "." in name:
                current = overrides
                overrides.append(word)
            else:
                current = arguments[plain(name)] = [value] if has_value else []
        elif current is None:
            raise InputError(f"{word} is no argument of pretrain_gpt.py; begin with the first one")
        else:
            current.append(word)
    return arguments, overrides


# -- values


def _convert_value(name: str, field: str, arguments: Arguments) -> Any:
    """Return the value of a field for an argument; raise ValueError if the argument's value has no counterpart."""
    words = arguments[name]
    if name in SWITCHES:
        return SWITCHES[name]
    if name in CHOICES:
        if len(words) != 1 or words[0] not in CHOICES[name]:
            raise ValueError(f"{field} has no such value")
        return CHOICES[name][words[0]]
    if name.endswith("_samples"):
        numbers = [_parse_number(word) for word in (*words, *arguments.get("global_batch_size", []))]  # samples, batch
        is_valid = len(numbers) == 2 and all(type(number) is int and number > 0 for number in numbers)
        if "rampup_batch_size" in arguments or not is_valid:
            raise ValueError(f"{field} is in steps, and samples can be converted only by a single --global-batch-size")
        return numbers[0] // numbers[1]  # samples, divided by the samples of a step
    if name == "data_args_path":
        return [f"@{word}" for word in words]
    blend = [part for word in words for part in word.split()]
    if field == VALIDATION:
        return {name.partition("_")[0]: blend}  # the set is called valid or test
    if field == SPLIT:
        return ",".join(re.findall(r"[.0-9]+", " ".join(words)))  # Megatron-LM reads splits with this pattern
    return blend if field == TRAIN_DATA else _parse_words(field, words)


def _parse_words(field: str, words: list[str]) -> Any:
    """Return the words of an argument in the first form that the field allows: number, text, numbers, texts.

    An argument without words is a switch: True. If the field allows no form, the returned value is for the message.
    """
    numbers = [_parse_number(word) for word in words]
    single_values = [*numbers, *words] if len(words) == 1 else []
    forms = [*single_values, numbers, words] if words else [True]
    return next((form for form in forms if not _value_problems(field, form)), forms[0] if words else [])


def _parse_number(text: str) -> Any:
    """Return the number that argparse reads, or the text itself. (YAML would also read octal and other numbers.)"""
    for number_type in (int, float):
        with contextlib.suppress(ValueError):
            return number_type(text)
    return text


def _value_problems(name: str, value: Any) -> list[str]:
    """Return the reasons why a field cannot have a value; that other fields are missing is no reason."""
    return [line for line in value_problems(overlay({}, {name: value}), RunConfig) if line.startswith(f"{name} is ")]


# -- the model


def _convert_model(arguments: Arguments) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the model's fields, its differences from Megatron-LM's model, and why other fields are left out."""
    settings = dict(MODEL_DEFAULTS)
    for name, words in arguments.items():
        values = [_parse_number(word) for word in words]
        settings[name] = (values[0] if len(values) == 1 else values) if values else True
    settings["add_bias_linear"] = "disable_bias_linear" not in arguments
    if "use_rotary_position_embeddings" in arguments:
        settings["position_embedding_type"] = "rope"
    width = settings.get("hidden_size")
    if "ffn_hidden_size" not in settings and type(width) is int:  # the formula of Megatron-LM's validate_args
        settings["ffn_hidden_size"] = int(4 * width * 2 / 3 / 64) * 64 if settings.get("swiglu") else 4 * width
    multiple, ranks = settings.get(MULTIPLE, FANformerConfig.make_vocab_size_divisible_by), settings.get(RANKS, 1)
    if type(multiple) is type(ranks) is int and ranks > 1:  # in Megatron-LM the multiple holds for each rank's rows
        settings[MULTIPLE] = multiple * ranks
    differences = model_problems(settings)
    differences += [f"{name} is {settings[name]}, but there is no dropout" for name in DROPOUT if settings.get(name)]
    is_fanformer = any(module in arguments.get("spec", []) for module, _ in SPECS)
    if settings.get("spec") and not is_fanformer:
        differences.append(
            f"--spec {' '.join(arguments['spec'])} is code, and not read: state model.fan, if it has FAN layers"
        )
    fields = {f"model.{name}": value for name, value in model_fields(settings).items()}
    if not is_fanformer:
        fields["model.fan.placement"] = "none"
    problems = {name: problem for name, value in fields.items() for problem in _value_problems(name, value)}
    fields = {name: value for name, value in fields.items() if name not in problems}
    return fields, differences, list(problems.values())
