"""The table of the queue's parts, in order of worth: the first ones are run where there is little time.

`docs/gpu.md` says how to use it. Minutes are limits, from one H100 with 16 cores (docs/lab-log.md) or reckoned.
"""

from queueing import commands
from queueing.figures import (
    Read,
    cases,
    finding,
    judged_findings,
    not_passed,
    numbers,
    of_case,
    of_json,
    of_line,
    passed,
    ratio,
)
from queueing.record import Goal, Part


def _over(case: str, other: str) -> Read:
    return ratio(of_case("step.json", case, "step_seconds"), of_case("step.json", other, "step_seconds"))


def _at_most(name: str, case: str, other: str, most: float) -> Goal:
    return Goal(name=name, read=_over(case, other), at_most=most)


def _share_of_peak(case: str) -> Goal:
    read = of_case("step.json", case, "share_of_peak")
    return Goal(name="model FLOP/s of the data sheet's, graphs", read=read, at_least=0.58, unit="%", scale=100)


def _rate(case: str) -> Goal:
    read = of_case("step.json", case, "model_flops_per_second")
    return Goal(name=f"model FLOP/s, {case}", read=read, at_least=640e12, unit=" TFLOP/s", scale=1e-12)


PARTS = (
    Part(
        name="machine",
        decides="whether this machine has all that the queue needs",
        minutes=1.1,
        commands=commands.machine,
        writes=("machine.json",),
        goals=(Goal(name="GPUs", read=of_json("machine.json", "gpus"), at_least=1, everywhere=True),),
        needs=(),
    ),
    Part(
        name="new-tests",
        decides="whether the tests hold that no GPU has seen: fused attention, also within documents; a profile",
        minutes=2.5,
        commands=commands.new_tests,
        writes=(),
        goals=(
            Goal(name="passed", read=passed("test_transformer_engine.log"), at_least=2, everywhere=True),
            Goal(name="passed, profiles", read=passed("test_profiling.log"), at_least=1),
        ),
    ),
    Part(
        name="step",
        decides="FANformer-1B and its Transformer in bf16, micro batch 8, with CUDA graphs and without",
        minutes=3,
        commands=commands.step,
        writes=("step.json",),
        figures=cases,
        goals=(
            _share_of_peak("F, graphs"),
            _at_most("FANformer over Transformer, graphs", "F, graphs", "T, graphs", 1.03),
            _at_most("FANformer over Transformer", "F", "T", 1.03),
        ),
    ),
    Part(
        name="micro-batches",
        decides="the same with four micro batches a step: AdamW on a quarter of them",
        minutes=2,
        commands=commands.micro_batches,
        writes=("step.json",),
        figures=cases,
        goals=(
            _share_of_peak("F, graphs"),
            _at_most("FANformer over Transformer, graphs", "F, graphs", "T, graphs", 1.03),
        ),
    ),
    Part(
        name="fp8",
        decides="FP8 with CUDA graphs, micro batch 8: the recipes, and the FAN map in FP8",
        minutes=4,
        commands=commands.fp8,
        writes=("step.json",),
        figures=cases,
        goals=(
            _rate("F, delayed"),
            _rate("F, tensorwise"),
            _at_most("FANformer over Transformer, delayed", "F, delayed", "T, delayed", 1.05),
            _at_most("the same, tensorwise, fp8_fan", "F, tensorwise, fp8_fan", "T, tensorwise", 1.05),
        ),
    ),
    Part(
        name="text",
        decides="whether the packages here give text enough to train on, once",
        minutes=4,
        commands=commands.text,
        writes=("manifest.json", "train.manifest.json", "held-out.manifest.json"),
        goals=(Goal(name="tokens", read=of_json("train.manifest.json", "tokens"), at_least=1e8),),
        kept=commands.text_kept,
        clears=lambda setting: [commands.claim_folder(setting)],
        on_stand_in=False,
    ),
    Part(
        name="claim",
        decides="the paper's claim at this size: FANformer less the Transformer, and less p 0, at each one's best rate",
        minutes=24,
        commands=commands.claim,
        writes=("result.json", "README.md"),
        figures=judged_findings,
        needs=("machine", "text"),
        least_minutes=3,
        closing=commands.claim_report,
        closing_seconds=75,  # the last cells' saves, too
        kept=commands.claim_kept,
        requires=lambda setting: [commands.CLAIM[setting.rehearses]],
        grace_seconds=40,
        on_stand_in=False,
    ),
    Part(
        name="layers-7b",
        decides="the rates that 7B's plan uses: four of its layers, micro batch 2",
        minutes=1.8,
        commands=commands.layers_of_7b,
        writes=("step.json",),
        figures=cases,
        goals=(
            Goal(
                name="step by formula over measured",
                read=ratio(
                    of_case("step.json", "F", "predicted_step_seconds"), of_case("step.json", "F", "step_seconds")
                ),
                at_least=0.91,
                at_most=1.09,
            ),
            Goal(
                name="matrix products of the data sheet's rate",
                read=ratio(
                    of_json("step.json", "rates", "mean"), of_json("step.json", "machine", "bf16_flops_per_second")
                ),
                at_least=0.60,
                at_most=0.72,
                unit="%",
                scale=100,
            ),
            _at_most("FANformer over Transformer", "F", "T", 1.03),
        ),
    ),
    Part(
        name="formats",
        decides="what moments, and sums of gradients, in bf16 save",
        minutes=2,
        commands=commands.formats,
        writes=("step.json",),
        figures=cases,
        goals=(_at_most("moments and gradients in bf16 over float32", "moments and gradients in bf16", "fp32", 0.953),),
    ),
    Part(
        name="settings",
        decides="what settings of the machine cost on one GPU",
        minutes=3.5,
        commands=commands.settings,
        writes=("step.json",),
        figures=cases,
        goals=(
            _at_most("32 connections over 1", "32 connections", "as usual", 1.02),
            _at_most("SM margins of 20 over 0", "margins of 20", "as usual", 1.02),
            _at_most("expandable segments over fixed", "as usual", "fixed segments", 1.02),
            _at_most("expandable segments over fixed, graphs", "graphs", "graphs, fixed segments", 1.02),
        ),
    ),
    Part(
        name="recipe",
        decides="what Muon, norms of heads and a z-loss cost, four micro batches a step",
        minutes=3,
        commands=commands.recipe,
        writes=("step.json",),
        figures=cases,
        goals=(
            _at_most("Muon over AdamW", "Muon", "AdamW", 1.15),
            _at_most("norms of heads over none", "norms of heads", "AdamW", 1.03),
            _at_most("z-loss over none", "z-loss", "AdamW", 1.01),
        ),
    ),
    Part(
        name="save",
        decides="what a checkpoint of 1B in the background costs: standing still, and the host's memory",
        minutes=3,
        commands=commands.save,
        writes=("save.json",),
        figures=numbers("save.json"),
        goals=(
            Goal(
                name="standing still, of a synchronous save",
                read=ratio(of_json("save.json", "stall_seconds"), of_json("save.json", "synchronous_seconds")),
                at_most=0.25,
            ),
            Goal(
                name="host memory, of the checkpoint's bytes",
                read=ratio(of_json("save.json", "host_bytes"), of_json("save.json", "checkpoint_bytes")),
                at_most=1.2,
            ),
        ),
        on_stand_in=False,
    ),
    Part(
        name="generation",
        decides="the paper's inference table: prefill of 4,096 tokens and decoding in fp16, 1 and 32 sequences",
        minutes=4,
        commands=commands.generation,
        writes=("batch-1/result.json", "batch-32/result.json"),
        goals=(
            *(
                Goal(
                    name=f"{phase}, FANformer over Transformer, {batch}",
                    read=finding(f"{batch}/result.json", f"seconds of {phase}, FANformer over Transformer"),
                    at_most=most,
                )
                for batch in ("batch-1", "batch-32")
                for phase, most in (("prefill", 1.02), ("decode", 1.05))
            ),
            Goal(
                name="memory, FANformer less Transformer",
                read=finding("batch-1/result.json", "memory at the peak, FANformer less Transformer"),
                at_least=90,
                at_most=102,
                unit=" MiB",
            ),
        ),
        on_stand_in=False,
    ),
    Part(
        name="tests",
        decides="whether all of tests/gpu holds",
        minutes=3.7,
        commands=commands.tests,
        writes=(),
        goals=(
            Goal(
                name="files that fail",
                read=not_passed(*(f"{file.stem}.log" for file in sorted(commands.TESTS.glob("test_*.py")))),
                at_most=0,
                everywhere=True,
            ),
        ),
        at_once=True,
    ),
    Part(
        name="fan-activation",
        decides="the FAN kernel's bytes/s against a copy's",
        minutes=0.7,
        commands=commands.fan_activation,
        writes=("fan.jsonl",),
        goals=tuple(
            Goal(
                name=f"of a copy's rate, {dtype} {way}",
                read=of_line("fan.jsonl", "share_of_copy", form="kernel", direction=way, dtype=dtype),
                at_least=0.85,
            )
            for dtype in ("bf16", "fp32")
            for way in ("forward", "backward")
        ),
    ),
    Part(
        name="loss-head",
        decides="the chunked loss head's time and memory against Megatron's",
        minutes=0.7,
        commands=commands.loss_head,
        writes=("head.jsonl",),
        goals=(
            Goal(name="time", read=of_line("head.jsonl", "time_ratio", case="chunked"), at_most=1.0),
            Goal(name="memory", read=of_line("head.jsonl", "memory_ratio", case="chunked"), at_most=0.2),
        ),
    ),
)
