"""A configuration from the arguments of Megatron-LM's `pretrain_gpt.py`, and a list of the arguments that it lacks.

The shell resolves the shell: in a launch script `megatron-fanformer config --from-megatron` stands in the place of
`torchrun … pretrain_gpt.py`, and plain words arrive.

What is the same, has another name or has none is `convert/foreign_names.py`'s to say; the model's fields, and what
makes another model, are read as a checkpoint's arguments are there. Here is what else a
value needs: another unit, another form, or Megatron-LM's default where ours is another.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import yaml

from megatron_fanformer.configuration import nested, overlaid, read_overrides, value_problems, yaml_value
from megatron_fanformer.convert import foreign_names
from megatron_fanformer.convert.foreign_names import DROPOUT, LAYERS, RULES, SPECS, model_fields, model_problems
from megatron_fanformer.errors import InputError, escaped
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.train.config import RunConfig, advice, config_from_dict

OUR_SPECS = frozenset(module for module, _ in SPECS)
NULL_TOKENIZER = "megatron-core 0.16's has one id more than --vocab-size says, its end of text; then add 1"
DEFAULT_SPLIT = "969,30,1"
MULTIPLE, RANKS = "make_vocab_size_divisible_by", "tensor_model_parallel_size"
VALIDATION = "data.valid_data"
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
DEFAULTS: dict[str, tuple[str, Any]] = {
    "--weight-decay": ("optimizer.weight_decay", 0.01),
    "--adam-beta2": ("optimizer.adam_beta2", 0.999),
    "--adam-eps": ("optimizer.adam_eps", 1e-8),
    "--min-lr": ("schedule.min_lr", 0.0),
    "--lr-decay-style": ("schedule.lr_decay_style", "linear"),
    "--eval-iters": ("training.eval_iters", 100),
    "--bf16": ("precision.dtype", "fp32"),
}
"""For each argument its field and Megatron-LM's default, where ours is another: taken if it is not given."""
FP8_DEFAULTS: dict[str, tuple[str, Any]] = {
    "--fp8-recipe": ("precision.fp8_recipe", "delayed"),
    "--fp8-amax-history-len": ("precision.fp8_amax_history_len", 1),
    "--fp8-amax-compute-algo": ("precision.fp8_amax_compute_algo", "most_recent"),
}
SET: dict[str, dict[str, Any]] = {
    "--bf16": {"precision.dtype": "bf16"},
    "--fp16": {"precision.dtype": "bf16"},
    "--grad-reduce-in-bf16": {"precision.grad_reduce_in_fp32": False},
    "--recompute-activations": {"parallel.recompute_granularity": "selective"},
    "--use-flash-attn": {"kernels.attention_backend": "flash"},
    "--no-gradient-accumulation-fusion": {"kernels.gradient_accumulation_fusion": False},
    "--cross-entropy-loss-fusion": {"kernels.chunked_loss_head": True},
    "--enable-cuda-graph": {"kernels.cuda_graph_impl": "local"},
    "--no-check-for-nan-in-loss-and-grad": {"recovery.check_for_nan_in_loss_and_grad": False},
    "--check-for-large-grads": {"recovery.check_for_spiky_loss": True},
    "--sft": {"data.format": "sft"},
    "--dataloader-inter-document-masking": {"data.reset_attention_mask": True},
    "--no-ckpt-fully-parallel-save": {"checkpoint.fully_parallel_save": False},
    "--ckpt-fully-parallel-load": {},
    "--use-precision-aware-optimizer": {},  # by --exp-avg-dtype and --exp-avg-sq-dtype
    "--log-straggler": {},
}
"""The fields that arguments without a value of their own set: switches above all."""
BY_HAND = frozenset(
    """
--hybrid-layer-pattern --hybrid-override-pattern --num-layers-per-virtual-pipeline-stage
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --ddp-num-buckets
--distribute-saved-activations --per-split-data-args-path --multiple-validation-sets --vocab-file --merge-file
--save-retain-interval --finetune --pretrained-checkpoint --ckpt-step --no-load-optim --no-load-rng
--log-params-norm --log-timers-to-tensorboard --timing-log-level --logging-level --profile
--use-pytorch-profiler --profile-step-start --profile-step-end --padded-vocab-size
""".split()  # noqa: SIM905 - by lines, as the names stand in the table
)
"""Arguments with a field whose value does not follow from theirs."""
RULED = {flag: name for name, (flag, _) in RULES.items()} | {f"--{name.replace('_', '-')}": name for name in DROPOUT}

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
        plain = json.loads(json.dumps(self.values))  # dicts of their plain type, which alone YAML writes
        sections = {name: plain[name] for name in get_type_hints(RunConfig) if name in plain}
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
    known, ours = _grouped(words)
    if not known and not ours:
        raise InputError(
            "--from-megatron has no arguments; put it in the place of `torchrun … pretrain_gpt.py` in the launch script"
        )
    others, not_set, unknown, fields = [], [], [], dict[str, Any]()
    rows = {name: row for table in foreign_names.MEGATRON_LM.values() for row in table for name in row.names.split()}
    for flag, words in known.items():
        row, written = rows.get(flag), " ".join([flag, *words])
        if row is None:
            unknown.append(f"{written}: not known here; `config` lists what there is")
        elif flag in SET:
            fields |= SET[flag]
            if row.field is None:
                not_set.append(f"{written}: {row.note}")
        elif flag in RULED and not ("--spec" in known and RULED[flag] in LAYERS):
            pass  # whatever makes another model is in `of_model`
        elif row.field is None:
            not_set.append(f"{written}: {NULL_TOKENIZER if words == ['NullTokenizer'] else row.note}")
        elif flag == "--load":
            if words != known.get("--save"):  # else a run resumes by itself
                others.append(f"{written}: `convert` it, and state {row.field} ({row.note})")
        elif flag in BY_HAND:
            others.append(f"{written}: {row.field}{f' ({row.note})' if row.note else ''} is for you to state")
        elif not row.field.startswith("model."):  # those are `_model`'s
            try:
                values = (
                    CONVERSIONS[flag](words, known) if flag in CONVERSIONS else {row.field: _typed(row.field, words)}
                )
                if problems := [problem for name, value in values.items() for problem in _wrong(name, value)]:
                    raise ValueError(problems[0])
            except ValueError as reason:  # it has no counterpart
                others.append(f"{written}: {reason}")
                continue
            sets = {**fields.get(VALIDATION, {}), **values.get(VALIDATION, {})}
            fields |= {**values, VALIDATION: sets} if sets else values
    model, of_model, wrong = _model(known)
    defaults = DEFAULTS if "--fp8-format" not in known else {**DEFAULTS, **FP8_DEFAULTS}
    not_given = {field: value for flag, (field, value) in defaults.items() if flag not in known}
    fields = {**not_given, **model, **fields}
    if "--data-path" in known and not {"data.split", VALIDATION} & fields.keys():
        fields["data.split"] = DEFAULT_SPLIT
    values = overlaid(nested(fields), read_overrides(ours, advice=advice))
    fan = values.get("model", {}).get("fan", {})
    is_transformer = isinstance(fan, Mapping) and fan.get("placement") == "none"
    notes = {
        "FAN layers": [TRANSFORMER] if is_transformer else [],
        "Another model than there": of_model,
        "Not carried over": [*wrong, *others],
        "No setting here": not_set,
        "Unknown": unknown,
        "To do before it trains": _problems(values),
    }
    shown = {title: [" ".join(escaped(line).split()) for line in lines] for title, lines in notes.items() if lines}
    return Converted(values, shown)


