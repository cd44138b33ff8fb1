"""Measures training: tokens/s, model FLOP/s, and their share of what the machine's matrix products reach.

    python tools/bench_train.py                                   # a small model on this machine's CPU
    python tools/bench_train.py --preset fanformer-1b --dtypes bf16 fp8 --micro-batch-size 8 --json report.json
    python tools/bench_train.py --config examples/fanformer-1b.yaml --layouts tp=1 tp=2

Every case is a whole Trainer on random tokens, in processes of its own. Cases of one number format take turns, a few
steps at a time, with the model's own matrix products between them: a machine that is busy with something else slows all
alike, and ratios hold. Beside each case's step stands what the formula predicts of it (`planning.step_time`) from the
machine's rates, measured in the same minutes. Compared are:

- fanformer: the FANformer of the preset or configuration;
- transformer: the same without FAN, of equal width;
- same-params: the FANformer with as many parameters as that Transformer (less d_ff);
- p=0.125 and the like: the FANformer with another p_ratio.

On a CPU `--peers` lets the model for transformers take turns, trained by plain PyTorch (`benchmarking.peers`).
"""

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarking.arguments import count
from benchmarking.machine import measured_machine, predicted_seconds
from benchmarking.matrix_rate import MatrixClock
from benchmarking.peers import Peer, runnable_peers, start_peer
from benchmarking.ranks import CaseProcesses, Timing, ranks_of, run_values, write_tokens

from megatron_fanformer.durable_files import file_problems
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.model.config import PRESETS, FANformerConfig, as_transformer, with_same_parameters
from megatron_fanformer.model.dtypes import DTYPES
from megatron_fanformer.model.layouts import parse_layout
from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.planning.flops import training_flops_per_token
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.training.config import load_config

SMALL = FANformerConfig(  # the one that the authors' implementation was measured with on a CPU
    num_layers=8, hidden_size=512, ffn_hidden_size=2048, num_attention_heads=8, vocab_size=50_304, seq_length=512
)
WARM_UP = 2
SINGLE = "tp=1"


