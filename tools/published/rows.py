"""Reads published runs as jobs; values that a source does not state are assumed, by source.

The columns: src, name, gpu, prec (bf16, fp8, mxfp8), gpus, tp, pp, cp, vp (chunks a stage), gbs, mbs (samples of a
global and of a micro batch), seq, L, h, f, heads, kv (empty: as many as heads), V, glu (True, or empty), rec (full,
sel, none), step_seconds, alloc_gib (of memory, or empty); and of the software, True, False or empty: tp_overlap,
dp_overlap, flash, sp, fused_loss (`software.Practice`).
"""

import csv
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published.software import Practice, practice_of

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANConfig, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.job import Job, training_flops_per_token
from megatron_fanformer.plan.machines import Machine, known_machines
from megatron_fanformer.plan.step_time import step_time
from megatron_fanformer.runtime.layout import LAYER, ParallelConfig
from megatron_fanformer.train.optimizers import OPTIMIZERS

NUMBERS = ("gpus", "tp", "pp", "cp", "vp", "gbs", "mbs", "seq", "L", "h", "f", "heads", "V")
NEEDED = ("src", "name", "gpu", "prec", *NUMBERS, "rec", "step_seconds")
CHOICES = {
    "gpu": tuple(name.upper() for name in known_machines()),
    "prec": ("bf16", "fp8", "mxfp8"),
    "rec": ("full", "sel", "none"),
}
UNGATED_SHARE = 2 / 3  # a gated MLP of this inner size has the weights and FLOPs of one without a gate
MICRO_BATCHES = (1, 2, 4)  # samples, where a source does not say
# What a layer keeps for backward without attention scores, a token and unit of the hidden size (Korthikanti et al.
# 2022, equation 4). What a rank keeps of a weight: bf16, float32 gradient, its share of 12 bytes of optimizer state.
KEPT_BYTES, WEIGHT_BYTES, OPTIMIZER_BYTES = 34, 6, 12


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    name: str
    gpu: str
    jobs: tuple[tuple[Job, ...], ...]
    """One job; if the source does not state them, one group for each possible micro batch, with all interleavings."""
    precision: str
    """The file's `prec`: bf16, fp8 or mxfp8."""
    practice: Practice
    step_seconds: float

    @property
    def family(self) -> str:
        """Return the source without the release: runs of one trainer are not independent of each other."""
        return re.split(r"[^a-z]", self.source)[0]

    def predict(self, machine: Machine) -> float:
        """Return the seconds of a step by formula.

        If the source does not state them, take the fastest micro batch, and the geometric mean over interleavings.
        """
        return min(
            math.exp(statistics.mean(math.log(self._seconds(job, machine)) for job in jobs)) for jobs in self.jobs
        )

    def _seconds(self, job: Job, machine: Machine) -> float:
        used = self.practice.machine(self.gpu, machine)
        return step_time(job, used, overlaps_tensor_parallel=self.practice.tp_overlap).seconds

    @property
    def format(self) -> tuple[str, str]:
        """Return the chip, and the number format of matrix products."""
        return self.gpu, "fp8" if self.jobs[0][0].precision.fp8 else "bf16"

    @property
    def flops_per_gpu(self) -> float:
        """Return the model FLOPs of a step per GPU."""
        job = self.jobs[0][0]
        return training_flops_per_token(job.model) * job.tokens_per_step / job.world_size


def read_rows(file: Path) -> list[Row]:
    """Return the runs of a CSV file.

    Raises:
        InputError: the file cannot be read, lacks a column, or has a row that is no job.
    """
    try:
        with regular_file(file).open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            lines = list(reader)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    if missing := [name for name in NEEDED if name not in (reader.fieldnames or [])]:
        raise InputError(f"{file} has no column {missing[0]}; it needs {', '.join(NEEDED)}")
    if not lines:
        raise InputError(f"{file} has no rows")
    return [_row(line, f"{file}:{number}") for number, line in enumerate(lines, start=2)]


def _row(values: dict[str, str], where: str) -> Row:
    try:
        numbers = {name: int(values[name]) for name in NUMBERS}
        numbers["kv"] = int(values.get("kv") or numbers["heads"])
        seconds = float(values["step_seconds"])
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}; sizes are integers, step_seconds a number") from None
    if min(*numbers.values(), seconds) <= 0:
        raise InputError(f"{where}: sizes and step_seconds must be above 0")
    if numbers["gpus"] % (ranks := numbers["tp"] * numbers["pp"] * numbers["cp"]):
        raise InputError(f"{where}: {numbers['gpus']} gpus are no multiple of tp x pp x cp, {ranks}")
    for name, allowed in CHOICES.items():
        if values[name] not in allowed:
            raise InputError(f"{where}: {name} is {values[name]!r}; it must be one of {', '.join(allowed)}")
    practice = practice_of(values["src"]).of_row(values, where)
    jobs = [tuple(_job(values, run, practice) for run in group) for group in _batches(numbers, practice)]
    if problems := [problem for job in sum(jobs, ()) for problem in (*job.model.problems(), *job.parallel.problems())]:
        raise InputError(f"{where}: {problems[0]}")
    if jobs[0][0].parallel.layers_per_stage(numbers["L"]) is None:
        raise InputError(f"{where}: {numbers['L']} layers do not divide over pp {numbers['pp']}")
    return Row(
        source=values["src"],
        name=values["name"],
        gpu=values["gpu"].lower(),
        jobs=tuple(jobs),
        precision=values["prec"],
        practice=practice,
        step_seconds=seconds,
    )