def _grouped(words: Sequence[str]) -> tuple[Given, list[str]]:
    """Return the values of each argument (of one that is repeated the last), and the words of ours."""
    known: Given = {}
    ours: list[str] = []
    last = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            if "." in name:
                last = ours
                ours.append(word)
            else:
                last = known[f"--{name[2:].replace('_', '-')}"] = [value] if has_value else []
        elif last is None:
            raise InputError(f"{word} is no argument of pretrain_gpt.py; begin with the first one")
        else:
            last.append(word)
    return known, ours


# -- values


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
    try:
        value = yaml_value(text)
    except ValueError:
        return text
    return text if type(value) in (int, float) else value


def _wrong(name: str, value: Any) -> list[str]:
    """Return why a value cannot be that of a field, if it cannot."""
    return [line for line in value_problems(nested({name: value}), RunConfig) if line.startswith(f"{name} is ")]


Conversion = Callable[[list[str], Given], dict[str, Any]]
"""Returns the fields of an argument, from its words and all arguments. Raises ValueError: it has no counterpart."""


def _in_steps(flag: str, field: str) -> Conversion:
    def convert_samples(_words: list[str], known: Given) -> dict[str, Any]:
        numbers = [_number(word) for word in (*known[flag], *known.get("--global-batch-size", []))]
        if "--rampup-batch-size" in known or len(numbers) != 2 or not all(type(n) is int and n > 0 for n in numbers):
            raise ValueError(f"{field} is in steps, which follow from samples by one --global-batch-size alone")
        return {field: numbers[0] // numbers[1]}

    return convert_samples


def _blend(words: list[str]) -> list[str]:
    return [part for word in words for part in word.split()]


def _choice(field: str, **choices: Any) -> Conversion:
    def convert_choice(words: list[str], _known: Given) -> dict[str, Any]:
        if len(words) != 1 or words[0] not in choices:
            raise ValueError(f"{field} has no such value")
        return {field: choices[words[0]]}

    return convert_choice


CONVERSIONS: dict[str, Conversion] = {
    "--train-samples": _in_steps("--train-samples", "training.train_iters"),
    "--lr-decay-samples": _in_steps("--lr-decay-samples", "schedule.lr_decay_iters"),
    "--lr-warmup-samples": _in_steps("--lr-warmup-samples", "schedule.lr_warmup_iters"),
    "--lr-wsd-decay-samples": _in_steps("--lr-wsd-decay-samples", "schedule.lr_wsd_decay_iters"),
    "--data-path": lambda words, _known: {"data.train_data": _blend(words)},
    "--train-data-path": lambda words, _known: {"data.train_data": _blend(words)},
    "--data-args-path": lambda words, _known: {"data.train_data": [f"@{word}" for word in words]},
    "--valid-data-path": lambda words, _known: {VALIDATION: {"valid": _blend(words)}},
    "--test-data-path": lambda words, _known: {VALIDATION: {"test": _blend(words)}},
    "--split": lambda words, _known: {"data.split": ",".join(re.findall(r"[.0-9]+", " ".join(words)))},  # as there
    "--optimizer": _choice("optimizer.name", adam="adamw", muon="muon"),
    "--rerun-mode": _choice("recovery.compute_again", disabled=False, validate_results=True),
    "--tensorboard-dir": lambda _words, _known: {"logging.tensorboard": True},
    "--main-grads-dtype": _choice("precision.grad_reduce_in_fp32", fp32=True, bf16=False),
}
"""Conversions of values, by argument."""


# -- the model


def _model(known: Given) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the model's fields, its differences from Megatron-LM's model, and the values that no field can have."""
    arguments = dict(MODEL_DEFAULTS)
    for flag, words in known.items():
        values = [_number(word) for word in words]
        value: Any = True if not values else values[0] if len(values) == 1 else values
        arguments[RULED.get(flag, foreign_names.plain(flag))] = value
    arguments["add_bias_linear"] = "--disable-bias-linear" not in known
    if "--use-rotary-position-embeddings" in known:
        arguments["position_embedding_type"] = "rope"
    width = arguments.get("hidden_size")
    if "ffn_hidden_size" not in arguments and type(width) is int:  # as validate_args computes it
        arguments["ffn_hidden_size"] = int(4 * width * 2 / 3 / 64) * 64 if arguments.get("swiglu") else 4 * width
    multiple, ranks = arguments.get(MULTIPLE, FANformerConfig.make_vocab_size_divisible_by), arguments.get(RANKS, 1)
    if type(multiple) is type(ranks) is int and ranks > 1:  # there it is of each rank
        arguments[MULTIPLE] = multiple * ranks
    differences = model_problems(arguments)
    differences += [f"{name} is {arguments[name]}, but there is no dropout" for name in DROPOUT if arguments.get(name)]
    is_ours = not OUR_SPECS.isdisjoint(known.get("--spec", []))
    if arguments.get("spec") and not is_ours:
        differences.append(
            f"--spec {' '.join(known['--spec'])} is code, and not read: state model.fan, if it has FAN layers"
        )
    fields = {f"model.{name}": value for name, value in model_fields(arguments).items()}
    if not is_ours:
        fields["model.fan.placement"] = "none"
    wrong = {name: problem for name, value in fields.items() for problem in _wrong(name, value)}
    fields = {name: value for name, value in fields.items() if name not in wrong}
    return fields, differences, list(wrong.values())


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return missing fields, or the rules that the configuration breaks here."""
    missing = value_problems(values, RunConfig, advice=advice)
    if not values.get("data", {}).get("train_data"):
        missing.append("data.train_data is empty; name token files")
    if missing:
        return missing
    try:
        config = config_from_dict(dict(values))
    except InputError as error:
        return str(error).splitlines()
    return config.section_problems() or config.problems_of_layout()
