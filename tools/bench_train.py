r"""Measure training steps of several cases in turns: seconds, tokens/s, model FLOP/s, memory.

    python tools/bench_train.py                                   # a small model on this machine's CPU
    python tools/bench_train.py --preset fanformer-1b --alone --micro-batch-size 8 --json steps.json \
        --case F fanformer --case FP8 fanformer precision.fp8=hybrid --case T transformer 'layout=tp=2'

A case is a name, a model and settings. Models: `fanformer`, the model of the preset or configuration; `transformer`,
the same without FAN; `same-params`, the FANformer with as many parameters as the transformer (a smaller d_ff);
`p=0.125`, another p_ratio. Settings: fields (`section.field=YAML`), a layout as for `parity`, variables (`NAME=value`).
`--peers` adds plain PyTorch on the model for transformers (`benchmarking.peers`), on a CPU.

Every case is a whole Trainer on random tokens, in separate processes. Cases take turns, so that a busy machine slows
all of them alike: compare ratios. With `--alone` each turn has new processes, for cases that do not fit into memory
together; the processes of several turns import in advance. The report is written anew after each turn.

`--rates` measures the machine in each round, too. The report is then a machine file for `plan --gpu`, and has shares of
the measured rate of matrix products and step times by formula on that machine. Otherwise shares and predictions follow
the data sheet's rate in bf16, if `plan/machines.yaml` knows the chip.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from benchmarking.machine import measured_machine, predicted_seconds
from benchmarking.matrix_rate import MatrixClock, Rates
from benchmarking.peers import PEERS, Peer, start_peer
from benchmarking.ranks import CaseProcesses, Ended, ranks_of, run_values, write_tokens

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.model.config import PRESETS, FANformerConfig, as_transformer, torch_dtype, with_same_parameters
from megatron_fanformer.model.layouts import parse_layout
from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.plan.job import training_flops_per_token
from megatron_fanformer.plan.machines import known_machines, machine_of_device
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.train.config import config_from_dict, load_config

SMALL = FANformerConfig(  # the model on which the authors' implementation was measured on a CPU
    num_layers=8, hidden_size=512, ffn_hidden_size=2048, num_attention_heads=8, vocab_size=50_304, seq_length=512
)


@dataclass
class Case:
    """A run's configuration, and its turns so far."""

    name: str
    values: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables."""
    world_size: int = 1
    peer: Peer | None = None
    """The program that trains the model in place of a Trainer."""
    turns: list[float] = field(default_factory=list)
    """Seconds of a step."""
    rates: list[Rates] = field(default_factory=list)
    """Rates of the machine in the rounds of the turns."""
    predictions: list[float] = field(default_factory=list)
    peak_memory: int = 0

    def start(self) -> CaseProcesses:
        """Start the processes, which import everything and wait."""
        training, model = self.values["training"], config_from_dict(self.values).model
        if self.peer is not None:
            return start_peer(
                self.peer, model, self.values["precision"]["dtype"] == "bf16", training["micro_batch_size"]
            )
        with patch.dict(os.environ, self.variables):
            return ranks_of(self.values, self.world_size)


def main() -> int:
    """Take all turns, and print a table; return the exit code, which is 1 if a case failed."""
    options = _options()
    devices.prepare_libraries()
    device = devices.resolve_device(options.device)
    if device == "cpu":
        devices.hide_gpus()
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        try:
            if problems := file_problems(json=options.json):
                raise InputError("\n".join(problems))
            cases = _cases(options, device, Path(folder))
        except FanformerError as error:
            print(f"bench_train: {error}", file=sys.stderr)
            return error.exit_code
        report: dict[str, Any] = {"device": _device(device), "failed": [], "cases": []}
        print(", ".join(f"{name} {value}" for name, value in report["device"].items()))
        machine = Machine(cases[0], device, report) if options.rates else None
        take_turns = _alone if options.alone else _side_by_side
        take_turns(cases, options, report, machine)
    for line in report["cases"]:
        print(_shown(line))
    return 1 if report["failed"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="use the model of a run's configuration")
    parser.add_argument("--case", nargs="+", action="append", metavar="NAME", help="NAME MODEL [SETTING …]")
    parser.add_argument("--peers", action="store_true", help="plain PyTorch besides, on the model")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="of all cases (bf16)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens per sample; the model's own by default")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N", help="(4)")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="of a replica's step (1)")
    parser.add_argument("--alone", action="store_true", help="new processes for each turn")
    parser.add_argument("--ahead", type=int, metavar="N", help="turns that import at once (half of the cores)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns per case (5)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="per turn (2)")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="steps before, not timed (2)")
    parser.add_argument("--rates", action="store_true", help="measure the machine, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the device and the cases there")
    return parser.parse_args()


def _cases(options: argparse.Namespace, device: devices.DeviceKind, folder: Path) -> list[Case]:
    base = load_config(options.config).model if options.config else PRESETS.get(options.preset, SMALL)
    base = dataclasses.replace(base, seq_length=options.seq_length or base.seq_length)
    tokens = write_tokens(folder / "tokens", base.vocab_size, 100 * base.seq_length)

    def case(name: str, model: str, *settings: str) -> Case:
        values = run_values(_model(model, base), options.dtype, tokens, folder / name, device=device)
        made = Case(name, values)
        replicas = 1
        for setting in settings:
            key, _, text = setting.partition("=")
            section, _, name_of_field = key.partition(".")
            if key == "layout":
                layout = parse_layout(f"distributed_optimizer=true,{text}")
                values |= {
                    "parallel": dataclasses.asdict(layout.parallel),
                    "kernels": dataclasses.asdict(layout.kernels),
                }
                made.world_size, replicas = layout.world_size, layout.parallel.data_parallel_size or 1
            elif name_of_field:
                values.setdefault(section, {})[name_of_field] = yaml.safe_load(text)
            else:
                made.variables[key] = text
        samples = options.micro_batch_size * options.micro_batches * replicas
        sizes = {"micro_batch_size": options.micro_batch_size, "global_batch_size": samples}
        values["training"] = {**sizes, **values["training"]}
        if problems := config_from_dict(values).model.problems():
            raise InputError("; ".join(problems))
        return made

    given = options.case or [[name, name] for name in ("fanformer", "transformer", "same-params")]
    for name, *rest in given:
        if not rest:
            raise InputError(f"--case {name}: it has no model; write fanformer, transformer, same-params or p=RATIO")
    cases = [case(*words) for words in given]
    if options.peers:
        if device != "cpu":
            raise InputError("--peers is for a CPU; leave it out, or set --device cpu")
        cases += [dataclasses.replace(case(peer.name, given[0][1]), peer=peer) for peer in PEERS]
    return cases


def _model(name: str, base: FANformerConfig) -> FANformerConfig:
    made = {"fanformer": lambda model: model, "transformer": as_transformer, "same-params": with_same_parameters}
    if name in made:
        return made[name](base)
    try:
        return dataclasses.replace(base, fan=dataclasses.replace(base.fan, p_ratio=float(name.removeprefix("p="))))
    except ValueError:
        raise InputError(f"{name!r} is no model; write fanformer, transformer, same-params or p=RATIO") from None


def _device(device: devices.DeviceKind) -> dict[str, Any]:
    name = f"{usable_cores()} cores of {platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
    name = torch.cuda.get_device_name() if device == "cuda" else name
    known = machine_of_device(name)
    return {
        "name": name,
        "torch": torch.__version__,
        "like": next((short for short, machine in known_machines().items() if machine == known), None),
        "bf16_flops_per_second": known and known.bf16_flops_per_second,
    }


class Machine:
    """Measures the rates of this machine in the products of a case's model; the report gets the median round."""

    def __init__(self, case: Case, device: devices.DeviceKind, report: dict[str, Any]) -> None:
        self._model = config_from_dict(case.values).model
        self._dtype, self._device = torch_dtype(case.values["precision"]["dtype"]), torch.device(device)
        self._size = case.values["training"]["micro_batch_size"]
        if device == "cpu":
            torch.set_num_threads(devices.threads_per_rank(1))
            cpu_kernels.load(devices.cache_folder())  # or attention's rate would not be that of a run
        self._clock = MatrixClock(self._model, self._size * self._model.seq_length, self._dtype, self._device)
        self._rounds: list[tuple[float, dict[str, Any]]] = []
        self._report = report

    def measure(self) -> tuple[Rates, dict[str, Any]]:
        """Return the rates now, and the values of a machine file."""
        rates = self._clock.rates()
        measured = measured_machine(self._model, self._size, self._dtype, rates.mean, self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the cases need it
        self._rounds = sorted([*self._rounds, (rates.mean, measured)], key=lambda entry: entry[0])
        self._report |= {"rates": rates._asdict(), "machine": self._rounds[len(self._rounds) // 2][1]}
        return rates, measured


def _side_by_side(
    cases: list[Case], options: argparse.Namespace, report: dict[str, Any], machine: Machine | None
) -> None:
    """Let all cases take their turns in processes that live until the end."""
    with ExitStack() as stack:
        running = []
        for case in cases:
            running.append(stack.enter_context(closing(case.start())))
            running[-1].begin()
            running[-1].steps(options.warm_up)
        for _ in range(options.rounds):
            now = machine and machine.measure()
            for case, processes in zip(cases, running, strict=True):
                _record(case, processes, options, now)
            _write(cases, options, report)


def _alone(cases: list[Case], options: argparse.Namespace, report: dict[str, Any], machine: Machine | None) -> None:
    """Start new processes for each turn; every second round takes the cases in reverse order."""
    now = machine and machine.measure()
    order = [case for number in range(options.rounds) for case in (cases if number % 2 == 0 else cases[::-1])]
    ahead = options.ahead or max(1, usable_cores() // 2)
    for first in range(0, len(order), ahead):
        several = order[first : first + ahead]
        with ExitStack() as stack:
            started = [stack.enter_context(closing(case.start())) for case in several]
            for case, processes in zip(several, started, strict=True):
                try:
                    processes.begin()
                    processes.steps(options.warm_up)
                    _record(case, processes, options, now)
                except Ended:
                    print(f"bench_train: {case.name}: its process ended; its message stands above", file=sys.stderr)
                    report["failed"].append(case.name)
                processes.close()  # the next one needs the memory
                _write(cases, options, report)


def _record(
    case: Case, processes: CaseProcesses, options: argparse.Namespace, now: tuple[Rates, dict[str, Any]] | None
) -> None:
    case.turns.append(processes.steps(options.steps))
    case.peak_memory = max(case.peak_memory, processes.peak_memory())
    if now is not None:
        case.rates.append(now[0])
        if case.peer is None and case.world_size == 1:
            case.predictions.append(predicted_seconds(case.values, now[1]))


def _write(cases: list[Case], options: argparse.Namespace, report: dict[str, Any]) -> None:
    report["cases"] = [_line(case, cases[0], report["device"]) for case in cases if case.turns]
    if options.json:
        write_atomically(options.json, json.dumps(report, indent=1) + "\n")


def _line(case: Case, first: Case, device: dict[str, Any]) -> dict[str, Any]:
    model = config_from_dict(case.values).model
    seconds = statistics.median(case.turns)
    tokens = case.values["training"]["global_batch_size"] * model.seq_length
    flops = tokens * training_flops_per_token(model)
    peak, like = device["bf16_flops_per_second"], device["like"]
    line = {
        "case": case.name,
        "parameters": model.num_parameters,
        "turns": case.turns,
        "step_seconds": seconds,
        "over_first": statistics.median(one / other for one, other in zip(case.turns, first.turns, strict=False)),
        "tokens_per_second": tokens / seconds,
        "model_flops_per_second": flops / seconds,
        "share_of_peak": None if peak is None else flops / seconds / peak,
        "peak_memory_bytes": case.peak_memory,
        "predicted_step_seconds": None,
    }
    if case.rates:
        in_turns = (flops / turn / rate.fastest for turn, rate in zip(case.turns, case.rates, strict=True))
        line["share_of_fastest_product"] = statistics.median(in_turns)
    if case.predictions:
        line["predicted_step_seconds"] = statistics.median(case.predictions)
    elif like and case.peer is None and case.world_size == 1:
        line["predicted_step_seconds"] = predicted_seconds(case.values, {"like": like})
    return line


def _shown(line: dict[str, Any]) -> str:
    parts: list[tuple[Any, Callable[[Any], str]]] = [
        (line["share_of_peak"], lambda share: f"{share:.1%} of the data sheet's"),
        (line.get("share_of_fastest_product"), lambda share: f"{share:.1%} of the fastest product's"),
        (line["predicted_step_seconds"], lambda seconds: f"{seconds:.4f} s by formula"),
    ]
    return (
        f"{line['case']:28} {line['step_seconds']:8.4f} s {line['over_first']:6.3f} {line['tokens_per_second']:9,.0f} "
        f"tokens/s {line['model_flops_per_second'] / 1e12:8.3f} TFLOP/s {line['peak_memory_bytes'] / 1e9:6.2f} GB  "
        + ", ".join(show(value) for value, show in parts if value is not None)
    )


if __name__ == "__main__":
    sys.exit(main())