@dataclass
class Case:
    """A model in a number format and a layout, and what was measured of it."""

    model_name: str
    model: FANformerConfig
    dtype: str
    layout: str
    timings: list[Timing] = field(default_factory=list)
    predictions: list[float] = field(default_factory=list)
    """Seconds of a step by formula, from the machine's rates in the same round; of one rank, which has all cores."""
    peak_memory: int = 0
    peer: Peer | None = None
    """What trains it in place of a Trainer."""
    setting: tuple[str, str, Any] | None = None
    """Section, field and value of what distinguishes it from the case before."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        parts = [self.model_name, self.dtype, *([] if self.layout == SINGLE else [self.layout])]
        return " ".join([*parts, *([] if self.setting is None else [f"{self.setting[1]}={self.setting[2]}"])])

    @property
    def step_seconds(self) -> float:
        """The median over the rounds."""
        return statistics.median(timing.seconds for timing in self.timings)


def main() -> int:
    """Print the table, and write the JSON."""
    options = _options()
    devices.prepare_libraries()
    device = devices.resolve_device(options.device)
    if device == "cpu":
        devices.hide_gpus()
    try:
        cases = _cases(options)
        options.set = _settings(options.set)
        if options.peers and (device != "cpu" or "fp8" in options.dtypes):
            raise InputError("--peers is for a CPU, in fp32 and bf16; leave it out, or set --device cpu and --dtypes")
        if found := file_problems(json=options.json):
            raise InputError("\n".join(found))
    except FanformerError as error:
        print(f"bench_train: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{_machine(device)}; {options.rounds} rounds of {options.steps} steps of {_batch(options, cases[0].model)}")
    report: dict[str, Any] = {"machine": {}, "cases": []}
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        for dtype in options.dtypes:
            group = [case for case in cases if case.dtype == dtype]
            rates, machine = _run(group, options, device, Path(folder))
            report["machine"] = {**machine, **report["machine"]}  # shares are of the first format's rate
            lines = [_line(case, group[0], rates, options) for case in group]
            report["cases"] += lines
            _print(group, lines)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="use the model of a run's configuration")
    parser.add_argument("--models", nargs="+", default=["fanformer", "transformer", "same-params"], metavar="MODEL")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16", "fp8"))
    parser.add_argument("--layouts", nargs="+", default=[SINGLE], metavar="LAYOUT", help="such as tp=2,sp=true")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens per sample; the model's own by default")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N")
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="one micro batch per replica by default")
    parser.add_argument("--peers", action="store_true", help="plain PyTorch besides, on the first model")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="turns per case")
    parser.add_argument("--steps", type=count, default=2, metavar="N", help="steps per turn")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("SECTION.FIELD", "VALUE"))
    parser.add_argument(
        "--against",
        nargs=2,
        action="append",
        default=[],
        metavar=("SECTION.FIELD", "VALUE"),
        help="every case once more with that setting",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine and the cases there")
    return parser.parse_args()


def _settings(pairs: list[list[str]]) -> list[tuple[str, str, Any]]:
    """Section, field and value of each --set."""
    found = []
    for key, text in pairs:
        section, _, name = key.partition(".")
        if not (section and name):
            raise InputError(f"--set {key}: name a field with its section, as in training.seed")
        try:
            found.append((section, name, json.loads(text)))
        except ValueError:
            raise InputError(f"--set {key}: {text!r} is not JSON; write it as in 1, true or '\"bf16\"'") from None
    return found


def _cases(options: argparse.Namespace) -> list[Case]:
    base = _base_model(options)
    for layout in options.layouts:
        parse_layout(layout)  # refuses what it cannot read
    if found := [problem for name in options.models for problem in _model(name, base).problems()]:
        raise InputError("; ".join(dict.fromkeys(found)))
    peers = runnable_peers() if options.peers else ()
    settings = (None, *_settings(options.against))
    cases = []
    for dtype in options.dtypes:
        cases += [
            Case(name, _model(name, base), dtype, layout, setting=setting)
            for layout in options.layouts
            for name in options.models
            for setting in settings
        ]
        first = _model(options.models[0], base)
        cases += [Case(peer.name, first, dtype, SINGLE, peer=peer) for peer in peers]
    return cases


def _base_model(options: argparse.Namespace) -> FANformerConfig:
    named = PRESETS[options.preset] if options.preset else SMALL
    base = load_config(options.config).model if options.config else named
    return dataclasses.replace(base, seq_length=options.seq_length or base.seq_length)


def _model(name: str, base: FANformerConfig) -> FANformerConfig:
    if name == "fanformer":
        return base
    if name == "transformer":
        return as_transformer(base)
    if name == "same-params":
        return with_same_parameters(base)
    try:
        p_ratio = float(name.removeprefix("p="))
    except ValueError:
        raise InputError(
            f"model {name!r} is not known; choose fanformer, transformer, same-params or p=RATIO"
        ) from None
    return dataclasses.replace(base, fan=dataclasses.replace(base.fan, p_ratio=p_ratio))


def _run(
    group: list[Case], options: argparse.Namespace, device: devices.DeviceKind, folder: Path
) -> tuple[list[float], dict[str, Any]]:
    """Let all cases of a number format take their turns.

    Returns the fastest matrix product's rate in each round, and the machine in the round of its median rate.
    """
    model = group[0].model
    tokens = write_tokens(folder / f"tokens-{group[0].dtype}", model.vocab_size, 100 * model.seq_length)
    if device == "cpu":
        torch.set_num_threads(devices.threads_per_rank(1))
        cpu_kernels.load(devices.cache_folder())  # or attention's rate would not be that of a run
    dtype = DTYPES.get(group[0].dtype, torch.bfloat16)  # fp8 is compared with bf16's rate
    micro_batch = options.micro_batch_size * model.seq_length
    clock = MatrixClock(model, micro_batch, dtype, torch.device(device))
    runs = [_values(case, options, tokens, folder / f"{case.dtype}-{n}", device) for n, case in enumerate(group)]
    ranks, rates, machines = [], [], []
    try:
        for case, values in zip(group, runs, strict=True):
            ranks.append(_started(case, values, options))
            ranks[-1].steps(WARM_UP)
        for _ in range(options.rounds):
            rates.append(clock.rates())
            size = options.micro_batch_size
            machines.append(measured_machine(model, size, dtype, rates[-1].mean, torch.device(device)))
            for case, values, own in zip(group, runs, ranks, strict=True):
                case.timings.append(own.steps(options.steps))
                if case.peer is None and parse_layout(case.layout).world_size == 1:
                    case.predictions.append(predicted_seconds(values, machines[-1]))
        for case, own in zip(group, ranks, strict=True):
            case.peak_memory = own.peak_memory()
    finally:
        for own in ranks:
            own.close()
    middle = sorted(range(len(rates)), key=lambda number: rates[number].mean)[len(rates) // 2]
    return [rate.fastest for rate in rates], machines[middle]


def _started(case: Case, values: dict[str, Any], options: argparse.Namespace) -> CaseProcesses:
    if case.peer is None:
        return ranks_of(values, parse_layout(case.layout).world_size)
    return start_peer(case.peer, case.model, case.dtype == "bf16", _samples_a_step(case, options))


def _values(
    case: Case, options: argparse.Namespace, tokens: str, run: Path, device: devices.DeviceKind
) -> dict[str, Any]:
    layout = parse_layout(f"distributed_optimizer=true,{case.layout}")
    values = run_values(
        case.model,
        "fp32" if case.dtype == "fp32" else "bf16",
        tokens,
        run,
        device=device,
        micro_batch_size=options.micro_batch_size,
        global_batch_size=_samples_a_step(case, options),
    )
    values |= {"parallel": dataclasses.asdict(layout.parallel), "kernels": dataclasses.asdict(layout.kernels)}
    if case.dtype == "fp8":
        values["precision"]["fp8"] = "hybrid"
    for section, name, value in [*options.set, *([] if case.setting is None else [case.setting])]:
        values.setdefault(section, {})[name] = value
    return values


def _samples_a_step(case: Case, options: argparse.Namespace) -> int:
    replicas = parse_layout(case.layout).parallel.data_parallel_size or 1
    return options.global_batch_size or options.micro_batch_size * replicas


def _line(case: Case, first: Case, rates: list[float], options: argparse.Namespace) -> dict[str, Any]:
    """What is written about a case."""
    tokens = _samples_a_step(case, options) * case.model.seq_length
    flops_a_step = tokens * training_flops_per_token(case.model)
    model_flops = flops_a_step / case.step_seconds
    best = max(rates)
    in_turns = [flops_a_step / own.seconds / rate for own, rate in zip(case.timings, rates, strict=True)]
    ratios = [own.seconds / other.seconds for own, other in zip(case.timings, first.timings, strict=True)]
    return {
        "case": case.name,
        "parameters": case.model.num_parameters,
        "tokens_per_second": tokens / case.step_seconds,
        "step_seconds": case.step_seconds,
        "between_steps_seconds": statistics.median(timing.between_steps for timing in case.timings),
        "model_flops_per_second": model_flops,
        "matrix_flops_per_second": best,
        "share_of_matrix_rate": model_flops / best,
        "share_of_matrix_rate_in_turns": statistics.median(in_turns),
        f"step_time_over_{first.name.replace(' ', '_')}": statistics.median(ratios),
        **_prediction(case),
        "peak_memory_bytes": case.peak_memory,
    }


def _prediction(case: Case) -> dict[str, float]:
    """What the formula says of a step, and of it for each second measured in the same round."""
    if not case.predictions:
        return {}
    ratios = [predicted / own.seconds for predicted, own in zip(case.predictions, case.timings, strict=True)]
    return {
        "predicted_step_seconds": statistics.median(case.predictions),
        "predicted_over_measured": statistics.median(ratios),
    }


def _print(group: list[Case], lines: list[dict[str, Any]]) -> None:
    first = group[0].name
    rate = lines[0]["matrix_flops_per_second"]
    print(f"\n{group[0].dtype}: the fastest matrix product reached {rate / 1e12:.3f} TFLOP/s")
    print(
        f"{'case':32} {'parameters':>12} {'tokens/s':>10} {'TFLOP/s':>8} {'share':>6} {'turns':>6} "
        f"{'time':>6} {'GB':>7} {'between':>8}"
    )
    for line in lines:
        over = line[f"step_time_over_{first.replace(' ', '_')}"]
        print(
            f"{line['case']:32} {line['parameters']:12,} {line['tokens_per_second']:10,.0f} "
            f"{line['model_flops_per_second'] / 1e12:8.3f} {line['share_of_matrix_rate']:6.1%} "
            f"{line['share_of_matrix_rate_in_turns']:6.1%} {over:6.3f} "
            f"{line['peak_memory_bytes'] / 1e9:7.2f} {1000 * line['between_steps_seconds']:6.1f}ms"
        )
    for line in lines:
        if predicted := line.get("predicted_step_seconds"):
            error = line["predicted_over_measured"] - 1
            print(f"{line['case']:32} {line['step_seconds']:.4f} s a step; by formula {predicted:.4f} s, {error:+.1%}")
    print(f"(share: model FLOP/s of that product's rate; turns: of the rate in the same round; time: over {first})")


def _batch(options: argparse.Namespace, model: FANformerConfig) -> str:
    return f"micro batches of {options.micro_batch_size} x {model.seq_length} tokens"


def _machine(device: devices.DeviceKind) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cores = f"{devices.threads_per_rank(1)} cores of {platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{cores}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
