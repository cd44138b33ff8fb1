"""What each verb takes on the command line, and the one function that it calls.

Each verb imports what it needs when it runs: torch and megatron-core take seconds, and so would every worker process
that imports `__main__` again. Errors in a configuration are reported before they are imported.
"""

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fanformer.durable_files import file_problems
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation.options import EvaluateOptions
from megatron_fanformer.experiments.probes.command import ExperimentOptions
from megatron_fanformer.experiments.report.command import ReportOptions
from megatron_fanformer.experiments.sweeps.options import SweepOptions
from megatron_fanformer.formats.options import ConvertOptions
from megatron_fanformer.generation.options import ChatConfig, GenerateConfig
from megatron_fanformer.inspection.options import InspectOptions
from megatron_fanformer.nodes.options import CheckConfig
from megatron_fanformer.options import Verb, command_line, option, overrides, path_or_none
from megatron_fanformer.parity.options import ParityConfig
from megatron_fanformer.preparation.options import PrepareConfig
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.sizing.options import PlanOptions
from megatron_fanformer.terminal import show, tell, tell_loading, width

PROGRAM = "megatron-fanformer"
ANY_FIELD = (
    "Any field of the configuration can be set as --section.field VALUE, e.g. --training.train_iters 100. "
    f"`{PROGRAM} config` lists every field."
)


# -- demo


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `demo` takes."""

    output: Path = Path("runs/demo")
    """Folder for everything that it makes."""


def _demo(options: DemoOptions) -> None:
    _ready(on_cpu=True)
    from megatron_fanformer.demo.demo import run_demo

    run_demo(options.output)


# -- prepare


def _prepare(config: PrepareConfig) -> None:
    from megatron_fanformer.preparation.prepare import prepare
    from megatron_fanformer.preparation.progress import progress_line
    from megatron_fanformer.runtime.device import quieten_libraries

    quieten_libraries()
    with progress_line("preparing") as listener:
        report = prepare(config, listener)
    show(report.lines())


# -- train


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `train` takes."""

    config: Path
    """Configuration file (YAML)."""
    log_file: Path | None = option(None, metavar="PATH")
    """Log file; where there are several ranks, each has its own: PATH with the rank's number."""
    overrides: tuple[str, ...] = overrides()
    command_line: tuple[str, ...] = command_line()


def _train(options: TrainOptions) -> None:
    from megatron_fanformer.runtime.heartbeat import tell_stopped
    from megatron_fanformer.runtime.launch import end_with_launcher, report_failure

    with ended_by_stop_signals(tell_stopped):  # from before what takes seconds to import
        end_with_launcher()
        _prepare_environment()
        from megatron_fanformer.runtime.device import rank_address
        from megatron_fanformer.training.last_lines import tell_last_lines
        from megatron_fanformer.training.start import run_rank, start_run

        address = rank_address()
        if address is None:
            run = start_run(options.config, options.overrides, options.command_line, options.log_file)
        else:
            with report_failure():
                run = run_rank(options.config, options.overrides, address, options.log_file)
        if run is not None:
            tell_last_lines(run)


# -- config


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """What `config` takes."""

    schema: bool = option(False, exclusive="shown")
    """Print the JSON schema of configuration files."""
    resolved: bool = option(False, exclusive="shown")
    """Print all of --config, with presets and overrides applied, as YAML."""
    config: Path | None = option(None, metavar="FILE", parse=path_or_none)
    """With --resolved: configuration file (YAML)."""
    overrides: tuple[str, ...] = overrides()


def _config(options: ConfigOptions) -> None:
    from megatron_fanformer.training.config_reference import WIDTH, field_list, resolved_text, schema_text

    stray = [*options.overrides, *(["--config"] if options.config else [])]
    if stray and not options.resolved:
        raise InputError(f"{stray[0]} has no effect without --resolved; {PROGRAM} config --help lists the options")
    if options.resolved and not options.config:
        raise InputError("--resolved needs --config FILE; name a configuration file")
    if options.config:
        show([resolved_text(options.config, options.overrides)], as_they_are=True)
    elif options.schema:
        show([schema_text()], as_they_are=True)
    else:
        show(field_list(width() or WIDTH).splitlines())