def _batches(n: dict[str, int], practice: Practice) -> list[list[dict[str, int]]]:
    """Return the sizes of a row for each possible micro batch, in groups of all possible interleavings."""
    if practice.states_batches:
        return [[n]]
    samples, layers = n["gbs"] * n["tp"] * n["pp"] * n["cp"] // n["gpus"], n["L"] // n["pp"]
    chunks = [v for v in range(1, layers + 1) if layers % v == 0] if n["pp"] > 1 else [1]
    return [
        [n | {"mbs": b, "vp": v} for v in chunks] for b in MICRO_BATCHES if samples % b == 0 and (b == 1 or _fits(n, b))
    ]


def _fits(n: dict[str, int], micro_batch: int) -> bool:
    """Return whether a micro batch fits into 80 GB, with all micro batches that are in flight on the first stage."""
    ranks = n["tp"] * n["pp"]
    weights = (12 * n["L"] * n["h"] ** 2 + n["V"] * n["h"]) / ranks  # f is 4 h there
    kept = KEPT_BYTES * micro_batch * n["seq"] * n["h"] * n["L"] / n["tp"]
    return kept + weights * (WEIGHT_BYTES + OPTIMIZER_BYTES * ranks / n["gpus"]) < 80e9


def _job(values: dict[str, str], n: dict[str, int], practice: Practice) -> Job:
    is_gated = values.get("glu") == "True"
    model = FANformerConfig(
        num_layers=n["L"],
        hidden_size=n["h"],
        ffn_hidden_size=n["f"] if is_gated else round(UNGATED_SHARE * n["f"]),
        num_attention_heads=n["heads"],
        num_query_groups=n["kv"],
        vocab_size=n["V"],
        seq_length=n["seq"],
        untie_embeddings_and_output_weights=is_gated,
        fan=FANConfig(placement="none"),
    )
    replicas = n["gpus"] // (n["tp"] * n["pp"] * n["cp"])
    return Job(
        model=model,
        parallel=_parallel(values["rec"], n, practice),
        kernels=KernelsConfig(
            attention_backend="flash" if practice.flash else "unfused",
            chunked_loss_head=practice.fused_loss,
        ),
        precision=_precision(values["prec"], practice),
        optimizer=OPTIMIZERS["adamw"],
        data_parallel_size=replicas,
        micro_batch_size=n["mbs"],
        num_micro_batches=max(1, n["gbs"] // (n["mbs"] * replicas)),
        layers="transformer_engine",
    )


def _precision(name: str, practice: Practice) -> PrecisionConfig:
    fields: dict[str, Any] = {"dtype": "bf16", "grad_reduce_in_fp32": practice.sums_in_fp32}
    if name != "bf16":
        fields |= {"fp8": "hybrid", "fp8_recipe": practice.fp8_recipe if name == "fp8" else name}
    return PrecisionConfig(**fields)


def _parallel(recompute: str, n: dict[str, int], practice: Practice) -> ParallelConfig:
    fields: dict[str, Any] = {}
    if recompute == "full":
        fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "sel":
        fields = {"recompute_granularity": "selective"}
    chunks = n["vp"] if n["vp"] > 1 and n["pp"] > 1 else None
    if n["L"] % n["pp"]:
        chunks, fields["pipeline_model_parallel_layout"] = None, _uneven(n["L"], n["pp"] * n["vp"])
    return ParallelConfig(
        tensor_model_parallel_size=n["tp"],
        pipeline_model_parallel_size=n["pp"],
        virtual_pipeline_model_parallel_size=chunks,
        context_parallel_size=n["cp"],
        sequence_parallel=n["tp"] > 1 and practice.sp,
        overlap_grad_reduce=practice.dp_overlap,
        overlap_param_gather=practice.dp_overlap,
        **fields,
    )


def _uneven(layers: int, chunks: int) -> str:
    """Return a layout of layers over chunks that do not divide them: embedding and head count as one layer each."""
    least, more = divmod(layers + 2, chunks)
    alike = [least + (place < more) for place in range(chunks)]
    first, *middle, last = alike[0] - 1, *alike[1:-1], alike[-1] - 1
    parts = [f"E{LAYER * first}", *(LAYER * number for number in middle), f"{LAYER * last}L"]
    return "|".join(parts)
