"""One configuration on one machine: whether it is legal, its memory on every stage, and its time, by formula.

A configuration is judged as `train` would on GPUs of that kind, with the same rules; its data is not read.
"""

import dataclasses
from dataclasses import dataclass

from megatron_fanformer.errors import InputError
from megatron_fanformer.plan.gradient_buffers import Chunk, state_bytes, weights
from megatron_fanformer.plan.job import Job, Layers
from megatron_fanformer.plan.machines import Machine, known_machines
from megatron_fanformer.plan.memory import MAIN_WEIGHT_BYTES, RankMemory, rank_memory, reserve_bytes
from megatron_fanformer.plan.step_time import StepTime, step_time
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.machine_rules import layer_problems

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A legal layout's memory and time."""

    name: str  # the layout's, as `--layouts` reads it
    config: RunConfig
    job: Job
    machine: Machine
    stages: tuple[RankMemory, ...]  # the memory of one rank of each pipeline stage
    time: StepTime

    @property
    def heaviest(self) -> RankMemory:
        """Return the memory of the stage that needs the most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def reserve_bytes(self) -> int:
        """Return the bytes that must be free beside the tensors of the heaviest stage."""
        return reserve_bytes(self.job, self.heaviest.total_bytes)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that the heaviest stage needs of a GPU's memory."""
        return self.heaviest.total_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Return whether every stage fits into the memory that a program can have."""
        return self.needed_bytes <= self.machine.usable_bytes

    @property
    def shortage(self) -> str:
        """Return the message that refuses a layout whose heaviest stage needs more memory than there is."""
        return (
            f"a GPU of pipeline stage {self.heaviest.stage} needs {self.needed_bytes / GIB:.1f} GiB, "
            f"{self.reserve_bytes / GIB:.1f} of them reserved, but {self.machine.name} has "
            f"{self.machine.usable_bytes / GIB:.1f} for a program; spread the model over more GPUs, take a smaller "
            "micro batch, or recompute more"
        )


def resolve_for_machine(config: RunConfig, machine: Machine) -> RunConfig:
    """Return the configuration with its open fields chosen for a machine, except overlap, which depends on the layout.

    Every known machine is a GPU. Only a machine from a file can be a CPU, if the configuration's device is cpu.
    """
    on_cpu = config.runtime.device == "cpu" and machine not in known_machines().values()
    kernels, precision = config.kernels, config.precision
    if kernels.transformer_impl == "auto":
        kernels = dataclasses.replace(kernels, transformer_impl="local" if on_cpu else "transformer_engine")
    if kernels.gradient_accumulation_fusion is None:
        fuses = kernels.transformer_impl == "transformer_engine"
        kernels = dataclasses.replace(kernels, gradient_accumulation_fusion=fuses)
    if precision.dtype == "auto":
        has_matrix_units = (machine.bf16_flops_per_second or 0) > (machine.fp32_flops_per_second or 0)
        precision = dataclasses.replace(precision, dtype="bf16" if has_matrix_units else "fp32")
    runtime = dataclasses.replace(config.runtime, device="cpu" if on_cpu else "cuda")
    return dataclasses.replace(config, kernels=kernels, precision=precision, runtime=runtime)


def check_formats(config: RunConfig, machine: Machine) -> None:
    """Raise InputError if a machine lacks the number formats or the FP8 recipe of a resolved configuration."""
    machine.flops_per_second(config.precision.dtype)  # raises if the machine has no such rate, as the call for fp8 does
    if config.precision.fp8:
        machine.flops_per_second("fp8")
        if config.precision.fp8_recipe == "mxfp8" and not machine.has_mxfp8:
            raise InputError(
                f"precision.fp8_recipe is mxfp8, whose blocks of 32 {machine.name} does not scale in hardware; choose "
                "another precision.fp8_recipe, or set the machine's has_mxfp8 to true"
            )


def problems(config: RunConfig, gpus: int) -> list[str]:
    """Return the rules of `train` that a resolved configuration's layout breaks on `gpus` GPUs, one line each.

    The other sections, which no layout changes, must be valid.
    """
    if broken := [*config.parallel.problems(), *config.kernels.problems(), *config.training.problems()]:
        return broken  # the rules below need valid fields
    try:
        replicas = config.parallel.resolve_data_parallel_size(gpus)
    except InputError as error:
        return [str(error)]
    return problems_of_layout(config) + config.problems_of_steps(replicas)


def problems_of_layout(config: RunConfig) -> list[str]:
    """Return the rules that a layout breaks with every batch size; the value of each field must be valid by itself."""
    uses_engine, in_fp32 = config.kernels.transformer_impl == "transformer_engine", config.precision.dtype == "fp32"
    of_layers = layer_problems(config.model, config.parallel, config.kernels, uses_engine=uses_engine, in_fp32=in_fp32)
    return [*config.problems_of_layout(), *of_layers]


def job_of(config: RunConfig, gpus: int) -> Job:
    """Return the input of the formulas for a resolved and legal configuration."""
    replicas = config.parallel.resolve_data_parallel_size(gpus)
    on_cpu = config.runtime.device == "cpu"
    overlap_saves_time = not on_cpu and replicas * config.parallel.context_parallel_size > 1
    grad_reduce, param_gather = config.parallel.resolved_overlaps(is_faster=overlap_saves_time)
    layers: Layers = "local" if config.kernels.transformer_impl == "local" else "transformer_engine"  # never auto
    parallel = dataclasses.replace(config.parallel, overlap_grad_reduce=grad_reduce, overlap_param_gather=param_gather)
    return dataclasses.replace(config, parallel=parallel).job(replicas, layers=layers, on_cpu=on_cpu)


def estimate(name: str, config: RunConfig, gpus: int, machine: Machine) -> Estimate:
    """Return the memory and time of a resolved and legal configuration; `name` is its layout's name."""
    job = job_of(config, gpus)
    stages = tuple(rank_memory(job, stage) for stage in range(job.stages))
    return Estimate(name=name, config=config, job=job, machine=machine, stages=stages, time=step_time(job, machine))


def checkpoint_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint's tensors: weights, main weights and the optimizer's states, each once."""
    all_layers = Chunk(number=0, layers=job.model.num_layers, has_embedding=True, has_head=True)
    model_weights = weights(job.model, ParallelConfig(), all_layers)  # on one rank
    elements = [weight.elements for weight in model_weights]
    main = 0 if job.precision.dtype == "fp32" else MAIN_WEIGHT_BYTES  # float32 weights are main weights themselves
    return sum(elements) * (job.element_bytes + main) + state_bytes(model_weights, elements, job.optimizer)
