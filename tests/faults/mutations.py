"""Values that a careless, tired or hostile hand writes, and configurations and command lines changed by one."""

import copy
import datetime
import random
from collections.abc import Callable, Sequence
from typing import Any

import yaml

Values = dict[str, Any]

NUMBERS = (0, 1, -1, 2, 3, 7, 2**31, 2**63, 2**64, 10**30, 10**400, -(2**63), 0.5, -0.0, 1e308, 5e-324)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "~", "a", ".", "@", "@none", "@.", "*", "[", "{", "%s", "{0}", "a" * 300, "a" * 5_000),
    *("/".join("abc" * 2_000), "\0", "a\0b", "ü", "👍", "\u202e", "\ud800", "a\nb", "\t", "1e400", "nan", "0x10"),
    *("1_000", "١٢", "yes", "null", "fp32", "auto", "--help", "-1", "none.npy", "*.npy"),
)
OTHERS = (
    *(None, True, False, [], {}, [[]], [None], {"a": 1}, {1: 2}, [1] * 1_000, datetime.date(2001, 1, 1), b"\xff", {1}),
)


def deep(levels: int) -> Any:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def some_value(chance: random.Random, names: Sequence[str]) -> Any:
    """Any plain value; `names` are paths that exist, of every kind."""
    pool: tuple[Sequence[Any], ...] = (NUMBERS, NUMBERS, NOT_FINITE, TEXTS, TEXTS, OTHERS, names, (deep(30), deep(200)))
    return copy.deepcopy(chance.choice(chance.choice(pool)))


# -- configurations


def _change_a_field(chance: random.Random, values: Values, names: Sequence[str]) -> None:
    section = chance.choice(list(values))
    if isinstance(values[section], dict) and values[section] and chance.random() < 0.85:
        values[section][chance.choice(list(values[section]))] = some_value(chance, names)
    else:
        values[section] = some_value(chance, names)


def _leave_out(chance: random.Random, values: Values, _names: Sequence[str]) -> None:
    section = chance.choice(list(values))
    if isinstance(values[section], dict) and values[section] and chance.random() < 0.7:
        del values[section][chance.choice(list(values[section]))]
    elif len(values) > 1:
        del values[section]


def _rename(chance: random.Random, values: Values, _names: Sequence[str]) -> None:
    section = chance.choice(list(values))
    owner = values[section] if isinstance(values[section], dict) and values[section] else values
    key = chance.choice(list(owner))
    owner[chance.choice((f"{key}s", str(key).upper(), 7, None, "a" * 300, "", "é", "x.y", (1, 2)))] = owner.pop(key)


def _add(chance: random.Random, values: Values, names: Sequence[str]) -> None:
    section = chance.choice([*values, "extra"])
    owner = values.setdefault(section, {})
    (owner if isinstance(owner, dict) else values)[chance.choice(FIELDS)] = some_value(chance, names)