# -- check-node


def _check_node(options: CheckConfig) -> None:
    from megatron_fanformer.nodes.check import check_nodes
    from megatron_fanformer.runtime.device import let_late_collectives_fail

    _prepare_environment()
    let_late_collectives_fail()
    check_nodes(options)


# -- parity


def _parity(config: ParityConfig) -> None:
    _prepare_environment()
    from megatron_fanformer.parity.command import parity

    parity(config)


# -- plan


def _plan(options: PlanOptions) -> None:
    from megatron_fanformer.sizing.command import plan

    plan(options)


# -- evaluate


def _evaluate(options: EvaluateOptions) -> None:
    from megatron_fanformer.runtime.heartbeat import tell_stopped
    from megatron_fanformer.runtime.launch import end_with_launcher

    outcome = "before the end; --output has the checkpoints that were done, and the same command starts anew"
    with ended_by_stop_signals(tell_stopped, outcome=outcome):
        end_with_launcher()
        _prepare_environment()
        from megatron_fanformer.evaluation.command import evaluate

        evaluate(options, _on_this_machine)


# -- experiment


def _experiment(options: ExperimentOptions) -> None:
    from megatron_fanformer.runtime.heartbeat import tell_stopped

    with ended_by_stop_signals(tell_stopped, outcome="before the end; the same command keeps the runs that are done"):
        from megatron_fanformer.experiments.probes.command import experiment

        local = options.checkpoint and tuple(map(_on_this_machine, options.checkpoint))
        experiment(replace(options, checkpoint=local), _ready, lambda text: show(text.split("\n")))


# -- sweep, report


def _sweep(options: SweepOptions) -> None:
    from megatron_fanformer.runtime.heartbeat import tell_stopped

    with ended_by_stop_signals(tell_stopped):
        _prepare_environment()
        from megatron_fanformer.experiments.sweeps.command import sweep

        sweep(options)


def _report(options: ReportOptions) -> None:
    _prepare_environment()
    from megatron_fanformer.experiments.report.command import report

    report(options)


# -- generate


def _generate(config: GenerateConfig) -> None:
    from megatron_fanformer.generation.prompts import read_prompts

    config = replace(config, checkpoint=_runnable(config.checkpoint))
    if config.prompts_file is not None:
        config = replace(config, prompts=(*config.prompts, *read_prompts(config.prompts_file)))
    if not config.prompts:
        raise InputError("there is no text to continue; name one with --prompt, or a file of them with --prompts")
    tell_loading(config.checkpoint)
    _ready()
    from megatron_fanformer.generation.printing import print_generations

    print_generations(config, functools.partial(print, end="", flush=sys.stdout.isatty()))


# -- chat


def _chat(config: ChatConfig) -> None:
    config = replace(config, checkpoint=_runnable(config.checkpoint))
    tell_loading(config.checkpoint)
    _ready()
    from megatron_fanformer.generation.talking import talk

    talk(config)


def _runnable(checkpoint: str) -> str:
    """The checkpoint on this machine; anything that cannot be run is reported before torch is imported."""
    from megatron_fanformer.formats.recognition import RUNNABLE, recognise

    checkpoint = _on_this_machine(checkpoint)
    recognise(checkpoint, RUNNABLE)
    return checkpoint


# -- convert


def _convert(options: ConvertOptions) -> None:
    from megatron_fanformer.formats.recognition import MODELS, recognise

    source = _on_this_machine(options.source)
    recognise(source, MODELS)  # anything else is reported before torch is imported
    if found := file_problems(report=options.receipt):
        raise InputError("\n".join(found))
    _ready(on_cpu=True)
    from megatron_fanformer.formats.convert import convert_checkpoint

    done = convert_checkpoint(**{**vars(options), "source": Path(source)})
    show([f"wrote {options.destination}", *done.lines(width())])


