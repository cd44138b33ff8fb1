"""The request of `plan`, read and checked before anything is judged; torch is not imported."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.errors import InputError
from megatron_fanformer.planning.machines import Machine, known_machines, load_machine
from megatron_fanformer.sizing.candidates import laid_out, layout_name
from megatron_fanformer.sizing.estimate import check_formats, for_machine
from megatron_fanformer.sizing.verb import ALL_STAGES, PlanOptions
from megatron_fanformer.training.chats import with_steps, with_train_iters
from megatron_fanformer.training.config import RunConfig, load_config


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run to plan."""

    file: Path
    config: RunConfig
    """The configuration, with fields left to the machine chosen for the requested one."""
    gpus: int
    machine: Machine
    named: tuple[tuple[str, RunConfig], ...]
    """The layouts to judge, by their names; none: search all."""
    simulated_ranks: tuple[int | str, ...]
    """Numbers of the ranks to simulate, or `ALL_STAGES`."""
    tokens: int
    price: float | None
    """Price of a GPU hour."""
    save_bytes_per_second: float | None
    """At which all GPUs together write checkpoints; None: not known."""
    failure_hours: float
    """Hours of one GPU between two failures, each of which ends the whole run."""
    restart_minutes: float
    """From a failure to the next step, without the time to load the checkpoint."""

    @property
    def steps(self) -> int:
        """Return the steps of a run over its tokens."""
        return math.ceil(self.tokens / self.config.batch_tokens)


def read_request(options: PlanOptions) -> PlanRequest:
    """Read the configuration, the machine and the layouts.

    Raises:
        InputError: something of it is wrong; every problem, one line each.
    """
    found: list[str] = []
    try:
        machine = load_machine(options.gpu)
    except InputError as error:
        found.append(str(error))
    config = load_config(options.config, options.overrides)
    found += config.section_problems(leaving=("data", "parallel"))
    if not found:
        config = _of_known_length(config, options.tokens)
    named: list[tuple[str, RunConfig]] = []
    for text in options.layouts:
        try:
            named.append((text, laid_out(config, text)))
        except InputError as error:
            found.append(str(error))
    if found := [*found, *_simulation_problems(options.simulate, options.gpus)]:
        raise InputError("\n".join(found))
    # A known machine is a GPU, whatever this one is; a file may also describe the CPUs that a configuration asks for.
    on_cpu = config.runtime.device == "cpu" and machine not in known_machines().values()
    if not named and not options.search:
        named = [(layout_name(config, config), config)]
    config = for_machine(config, machine, on_cpu=on_cpu)
    check_formats(config, machine)
    training = config.training
    return PlanRequest(
        file=options.config,
        config=config,
        gpus=options.gpus,
        machine=machine,
        named=tuple((name, for_machine(each, machine, on_cpu=on_cpu)) for name, each in named),
        simulated_ranks=options.simulate,
        tokens=options.tokens or training.steps * training.global_batch_size * config.model.seq_length,
        price=options.price,
        save_bytes_per_second=options.save_rate and options.save_rate * 10**9,
        failure_hours=options.failure_hours,
        restart_minutes=options.restart_minutes,
    )


def _simulation_problems(ranks: Sequence[int | str], gpus: int) -> Iterator[str]:
    if ALL_STAGES in ranks and len(ranks) > 1:
        yield f"--simulate names ranks beside {ALL_STAGES}, which is one of every stage; give one of the two"
    for rank in ranks:
        if isinstance(rank, int) and rank >= gpus:
            yield f"--simulate {rank}: a world of {gpus} has the ranks 0 to {gpus - 1}; choose one of them"


def _of_known_length(config: RunConfig, tokens: int | None) -> RunConfig:
    """Add the steps of its epochs, by the conversations' lengths, or by the tokens that `plan` was given."""
    training = config.training
    if training.epochs is None:
        return config
    if tokens is not None:
        return with_train_iters(config, math.ceil(tokens / (training.global_batch_size * config.model.seq_length)))
    if not config.data.is_chats:
        raise InputError(
            f"training.epochs is {training.epochs}, which counts conversations (data.format sft) alone; state "
            "training.train_iters"
        )
    try:
        return with_steps(config)
    except InputError as error:
        raise InputError(f"{error} (training.epochs is {training.epochs}; or give --tokens)") from None