# Of sections that a small configuration leaves out, and of none.
FIELDS = (
    *("preset", "fan", "p_ratio", "num_query_groups", "rotary_base", "layernorm_epsilon", "context_parallel_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "sequence_parallel"),
    *("virtual_pipeline_model_parallel_size", "split", "valid_data", "tokenizer", "cache_path", "num_workers", "load"),
    *("keep", "save_interval", "eval_iters", "eval_interval", "seed", "folder", "clip_grad", "min_lr", "fp8", "colour"),
)


def _move(chance: random.Random, values: Values, _names: Sequence[str]) -> None:
    first, second = chance.choice(list(values)), chance.choice(list(values))
    values[first], values[second] = values[second], values[first]


CHANGES: tuple[Callable[[random.Random, Values, Sequence[str]], None], ...] = (
    *(_change_a_field, _change_a_field, _change_a_field),
    *(_leave_out, _rename, _add, _add, _move),
)

ALIASES = "a: &a [x, x]\n" + "".join(
    f"{n}: &{n} [*{m}, *{m}]\n" for m, n in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)
LINES = (
    *("\t", "  \tx: 1\n", "---\n", "...\n", "%YAML 9.9\n", "&a *a\n", "x: &x [*x]\n", "- a\n", "? [a, b]\n: c\n"),
    *("!!set {a}\n", "x: !!python/object/apply:os.getpid []\n", "x: !!binary ####\n", "x: !!int ''\n", "x: !!bool 7\n"),
    *("x: 2001-99-99\n", "x: " + "9" * 6_000 + "\n", "x: " + "1:" * 300 + "1\n", "x: " + "[" * 3_000 + "\n"),
    *("x: '" + "a" * 20_000, "\ufeff", "\x00", "\x07", "\x85", "\u2028", "\r", "<<: {model: 1}\n", "<<: 7\n"),
    *("x: *none\n", "x: |\n y\n z", ALIASES, ALIASES * 2, "model:\n", "model: {}\n", "training: {run_dir: x}\n", "{"),
    *("}", "#", '"', "'", ": ", "- ", "\\", "\xff"),
)


def mutated_configuration(chance: random.Random, values: Values, names: Sequence[str]) -> bytes:
    """The bytes of a configuration file after one to three changes of its values, or of its text, or of both."""
    changed = copy.deepcopy(values)
    for _ in range(chance.randrange(0, 4)):
        if changed:
            chance.choice(CHANGES)(chance, changed, names)
    try:
        text = yaml.safe_dump(changed, allow_unicode=chance.random() < 0.5, sort_keys=False)
    except yaml.YAMLError:  # PyYAML writes no tuples, for one
        text = yaml.dump(changed, sort_keys=False)
    if chance.random() < 0.4:
        text = _changed_text(chance, text)
    data = text.encode("utf-8", "surrogatepass")
    match chance.randrange(30):
        case 0:
            return data[: chance.randrange(len(data) + 1)]
        case 1:
            return chance.randbytes(chance.randrange(400))
        case 2:
            at = chance.randrange(len(data) + 1)
            return data[:at] + chance.randbytes(3) + data[at:]
        case 3:
            return text.encode("utf-16", "surrogatepass")
    return data


def _changed_text(chance: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(lines) + 1)
    match chance.randrange(5):
        case 0 if lines:
            lines.insert(at, chance.choice(lines))  # the same key twice, or somewhere else
        case 1 if at < len(lines):
            lines[at] = "\t" + lines[at].lstrip()
        case 2 if at < len(lines):
            del lines[at]
        case _:
            lines.insert(at, chance.choice(LINES))
    return "".join(lines)


# -- command lines


def mutated_command(chance: random.Random, commands: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """One of the commands after one to three changes of its words."""
    words = list(chance.choice(commands))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(words)) if words else 0
        match chance.randrange(7):
            case 0 | 1 | 2 if words:
                words[at] = _some_word(chance, names)
            case 3:
                words.insert(at, _some_word(chance, names))
            case 4 if words:
                del words[at]
            case 5 if words:
                words.insert(at, words[at])
            case _:
                words[at:at] = [chance.choice(OPTIONS), _some_word(chance, names)]
    return words


OPTIONS = (
    *("--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--step", "--steps", "--workers"),
    *("--eod-id", "--part-size", "--min-length", "--max-length", "--max-shard-size", "--padded-vocab-size"),
    *("--layouts", "--config", "--tokenizer", "--to", "--dtype", "--report", "--format", "--npy-dtype", "--text-field"),
    *("--backend", "--source", "--training.train_iters", "--model", "--data.train_data", "--a.b.c", "--.", "--x"),
    *("--training.", "--verify"),
)
WORDS = (
    *("-5GB", "0", "1e400GB", "nanGB", "5 GB", "9" * 5_000, "1_000", "-1", "1e9", "inf", "nan", "-0.0", "0x10", "١"),
    *("5GB", "2", "tp=2", "tp=0", "tp=", "tp=[", "=", "tp=2,tp=2", "pp=99999999999999999999", "sp=true,fan=x", "--"),
    *("-", "---", "[1, 2", "{a: b}", "!!python/object/apply:os.getpid []", "*a", "&a [*a]", "true", "fp32", "hf"),
    *("reference",),
)


def _some_word(chance: random.Random, names: Sequence[str]) -> str:
    word = (
        chance.choice((*WORDS, *TEXTS, *names, *OPTIONS))
        if chance.random() < 0.9
        else chance.randbytes(20).decode("latin-1")
    )
    return str(word).replace("\n", " ")  # in a path it would end the line that names it