# -- inspect


def _inspect(options: InspectOptions) -> None:
    from megatron_fanformer.inspection.command import draw_phases, inspect_path, inspect_step

    path, step, config = options.path, options.step, options.config
    if options.phases is not None:
        asked = {"verify": options.verify, "json": options.json, "step": step, "config": config, "full": options.full}
        given = [f"--{name}" for name, value in asked.items() if value is not None and value is not False]
        if stray := [*options.overrides, *given]:
            raise InputError(f"{stray[0]} has no effect with --phases; use one at a time")
        draw_phases(path, Path(options.phases))
    elif step is None:
        if stray := [*options.overrides, *(["--config"] if config else []), *(["--full"] if options.full else [])]:
            raise InputError(f"{stray[0]} has no effect without --step; {PROGRAM} inspect --help lists the options")
        inspect_path(_on_this_machine(path), verify=options.verify, json=options.json)
    elif options.verify:
        raise InputError("--verify checks files and --step shows samples; use one at a time")
    else:
        _prepare_environment(on_cpu=True)
        inspect_step(_on_this_machine(path), step, config, options.overrides, full=options.full, json=options.json)


def _on_this_machine(path: str) -> str:
    """The path itself; of a URL, the copy of its checkpoint, which is fetched if it is not there yet."""
    from megatron_fanformer.checkpoint.remote import fetched, is_url
    from megatron_fanformer.runtime.device import cache_folder

    if not is_url(path):
        return path
    return str(fetched(path, cache_folder(), lambda line: tell(f"{PROGRAM}: {line}")))


def _ready(*, on_cpu: bool = False) -> None:
    """Before the first import of megatron-core: quiet it, and adapt it to a machine without CUDA.

    `on_cpu` is for what runs on the CPU on every machine.
    """
    _prepare_environment(on_cpu=on_cpu)
    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()


def _prepare_environment(*, on_cpu: bool = False) -> None:
    """Set what libraries read when they are imported; imports none of them itself."""
    from megatron_fanformer.runtime.device import hide_gpus, prepare_libraries

    if on_cpu:
        hide_gpus()
    prepare_libraries()


