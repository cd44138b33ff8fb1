r"""Measures training steps of cases that do not fit into the memory side by side: each alone on the device, in turns.

    python tools/bench_steps.py --preset fanformer-1b --seq-length 2048 --micro-batch-size 8 --json steps.json \
        --case F fanformer --case graphs fanformer 'kernels.cuda_graph_impl="local"' --case T transformer

A case is a name, a model (`fanformer`: that of the preset or configuration; `transformer`: the same without FAN) and
settings of its own: fields with their section, as JSON, or variables of the environment (`NAME=value`). Each turn is a
whole Trainer on random tokens, in a process of its own; the order is reversed from round to round. The processes of
several turns import ahead, which is what takes longest. The file is written anew after each turn, so that whoever ends
this has what was measured until then.

A step's time is the median of its turns. `share_of_peak` is model FLOP/s over the data sheet's rate in bf16, where the
machine is known (`planning/machines.yaml`); by the same file `predicted_step_seconds`. Both are null on another one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarking.arguments import count
from benchmarking.machine import predicted_seconds
from benchmarking.matrix_rate import MatrixClock
from benchmarking.ranks import run_values, write_tokens

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.model.config import PRESETS, FANformerConfig, as_transformer
from megatron_fanformer.planning.flops import training_flops_per_token
from megatron_fanformer.planning.machines import known_machines, machine_of_device
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.training.config import config_from_dict, load_config

MODELS = {"fanformer": lambda model: model, "transformer": as_transformer}


@dataclass
class Case:
    """What is measured, and the turns so far."""

    name: str
    values: dict[str, Any]
    """The configuration of its runs."""
    variables: dict[str, str]
    """Of the environment."""
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def model(self) -> FANformerConfig:
        """Its model, with the case's settings."""
        return config_from_dict(self.values).model


