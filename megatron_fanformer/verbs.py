"""What each verb takes on the command line, and the one function that it calls.

Each verb imports what it needs when it runs: torch and megatron-core take seconds, and so would every worker process
that imports `__main__` again. Errors in a configuration are reported before they are imported.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from megatron_fanformer.durable_files import file_problems
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation.options import add_options as add_evaluate_options
from megatron_fanformer.experiments.probes.command import add_options as add_experiment_options
from megatron_fanformer.experiments.report.options import add_options as add_report_options
from megatron_fanformer.experiments.sweeps.options import add_options as add_sweep_options
from megatron_fanformer.formats.options import add_options as add_convert_options
from megatron_fanformer.generation.options import add_chat_options, add_generate_options
from megatron_fanformer.inspection.options import add_options as add_inspect_options
from megatron_fanformer.nodes.options import add_options as add_check_node_options
from megatron_fanformer.parity.options import add_options as add_parity_options
from megatron_fanformer.preparation.options import add_options as add_prepare_options
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.sizing.options import add_options as add_plan_options
from megatron_fanformer.terminal import show, tell, tell_loading, width

PROGRAM = "megatron-fanformer"
TAKES_OVERRIDES = ("train", "parity", "plan", "inspect", "config", "experiment")  # --section.field VALUE
RESULT_IN_FILES = ("demo", "prepare", "train", "evaluate", "sweep", "experiment", "convert")  # go on where nobody reads
TAKES_SIGNALS = ("train", "evaluate", "sweep", "experiment")  # over, by themselves, and keep them to the end


# -- demo


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="runs/demo", help="folder for everything that it makes (runs/demo)")


def _demo(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    _ready(on_cpu=True)
    from megatron_fanformer.demo.demo import run_demo

    run_demo(Path(options.output))


# -- prepare


def _prepare(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.preparation.prepare import ConversationsConfig, PrepareConfig, prepare
    from megatron_fanformer.preparation.progress import progress_line
    from megatron_fanformer.processes import usable_cores
    from megatron_fanformer.runtime.device import quieten_libraries

    quieten_libraries()
    names = {"template": "chat_template", "learn": "learn", "max_tokens": "max_tokens", "too_long": "too_long"}
    of_chats = {name: value for name, option in names.items() if (value := getattr(options, option)) is not None}
    if of_chats and not options.chat:
        raise InputError(
            f"{names[next(iter(of_chats))]} is set, which is for conversations; add --chat, or leave it out"
        )
    config = PrepareConfig(
        inputs=tuple(options.inputs),
        output=options.output,
        tokenizer=options.tokenizer,
        text_field=options.text_field,
        eod_id=options.eod_id,
        format=options.format,
        part_bytes=options.part_size,
        min_length=options.min_length,
        max_length=options.max_length,
        sources=None if options.source is None else tuple(options.source),
        ledger=not options.no_ledger,
        npy_dtype=options.npy_dtype if options.from_npy else None,
        backend=options.backend,
        workers=usable_cores() if options.workers is None else options.workers,
        strict=options.strict,
        chat=ConversationsConfig(**of_chats) if options.chat else None,
    )
    with progress_line("preparing") as listener:
        report = prepare(config, listener)
    show(report.lines())


# -- train


def _config_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="configuration file (YAML)")
    parser.epilog = (
        "Any field of the configuration can be set as --section.field VALUE, e.g. --training.train_iters 100. "
        f"`{PROGRAM} config` lists every field."
    )


def _train_options(parser: argparse.ArgumentParser) -> None:
    _config_option(parser)
    parser.add_argument("--log-file", type=Path, metavar="PATH", help="log file; for several ranks, PATH and the rank")


def _train(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> None:
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
            run = start_run(Path(options.config), rest, arguments, options.log_file)
        else:
            with report_failure():
                run = run_rank(Path(options.config), rest, address, options.log_file)
        if run is not None:
            tell_last_lines(run)


# -- config


def _config_verb_options(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--schema", action="store_true", help="print the JSON schema of configuration files")
    shown.add_argument(
        "--resolved", action="store_true", help="print all of --config, with presets and overrides, as YAML"
    )
    parser.add_argument("--config", metavar="FILE", help="with --resolved: configuration file (YAML)")
    parser.epilog = "With --resolved, fields of the configuration can be set as --section.field VALUE."


def _config(options: argparse.Namespace, rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.training.config_reference import WIDTH, field_list, resolved_text, schema_text

    stray = [*rest, *(["--config"] if options.config else [])]
    if stray and not options.resolved:
        raise InputError(f"{stray[0]} has no effect without --resolved; {PROGRAM} config --help lists the options")
    if options.resolved and not options.config:
        raise InputError("--resolved needs --config FILE; name a configuration file")
    if options.resolved or options.schema:
        show([resolved_text(Path(options.config), rest) if options.resolved else schema_text()], as_they_are=True)
    else:
        show(field_list(width() or WIDTH).splitlines())


# -- check-node


def _check_node(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.nodes.check import CheckConfig, check_nodes
    from megatron_fanformer.runtime.device import let_late_collectives_fail

    _prepare_environment()
    let_late_collectives_fail()
    check_nodes(CheckConfig(**{field.name: getattr(options, field.name) for field in fields(CheckConfig)}))


# -- parity


def _parity_options(parser: argparse.ArgumentParser) -> None:
    _config_option(parser)
    add_parity_options(parser)


def _parity(options: argparse.Namespace, rest: list[str], _arguments: list[str]) -> None:
    _prepare_environment()
    from megatron_fanformer.parity.command import parity

    parity(
        Path(options.config),
        rest,
        report=Path(options.report) if options.report else None,
        layouts=tuple(options.layouts),
        steps=options.steps,
        dtype=options.dtype,
        communication=options.communication,
        device=options.device,
        transformer_impl=options.transformer_impl,
    )


# -- plan


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _config_option(parser)
    add_plan_options(parser)


def _plan(options: argparse.Namespace, rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.sizing.command import plan

    plan(options, rest)


# -- evaluate


def _evaluate(options: argparse.Namespace, _rest: list[str], arguments: list[str]) -> None:
    from megatron_fanformer.runtime.heartbeat import tell_stopped
    from megatron_fanformer.runtime.launch import end_with_launcher

    outcome = "before the end; --output has the checkpoints that were done, and the same command starts anew"
    with ended_by_stop_signals(tell_stopped, outcome=outcome):
        end_with_launcher()
        _prepare_environment()
        from megatron_fanformer.evaluation.command import evaluate

        evaluate(options, arguments, _on_this_machine)


# -- experiment


def _experiment(options: argparse.Namespace, rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.runtime.heartbeat import tell_stopped

    with ended_by_stop_signals(tell_stopped, outcome="before the end; the same command keeps the runs that are done"):
        from megatron_fanformer.experiments.probes.command import experiment

        options.checkpoint = options.checkpoint and [_on_this_machine(path) for path in options.checkpoint]
        experiment(options, rest, _ready, lambda text: show(text.split("\n")))


# -- sweep, report


def _sweep(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.runtime.heartbeat import tell_stopped

    with ended_by_stop_signals(tell_stopped):
        _prepare_environment()
        from megatron_fanformer.experiments.sweeps.command import sweep

        sweep(options)


def _report(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    _prepare_environment()
    from megatron_fanformer.experiments.report.command import report

    report(options)


# -- generate


def _generate(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.formats.recognition import RUNNABLE, recognise
    from megatron_fanformer.generation.prompts import read_prompts

    options.checkpoint = _on_this_machine(options.checkpoint)
    recognise(options.checkpoint, RUNNABLE)  # anything else is reported before torch is imported
    prompts = (*options.prompt, *(read_prompts(options.prompts) if options.prompts else ()))
    if not prompts:
        raise InputError("there is no text to continue; name one with --prompt, or a file of them with --prompts")
    tell_loading(options.checkpoint)
    _ready()
    from megatron_fanformer.generation.generate import GenerateConfig, print_generations

    config = GenerateConfig(
        checkpoint=options.checkpoint,
        prompts=prompts,
        num_samples=options.num_samples,
        max_new_tokens=options.max_new_tokens,
        stop=tuple(options.stop),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        batch_size=options.batch_size,
        tokenizer=options.tokenizer,
    )
    print_generations(config, functools.partial(print, end="", flush=sys.stdout.isatty()), as_json=options.json)


# -- chat


def _chat(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.formats.recognition import RUNNABLE, recognise

    options.checkpoint = _on_this_machine(options.checkpoint)
    recognise(options.checkpoint, RUNNABLE)  # anything else is reported before torch is imported
    tell_loading(options.checkpoint)
    _ready()
    from megatron_fanformer.generation.chat import ChatConfig
    from megatron_fanformer.generation.talking import talk

    options.stop = tuple(options.stop)
    chosen = (field.name for field in fields(ChatConfig) if hasattr(options, field.name))
    talk(ChatConfig(**{name: getattr(options, name) for name in chosen}))


# -- convert


def _convert(options: argparse.Namespace, _rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.formats.recognition import MODELS, recognise

    options.source = _on_this_machine(options.source)
    recognise(options.source, MODELS)  # anything else is reported before torch is imported
    if found := file_problems(report=options.report):
        raise InputError("\n".join(found))
    _ready(on_cpu=True)
    from megatron_fanformer.formats.convert import convert_checkpoint

    done = convert_checkpoint(
        Path(options.source),
        Path(options.destination),
        to=options.to,
        config=Path(options.config) if options.config else None,
        tokenizer=Path(options.tokenizer) if options.tokenizer else None,
        eod_id=options.eod_id,
        dtype=options.dtype,
        padded_vocab_size=options.padded_vocab_size,
        max_shard_size=options.max_shard_size,
        verified=not options.no_verify,
        receipt=options.report,
    )
    show([f"wrote {options.destination}", *done.lines(width())])


# -- inspect


def _inspect(options: argparse.Namespace, rest: list[str], _arguments: list[str]) -> None:
    from megatron_fanformer.inspection.command import draw_phases, inspect_path, inspect_step

    if options.phases is not None:
        asked = {name: getattr(options, name) for name in ("verify", "json", "step", "config", "full")}
        if stray := [
            *rest,
            *(f"--{name}" for name, value in asked.items() if value is not None and value is not False),
        ]:
            raise InputError(f"{stray[0]} has no effect with --phases; use one at a time")
        draw_phases(options.path, Path(options.phases))
        return
    if options.step is None:
        stray = [*rest, *(f"--{name}" for name in ("config", "full") if getattr(options, name))]
        if stray:
            raise InputError(f"{stray[0]} has no effect without --step; {PROGRAM} inspect --help lists the options")
        inspect_path(_on_this_machine(options.path), verify=options.verify, json=options.json)
        return
    if options.verify:
        raise InputError("--verify checks files and --step shows samples; use one at a time")
    _prepare_environment(on_cpu=True)
    config = Path(options.config) if options.config else None
    inspect_step(_on_this_machine(options.path), options.step, config, rest, full=options.full, json=options.json)


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


_Describe = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace, list[str], list[str]], None]

VERBS: dict[str, tuple[_Describe, _Run, str]] = {
    "demo": (_demo_options, _demo, "From text to a trained FANformer, on this machine, in minutes."),
    "prepare": (add_prepare_options, _prepare, "Turn documents or conversations into token files."),
    "train": (_train_options, _train, "Train, or continue a run."),
    "check-node": (add_check_node_options, _check_node, "Check the nodes that a run is about to start on."),
    "config": (
        _config_verb_options,
        _config,
        "List the configuration's fields; print its JSON schema or a resolved configuration.",
    ),
    "parity": (_parity_options, _parity, "Show that parallel layouts train the same model as one process."),
    "plan": (_plan_options, _plan, "Say what a run costs on many GPUs, whether it fits, and find its fastest layout."),
    "evaluate": (
        add_evaluate_options,
        _evaluate,
        "Measure checkpoints on perplexity sets and tasks; compare two; write a request file.",
    ),
    "sweep": (
        add_sweep_options,
        _sweep,
        "Train one configuration at many points and seeds, and report what they show.",
    ),
    "report": (
        add_report_options,
        _report,
        "Write the page of the paper's experiments; compare two runs step by step.",
    ),
    "generate": (add_generate_options, _generate, "Continue prompts."),
    "chat": (add_chat_options, _chat, "Talk to a model that was fine-tuned on chats."),
    "experiment": (add_experiment_options, _experiment, "One of the paper's smaller experiments, on this machine."),
    "inspect": (
        add_inspect_options,
        _inspect,
        "Describe or verify data, a checkpoint or an export; show the samples of a step.",
    ),
    "convert": (add_convert_options, _convert, "Convert between our checkpoints, Hugging Face and the reference."),
}