VERBS: dict[str, Verb[Any]] = {
    verb.name: verb
    for verb in (
        Verb(
            name="demo",
            help="From text to a trained FANformer, on this machine, in minutes.",
            options=DemoOptions,
            run=_demo,
            examples=("demo", "demo --output runs/demo"),
            results_are_files=True,
        ),
        Verb(
            name="prepare",
            help="Turn documents or conversations into token files.",
            options=PrepareConfig,
            run=_prepare,
            examples=(
                "prepare documents/*.jsonl.gz --output tokens/web\n--tokenizer tokenizer.json",
                "prepare @files.txt --output tokens/books\n--tokenizer tokenizer.model --part-size 10G",
            ),
            results_are_files=True,
        ),
        Verb(
            name="train",
            help="Train, or continue a run.",
            options=TrainOptions,
            run=_train,
            examples=(
                "train --config examples/tiny-cpu.yaml\n--training.train_iters 100",
                "train --config run.yaml\n--parallel.tensor_model_parallel_size 2",
            ),
            notes=ANY_FIELD,
            results_are_files=True,
            takes_signals=True,
        ),
        Verb(
            name="check-node",
            help="Check the nodes that a run is about to start on.",
            options=CheckConfig,
            run=_check_node,
            examples=("check-node --folder runs", "check-node --gpus 8 --output healthy-nodes.txt"),
        ),
        Verb(
            name="config",
            help="List the configuration's fields; print its JSON schema or a resolved configuration.",
            options=ConfigOptions,
            run=_config,
            examples=("config", "config --resolved --config examples/tiny-cpu.yaml"),
            notes="With --resolved, fields of the configuration can be set as --section.field VALUE.",
        ),
        Verb(
            name="parity",
            help="Show that parallel layouts train the same model as one process.",
            options=ParityConfig,
            run=_parity,
            examples=(
                "parity --config examples/tiny-cpu.yaml\n--layouts tp=2 pp=2",
                "parity --config run.yaml --layouts tp=2,sp=true\n--communication",
            ),
            notes=ANY_FIELD,
        ),
        Verb(
            name="plan",
            help="Say what a run costs on many GPUs, whether it fits, and find its fastest layout.",
            options=PlanOptions,
            run=_plan,
            examples=(
                "plan --config examples/fanformer-7b.yaml\n--gpus 256 --gpu h100 --search",
                "plan --config run.yaml --gpus 64 --gpu a100\n--layouts tp=4 tp=2,pp=2",
            ),
            notes=ANY_FIELD,
        ),
        Verb(
            name="evaluate",
            help="Measure checkpoints on perplexity sets and tasks; compare two; write a request file.",
            options=EvaluateOptions,
            run=_evaluate,
            examples=(
                "evaluate runs/demo/run --perplexity held-out=tokens/web",
                "evaluate --prepare paper.requests --tasks paper\n--tokenizer tokenizer.json",
            ),
            results_are_files=True,
            takes_signals=True,
        ),
        Verb(
            name="sweep",
            help="Train one configuration at many points and seeds, and report what they show.",
            options=SweepOptions,
            run=_sweep,
            examples=("sweep examples/sweeps/variants.yaml dry-run", "sweep examples/sweeps/variants.yaml run"),
            results_are_files=True,
            takes_signals=True,
        ),
        Verb(
            name="report",
            help="Write the page of the paper's experiments; compare two runs step by step.",
            options=ReportOptions,
            run=_report,
            examples=("report runs/sweeps --output runs/report.html", "report compare runs/transformer runs/fanformer"),
        ),
        Verb(
            name="generate",
            help="Continue prompts.",
            options=GenerateConfig,
            run=_generate,
            examples=(
                'generate runs/demo/run --prompt "def main("',
                "generate exported-folder --prompt Once\n--temperature 0.8 --top-p 0.95 --seed 1",
            ),
        ),
        Verb(
            name="chat",
            help="Talk to a model that was fine-tuned on chats.",
            options=ChatConfig,
            run=_chat,
            examples=(
                'chat runs/sft --system "Answer briefly."',
                "chat exported-folder --temperature 0.7 --top-p 0.9",
            ),
            notes=(
                "At the prompt, /reset begins anew, and /quit or Ctrl-D ends; Ctrl-C ends an answer, twice the "
                "program. From a pipe, each line is a message, and the answers alone are printed."
            ),
        ),
        Verb(
            name="experiment",
            help="One of the paper's smaller experiments, on this machine.",
            options=ExperimentOptions,
            run=_experiment,
            examples=(
                "experiment mod --output runs/mod",
                "experiment holes --seeds 2 --holes.weight_decays [0.0]",
            ),
            notes="Every setting of an experiment can be set as --NAME.FIELD VALUE; its result.json lists them.",
            results_are_files=True,
            takes_signals=True,
        ),
        Verb(
            name="inspect",
            help="Describe or verify data, a checkpoint or an export; show the samples of a step.",
            options=InspectOptions,
            run=_inspect,
            examples=("inspect runs/demo/tokens/train --verify", "inspect runs/demo/run --step 200"),
            notes="With --step, fields of the configuration can be set as --section.field VALUE, after PATH.",
        ),
        Verb(
            name="convert",
            help="Convert between our checkpoints, Hugging Face and the reference.",
            options=ConvertOptions,
            run=_convert,
            examples=(
                "convert runs/demo/run exported-folder --to hf",
                "convert FANformer-1B runs/released --to megatron\n--tokenizer tokenizer.json",
            ),
            results_are_files=True,
        ),
    )
}
