"""One configuration on one machine: whether it is legal, its memory on every stage, and its time, by formula.

A configuration is judged as `train` would on GPUs of that kind, with the same rules; its data is not read.
"""

import dataclasses
from dataclasses import dataclass

from megatron_fanformer.errors import InputError
from megatron_fanformer.planning.job import Job, Layers
from megatron_fanformer.planning.machines import Machine
from megatron_fanformer.planning.memory import RankMemory, rank_memory, reserve_bytes
from megatron_fanformer.planning.step_time import StepTime, step_time
from megatron_fanformer.training.config import RunConfig
from megatron_fanformer.training.machine_rules import layer_problems

GIB = 2**30
SECONDS_PER_HOUR, HOURS_PER_DAY = 3600, 24


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A legal layout's memory and time."""

    name: str
    """The layout's name, as `--layouts` reads it."""
    config: RunConfig
    job: Job
    machine: Machine
    stages: tuple[RankMemory, ...]
    """The memory of a rank of each pipeline stage."""
    reserve_bytes: int
    """Bytes held beside allocated tensors, on the heaviest stage."""
    time: StepTime

    @property
    def heaviest(self) -> RankMemory:
        """Return the stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of a GPU's memory that the heaviest stage needs."""
        return self.heaviest.total_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Return whether a program can have that much of the GPU."""
        return self.needed_bytes <= self.machine.usable_bytes

    @property
    def shortage(self) -> str:
        """Describe what a layout that does not fit lacks."""
        return (
            f"a GPU of pipeline stage {self.heaviest.stage} needs {self.needed_bytes / GIB:.1f} GiB, "
            f"{self.reserve_bytes / GIB:.1f} of them reserved, but {self.machine.name} has "
            f"{self.machine.usable_bytes / GIB:.1f} for a program; spread the model over more GPUs, take a smaller "
            "micro batch, or recompute more"
        )


def for_machine(config: RunConfig, machine: Machine, *, on_cpu: bool) -> RunConfig:
    """Return the configuration with what it leaves to the machine chosen for that one; but overlap depends on the
    layout.
    """
    engine: Layers = "local" if on_cpu else "transformer_engine"
    kernels, precision = config.kernels, config.precision
    if kernels.transformer_impl == "auto":
        kernels = dataclasses.replace(kernels, transformer_impl=engine)
    if kernels.gradient_accumulation_fusion is None:
        fuses = kernels.transformer_impl == "transformer_engine"
        kernels = dataclasses.replace(kernels, gradient_accumulation_fusion=fuses)
    if precision.dtype == "auto":
        has_matrix_units = (machine.bf16_flops_per_second or 0) > (machine.fp32_flops_per_second or 0)
        precision = dataclasses.replace(precision, dtype="bf16" if has_matrix_units else "fp32")
    runtime = dataclasses.replace(config.runtime, device="cpu" if on_cpu else "cuda")
    return dataclasses.replace(config, kernels=kernels, precision=precision, runtime=runtime)


def check_formats(config: RunConfig, machine: Machine) -> None:
    """Check that a machine has the number formats and the recipe of a configuration of `for_machine`.

    Raises:
        InputError: it does not.
    """
    for number_format in (config.precision.dtype, *(["fp8"] if config.precision.fp8 else [])):
        machine.flops_per_second(number_format)  # refused if it has none
    if config.precision.fp8:
        machine.check_recipe(config.precision.fp8_recipe)


def problems(config: RunConfig, gpus: int) -> list[str]:
    """Return the rules of `train` that a configuration's layout breaks on that many GPUs, one line each.

    Args:
        config: of `for_machine`, with nothing wrong in sections that no layout changes.
    """
    if found := [*config.parallel.problems(), *config.kernels.problems(), *config.training.problems()]:
        return found
    try:
        replicas = config.parallel.resolve_data_parallel_size(gpus)
    except InputError as error:
        return [str(error)]
    return problems_of_layout(config) + config.problems_of_steps(replicas)


def problems_of_layout(config: RunConfig) -> list[str]:
    """List those of them that hold for any batch, where each field is valid by itself."""
    with_engine, in_fp32 = config.kernels.transformer_impl == "transformer_engine", config.precision.dtype == "fp32"
    sections = (config.model, config.parallel, config.kernels)
    return [*config.problems_of_layout(), *layer_problems(*sections, with_engine=with_engine, in_fp32=in_fp32)]


def job_of(config: RunConfig, gpus: int) -> Job:
    """Return a legal configuration of `for_machine` as the formulas take it."""
    replicas = config.parallel.resolve_data_parallel_size(gpus)
    on_cpu = config.runtime.device == "cpu"
    pays = not on_cpu and replicas * config.parallel.context_parallel_size > 1
    reduces, gathers = config.parallel.overlaps(pays=pays)
    layers: Layers = "local" if config.kernels.transformer_impl == "local" else "transformer_engine"
    parallel = dataclasses.replace(config.parallel, overlap_grad_reduce=reduces, overlap_param_gather=gathers)
    return dataclasses.replace(config, parallel=parallel).job(replicas, layers=layers, on_cpu=on_cpu)


def estimate(name: str, config: RunConfig, job: Job, machine: Machine, time: StepTime | None = None) -> Estimate:
    """Return the memory and time of a job.

    Args:
        time: its time, where it is known already.
    """
    stages = tuple(rank_memory(job, stage) for stage in range(job.parallel.pipeline_model_parallel_size))
    return Estimate(
        name=name,
        config=config,
        job=job,
        machine=machine,
        stages=stages,
        reserve_bytes=reserve_bytes(job, max(stage.total_bytes for stage in stages)),
        time=time or step_time(job, machine),
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A run over a number of tokens, without evaluations, saves and restarts; as uncertain as a step's time."""

    tokens: int
    days: float
    gpu_hours: float
    price: float | None
    """Price in the currency of a GPU hour's; None without one."""


def cost(estimate: Estimate, tokens: int, price_per_gpu_hour: float | None) -> Cost:
    """Return what it costs to train on that many tokens."""
    hours = tokens / estimate.time.tokens_per_second / SECONDS_PER_HOUR
    gpu_hours = hours * estimate.job.world_size
    price = None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour
    return Cost(tokens=tokens, days=hours / HOURS_PER_DAY, gpu_hours=gpu_hours, price=price)
