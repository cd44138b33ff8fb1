"""The bytes that a step's collectives move in each layout, counted and by formula: a Transformer and both FAN forms.

(Placement `ffn` has one form.)

The counted step is the second: megatron-core 0.19 has one more collective in a run's first.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_fanformer.model.config import FANConfig, FANformerConfig, PrecisionConfig
from megatron_fanformer.model.layout_rules import layout_problems
from megatron_fanformer.model.placements import TRANSFORMER
from megatron_fanformer.parity.reordering import Reordering
from megatron_fanformer.parity.trial import TrialConfig, prepared
from megatron_fanformer.plan.communication import Total, communication, side_by_side
from megatron_fanformer.plan.job import Job
from megatron_fanformer.runtime.collectives import CollectiveCount, count_collectives, moved_bytes
from megatron_fanformer.runtime.layout import FANForm, ParallelConfig
from megatron_fanformer.terminal import table
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.step import train_step


@dataclass(frozen=True, kw_only=True)
class LayoutCommunication:
    """The communication of one layout's step."""

    name: str
    models: tuple[str, ...]
    """Models that the layout is legal for."""
    totals: dict[tuple[str, str], list[tuple[Total, Total]]]
    """Counts and formulas at the small size, over all ranks together, by group and kind; one of each per model."""
    sent_bytes: dict[str, dict[str, float]]
    """Bytes that a rank of the busiest stage sends in a step, by the formula at full size, by model and group."""

    @property
    def agrees(self) -> bool:
        """Return whether the formula equals the count exactly."""
        return all(counted == formula for of_models in self.totals.values() for counted, formula in of_models)

    def lines(self, dtype: str) -> Iterator[str]:
        """Yield the table of counted bytes, and the formula's total at the configuration's own size."""
        yield from ["", f"{self.name}: bytes of a step, all ranks"]
        rows = [(*key, *(_count_cell(*pair) for pair in of_models)) for key, of_models in self.totals.items()]
        yield from table(("group", "collective", *self.models), rows, align="ll" + "r" * len(self.models))
        sent = {model: sum(groups.values()) for model, groups in self.sent_bytes.items()}
        yield (
            f"The formula {'equals the count exactly' if self.agrees else 'does NOT equal the count'}. At the "
            f"configuration's own size, in {dtype}, a rank of the busiest stage sends in a step, by the formula: "
            f"{', '.join(f'{model} {size / 2**20:,.1f} MiB' for model, size in sent.items())}."
        )

    def as_values(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        rows = [
            {
                "group": group,
                "collective": kind,
                **{
                    model: {"counted": counted._asdict(), "formula": formula._asdict()}
                    for model, (counted, formula) in zip(self.models, of_models, strict=True)
                },
            }
            for (group, kind), of_models in self.totals.items()
        ]
        sent = self.sent_bytes
        return {"layout": self.name, "agrees": self.agrees, "rows": rows, "sent_bytes_at_full_size": sent}


def _count_cell(counted: Total, formula: Total) -> str:
    text = f"{counted.message_bytes:,} in {counted.calls}" if counted.calls else "-"
    return text if counted == formula else f"{text} (formula {formula.message_bytes:,} in {formula.calls})"


def compare_communication(
    run_on_ranks: Callable[..., list[Any]],
    trial: TrialConfig,
    run: RunConfig,
    name: str,
    layout: ParallelConfig,
) -> LayoutCommunication:
    """Count a step of each model in a layout, and compare it with the formula.

    Args:
        run: of the configuration's own size, for whose step there is only the formula; a device that it leaves open
            counts as a GPU.
    """
    variants = _variants(trial.model, run.model, layout)
    compared, sent = {}, {}
    for model, (small, layout_of_form) in variants.items():
        small_trial = dataclasses.replace(trial, model=small)
        ranks = layout.model_parallel_size * (layout.data_parallel_size or 1)
        counted = run_on_ranks(ranks, count_step, small_trial, layout_of_form)
        job = _job(small_trial, layout_of_form)
        compared[model] = (
            [line for *_, lines in counted for line in lines],
            [line for stage, rank, _ in counted for line in communication(job, stage, rank)],
        )
        # The full model's own FAN, unless the variant or the model has none.
        fan = run.model.fan if run.model.fan.placement == small.fan.placement else small.fan
        full_trial = dataclasses.replace(
            trial,
            model=dataclasses.replace(run.model, fan=fan),
            micro_batch_size=run.training.micro_batch_size,
            global_batch_size=run.training.global_batch_size,
            device="cpu" if run.runtime.device == "cpu" else "cuda",
        )
        sent[model] = _sent_bytes(_job(full_trial, layout_of_form))
    return LayoutCommunication(name=name, models=tuple(variants), totals=side_by_side(compared), sent_bytes=sent)


def count_step(trial: TrialConfig, layout: ParallelConfig) -> tuple[int, int, list[CollectiveCount]]:
    """Return this rank's pipeline stage, its number among the stage's ranks, and its collectives in a step."""
    order = Reordering(trial.model, trial.global_batch_size, 0)
    with prepared(trial, layout, order) as (grid, _, wrapped, optimizer, batches, number, _):
        train_step(wrapped, optimizer, batches, grid, number)
        with count_collectives(grid) as counts:
            train_step(wrapped, optimizer, batches, grid, number)
        return grid.groups.pp.rank(), grid.groups.tp_dp_cp.rank(), counts.lines()


def _variants(
    small: FANformerConfig, full: FANformerConfig, layout: ParallelConfig
) -> dict[str, tuple[FANformerConfig, ParallelConfig]]:
    """Return a Transformer and each FAN form, of the small model, as far as the layout is legal for them at full
    size.
    """
    if not small.placement.is_fanformer:
        small = dataclasses.replace(small, fan=FANConfig())
    transformer = dataclasses.replace(small, fan=FANConfig(placement=TRANSFORMER))
    forms: dict[str, FANForm] = {title: form for form, title in small.placement.fan_forms.items()}
    candidates = {transformer.placement.title: (transformer, dataclasses.replace(layout, fan_form="column"))}
    candidates |= {title: (small, dataclasses.replace(layout, fan_form=form)) for title, form in forms.items()}
    return {
        name: (model, candidate)
        for name, (model, candidate) in candidates.items()
        if not candidate.problems() and not layout_problems(dataclasses.replace(full, fan=model.fan), candidate)
    }


def _job(trial: TrialConfig, layout: ParallelConfig) -> Job:
    replicas = layout.data_parallel_size or 1
    return Job(
        model=trial.model,
        parallel=layout,
        kernels=trial.kernels,
        precision=PrecisionConfig(dtype=trial.dtype, grad_reduce_in_fp32=trial.grad_reduce_in_fp32),
        optimizer=trial.optimizer.rule,
        data_parallel_size=replicas,
        micro_batch_size=trial.micro_batch_size,
        num_micro_batches=trial.global_batch_size // (trial.micro_batch_size * replicas),
        layers="local",
        has_document_ids=trial.within_documents,
        on_cpu=trial.device == "cpu",
    )


def _sent_bytes(job: Job) -> dict[str, float]:
    """Return the bytes that a rank of the busiest stage sends, by group."""
    stages = []
    for stage in range(job.parallel.pipeline_model_parallel_size):
        sent: dict[str, float] = {}
        for line in communication(job, stage):
            sent[line.group] = sent.get(line.group, 0.0) + moved_bytes(line.kind, line.message_bytes, line.ranks)
        stages.append(sent)
    return max(stages, key=lambda sent: sum(sent.values()))