class Turn:
    """A process that imports, and takes its steps when it is let go."""

    def __init__(self, case: Case, request: Path, content: dict[str, Any]) -> None:
        self.case = case
        request.write_text(json.dumps(content))
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarking.one_turn", str(request)],
            env={**os.environ, **case.variables, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take(self) -> bool:
        """Let it go, and keep what it measured; returns whether it did: else its message is on standard error."""
        assert self._process.stdin is not None
        if self._is_ready:
            print("go", file=self._process.stdin, flush=True)
        if not self._is_ready or not (line := self._line()):
            print(f"bench_steps: {self.case.name}: its process ended; its message stands above", file=sys.stderr)
            return False
        self.case.turns.append(json.loads(line))
        self._process.wait()
        return True

    def await_ready(self) -> None:
        """Wait until it has imported everything, or ended."""
        self._is_ready = bool(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def main() -> int:
    """Take all turns, and print a table."""
    options = _options()
    devices.prepare_libraries()
    device = devices.resolve_device(options.device)
    if device == "cpu":
        devices.hide_gpus()
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as name:
        folder = Path(name)
        try:
            if found := file_problems(json=options.json):
                raise InputError("\n".join(found))
            cases = _cases(options, device, folder)
        except FanformerError as error:
            print(f"bench_steps: {error}", file=sys.stderr)
            return error.exit_code
        report: dict[str, Any] = {"machine": _machine(device), "failed": []}
        if options.rates:
            report["rates"] = _rates(cases[0].model, options.micro_batch_size, device)
        _take_turns(cases, options, folder, report)
    for line in report["cases"]:
        print(_shown(line))
    return 1 if report["failed"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="use the model of a run's configuration")
    parser.add_argument("--case", nargs="+", action="append", required=True, metavar=("NAME", "MODEL"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seq-length", type=count, default=2048, metavar="N", help="(2048)")
    parser.add_argument("--micro-batch-size", type=count, default=4, metavar="N", help="(4)")
    parser.add_argument("--micro-batches", type=count, default=1, metavar="N", help="of a step (1)")
    parser.add_argument("--rounds", type=count, default=2, metavar="N", help="turns of each case (2)")
    parser.add_argument("--steps", type=count, default=4, metavar="N", help="of a turn (4)")
    parser.add_argument("--warm-up", type=count, default=3, metavar="N", help="steps before, which are not timed (3)")
    parser.add_argument("--ahead", type=count, metavar="N", help="processes that import at once (half of the cores)")
    parser.add_argument("--rates", action="store_true", help="measure the model's matrix products first")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="written anew after each turn")
    return parser.parse_args()


def _cases(options: argparse.Namespace, device: devices.DeviceKind, folder: Path) -> list[Case]:
    base = load_config(options.config).model if options.config else PRESETS[options.preset or "fanformer-1b"]
    for name, *rest in options.case:
        if not rest or rest[0] not in MODELS:
            found = f"{rest[0]!r} is no model" if rest else "it has no model"
            raise InputError(f"--case {name}: {found}; write {' or '.join(MODELS)} after its name")
    tokens = write_tokens(folder / "tokens", base.vocab_size, 100 * options.seq_length)
    cases = []
    for number, (name, model, *settings) in enumerate(options.case):
        values = run_values(
            MODELS[model](base),
            "bf16",
            tokens,
            folder / f"run-{number}",
            device=device,
            micro_batch_size=options.micro_batch_size,
            global_batch_size=options.micro_batch_size * options.micro_batches,
        )
        values["model"]["seq_length"] = options.seq_length
        variables = {}
        for setting in settings:
            key, _, text = setting.partition("=")
            section, _, field_name = key.partition(".")
            if field_name:
                values.setdefault(section, {})[field_name] = _json(setting, text)
            else:
                variables[key] = text
        config_from_dict(values)  # refuses what is not a field
        cases.append(Case(name, values, variables))
    return cases


def _json(setting: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InputError(f"--case … {setting}: {text!r} is not JSON; write it as in 1, true or '\"local\"'") from None


def _machine(device: devices.DeviceKind) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    known = machine_of_device(name)
    return {
        "name": name,
        "like": next((short for short, each in known_machines().items() if each == known), None),
        "torch": torch.__version__,
        "bf16_flops_per_second": known and known.bf16_flops_per_second,
        "relative_error": known and known.relative_error,
    }


def _rates(model: FANformerConfig, micro_batch_size: int, device: devices.DeviceKind) -> dict[str, float]:
    rates = MatrixClock(model, micro_batch_size * model.seq_length, torch.bfloat16, torch.device(device)).rates()
    if device == "cuda":
        torch.cuda.empty_cache()  # the cases need it
    return rates._asdict()


def _take_turns(cases: list[Case], options: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    order = [case for number in range(options.rounds) for case in (cases if number % 2 == 0 else cases[::-1])]
    ahead = options.ahead or max(1, usable_cores() // 2)
    for first in range(0, len(order), ahead):
        turns = []
        for number, case in enumerate(order[first : first + ahead], first):
            content = {"values": case.values, "warm_up": options.warm_up, "steps": options.steps}
            turns.append(Turn(case, folder / f"turn-{number}.json", content))
        for turn in turns:
            turn.await_ready()
        for turn in turns:
            if not turn.take():
                report["failed"] = [*report["failed"], turn.case.name]
            report["cases"] = [_line(case, report["machine"]) for case in cases if case.turns]
            write_atomically(options.json, json.dumps(report, indent=1) + "\n")


def _line(case: Case, machine: dict[str, Any]) -> dict[str, Any]:
    training, model = case.values["training"], case.model
    seconds = statistics.median(turn["seconds"] for turn in case.turns)
    flops = training["global_batch_size"] * model.seq_length * training_flops_per_token(model) / seconds
    peak, like = machine["bf16_flops_per_second"], machine["like"]  # None: they are not known
    return {
        "case": case.name,
        "parameters": model.num_parameters,
        "turns": [turn["seconds"] for turn in case.turns],
        "step_seconds": seconds,
        "between_steps_seconds": statistics.median(turn["between_steps"] for turn in case.turns),
        "tokens_per_second": training["global_batch_size"] * model.seq_length / seconds,
        "model_flops_per_second": flops,
        "share_of_peak": None if peak is None else flops / peak,
        "peak_memory_bytes": max(turn["peak_memory_bytes"] for turn in case.turns),
        "predicted_step_seconds": like and predicted_seconds(case.values, {"like": like}),
    }


def _shown(line: dict[str, Any]) -> str:
    share = "-" if line["share_of_peak"] is None else f"{line['share_of_peak']:.2%}"
    return (
        f"{line['case']:32} {line['step_seconds']:8.4f} s {line['model_flops_per_second'] / 1e12:8.2f} TFLOP/s "
        f"{share:>7} {line['peak_memory_bytes'] / 1e9:6.2f} GB"
    )


if __name__ == "__main__":
    sys.exit(main())
