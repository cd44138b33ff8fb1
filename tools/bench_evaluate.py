"""Measures evaluation: tokens/s of scoring the requests of tasks, against the forward of training's own micro batches.

    python tools/bench_evaluate.py --requests paper.requests                  # a small model on this machine's CPU
    python tools/bench_evaluate.py --requests paper.requests --preset fanformer-1b --dtype bf16 --device cuda
    python tools/bench_evaluate.py --requests paper.requests --tasks piqa boolq --limit 50 --json report.json

Both take turns, so that a machine that is busy with something else slows both alike. Tokens are those that the model is
given, without padding. In each turn all requests are scored that are asked for, by one rank; the forward takes as many
tokens, in micro batches of whole samples as training has them, without gradients.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_train import SMALL

from megatron_fanformer.errors import FanformerError
from megatron_fanformer.evaluation.requests import TaskRequests, cut_to_context, read_requests
from megatron_fanformer.evaluation.tasks import resolve
from megatron_fanformer.model.config import PRESETS, FANformerConfig
from megatron_fanformer.model.dtypes import DTYPES
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.config import RuntimeConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed
from megatron_fanformer.training.config import load_config


def main() -> int:
    """Print the rates of each round and their medians, and write the JSON."""
    options = _options()
    devices.prepare_libraries()
    try:
        named = PRESETS[options.preset] if options.preset else SMALL
        model = load_config(options.config).model if options.config else named
        tasks = _tasks(options, model)
        report = _measured(options, model, tasks)
    except FanformerError as error:
        print(f"bench_evaluate: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"{report['requests']:,} requests of {len(tasks)} tasks, {report['tokens']:,} tokens: "
        f"scored at {report['scored_tokens_per_second']:,.0f} tokens/s, "
        f"forward at {report['forward_tokens_per_second']:,.0f}; {report['ratio']:.1%} of it (median of the rounds)"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--requests", type=Path, required=True, metavar="FILE", help="as `evaluate --prepare` writes it"
    )
    parser.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help="tasks or groups; all by default")
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task, its first ones")
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="use the model of a run's configuration")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N", help="of training's forward")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="of scoring; as many as that by default")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args()


def _tasks(options: argparse.Namespace, model: FANformerConfig) -> list[TaskRequests]:
    """Those asked for, and what they ask without a context, cut to the model's sequences."""
    file = read_requests(options.requests)
    names = [task.name for task in resolve(options.tasks)] or list(file.tasks)
    tasks = [cut_to_context(task, model.seq_length) for task in file.selected(names, limit=options.limit).values()]
    return [asked for task in tasks for asked in (task, task.unconditional) if asked is not None]


def _measured(options: argparse.Namespace, model: FANformerConfig, tasks: Sequence[TaskRequests]) -> dict[str, Any]:
    with distributed(ParallelConfig(), None, RuntimeConfig(device=options.device)) as grid:
        from megatron_fanformer.evaluation.rows import evaluating, row_losses
        from megatron_fanformer.evaluation.scoring import log_probabilities
        from megatron_fanformer.model.build import build_stages
        from megatron_fanformer.runtime.seeding import seed_everything

        seed_everything(0)
        stages = build_stages(model, ParallelConfig(), grid, dtype=DTYPES[options.dtype], seed=0)
        size, tokens = options.micro_batch_size, sum(int((np.diff(task.offsets) - 1).sum()) for task in tasks)
        batch_tokens = options.batch_tokens or size * model.seq_length
        batch = _micro_batch(model, size)
        micro_batches = max(1, round(tokens / (size * model.seq_length)))

        def score(asked: Sequence[TaskRequests]) -> None:
            log_probabilities(stages, asked, grid, batch_tokens=batch_tokens)

        def run_forward(count: int) -> None:
            with evaluating(stages):
                for _ in range(count):
                    row_losses(stages, iter([batch]), grid, num_micro_batches=1, micro_batch_size=size)

        run_forward(1)
        score(tasks[:1])
        rounds = []
        for number in range(options.rounds):
            forward = micro_batches * size * model.seq_length / _seconds(lambda: run_forward(micro_batches))
            scored = tokens / _seconds(lambda: score(tasks))
            rounds.append({"scored_tokens_per_second": scored, "forward_tokens_per_second": forward})
            print(f"round {number + 1}: scored {scored:,.0f} tokens/s, forward {forward:,.0f}, {scored / forward:.1%}")
    return {
        "model_parameters": model.num_parameters,
        "requests": sum(len(task) for task in tasks),
        "tokens": tokens,
        "batch_tokens": batch_tokens,
        **{name: statistics.median(each[name] for each in rounds) for name in rounds[0]},
        "ratio": statistics.median(
            each["scored_tokens_per_second"] / each["forward_tokens_per_second"] for each in rounds
        ),
        "rounds": rounds,
    }


def _micro_batch(model: FANformerConfig, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(model.vocab_size, (size, model.seq_length + 1), generator=torch.Generator().manual_seed(0))
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(size, model.seq_length),
        "position_ids": torch.arange(model.seq_length).expand(size, -1).contiguous(),
    }


def _seconds(work: Callable[[], None]) -> float:
    """That it takes; what it returns is on the CPU, so that a device's work is over by then."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
