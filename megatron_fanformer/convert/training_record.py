"""The known facts about the training behind weights, for the model card of an export.

It is read from a run's checkpoint, its saved configuration and the metrics in its run's folder, where available. What
none of them says is left out or reported as unknown: nothing is inferred. Only the last part of a path is reported.
"""

import math
from pathlib import Path
from typing import Any

from megatron_fanformer import markdown
from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.stored_files import SavedProgress, read_table, saved_progress
from megatron_fanformer.convert.megatron_lm import Run
from megatron_fanformer.convert.model_card import RECEIPT
from megatron_fanformer.convert.name_table import Format, listed

DEGREES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
}
ORIGINS: dict[Format, str] = {
    "megatron": "a checkpoint of converted weights",
    "reference": "a checkpoint in the authors' format",
    "hf": "a Hugging Face folder",
}

Rows = list[tuple[str, str]]
Saved = dict[str, Any]


def training_record(format: Format, checkpoint: Path, run: Run | None = None) -> str:
    """Return Markdown: a table of a run's training, or that nothing is known about it.

    Args:
        run: configuration and progress of a run that is not ours.

    Raises:
        CorruptError: a checkpoint of ours cannot be read.
    """
    checkpoint = checkpoint.absolute()  # in its run's folder, though a relative name may not say so
    rows: Rows = []
    if run is not None:
        rows = _rows(*run, [])
    elif format == "megatron" and (progress := saved_progress(checkpoint, read_table(checkpoint))) is not None:
        rows = _rows(run_folder.saved_config(checkpoint), progress, _loss_rows(checkpoint, progress.step))
    if not rows and format == "megatron" and (averaged := _averaged(checkpoint)):
        return markdown.as_text(f"The weights are an average of the checkpoints {' and '.join(averaged)}.")
    if not rows:
        return (
            f"Not known: the weights were converted from {ORIGINS[format]}, which holds no record of the steps, the "
            "data and the losses of their training."
        )
    return markdown.table(["", ""], ((markdown.as_text(name), markdown.as_text(text)) for name, text in rows))


def _averaged(checkpoint: Path) -> list[str]:
    """Return each checkpoint that `merge` has averaged into this one, as text; none where it was not made by that."""
    receipt = checkpoint.parent.parent / RECEIPT
    sources = run_folder.read_mapping(receipt).get("sources") if receipt.is_file() else None
    return [
        f"{_run_name(str(source.get('path')))} step {source.get('step')} (weight {source.get('weight')})"
        for source in (sources if isinstance(sources, list) else [])
        if isinstance(source, dict)
    ]


def _run_name(checkpoint: str) -> str:
    """Return the last part of the path or URL of the run that a checkpoint is of."""
    path = Path(checkpoint)
    return path.parent.parent.name if path.parent.name == run_folder.CHECKPOINTS else path.name


def _rows(saved: Saved, progress: SavedProgress, losses: Rows) -> Rows:
    training, schedule, data = (saved.get(section, {}) for section in ("training", "schedule", "data"))
    sequence, planned, rate = (
        saved.get("model", {}).get("seq_length"),
        training.get("train_iters"),
        saved.get("optimizer", {}).get("lr"),
    )
    more = f" of {planned:,} planned" if isinstance(planned, int) and planned != progress.step else ""
    rows = [("steps", f"{progress.step:,}{more}")]
    if isinstance(sequence, int):
        rows.append(("tokens", f"{progress.consumed_samples * sequence:,}"))
    if start := saved.get("checkpoint", {}).get("load"):
        rows.append(("started from", f"the weights of {Path(str(start)).name}, whose own training is not counted here"))
    rows += losses
    if "global_batch_size" in training:
        rows.append(("global batch", f"{training['global_batch_size']} sequences of {sequence or '?'} tokens"))
    if rate is not None:
        style, warmup = schedule.get("lr_decay_style"), schedule.get("lr_warmup_iters")
        after = f" after {warmup} steps of warm-up" if warmup else ""
        rows.append(("peak learning rate", f"{rate}{f'; {style}' if style else ''}{after}"))
    if "parallel" in saved:
        rows.append(("layout", layout(saved)))
    rows += [(name, str(training[name])) for name in ("seed",) if name in training]
    validation = data.get("valid_data")
    sets = (
        {f"validation data, {name}": words for name, words in validation.items()}
        if isinstance(validation, dict)
        else {}
    )
    for name, words in {"training data": data.get("train_data"), **sets}.items():
        if isinstance(words, list):
            rows.append((name, listed([Path(part).name for word in words for part in str(word).split()])))
    return [*rows, ("split", str(data["split"]))] if data.get("split") else rows


def layout(saved: Saved) -> str:
    """Parallel degrees, optimizer, type and device of a run's saved configuration."""
    parallel = saved.get("parallel", {})
    degrees = ", ".join(f"{short} {parallel.get(name) or 1}" for short, name in DEGREES.items())
    optimizer = "distributed optimizer" if parallel.get("use_distributed_optimizer") else "plain optimizer"
    dtype = saved.get("precision", {}).get("dtype", "?")
    return f"{degrees}; {optimizer}; {dtype} on {saved.get('runtime', {}).get('device', '?')}"


def _loss_rows(checkpoint: Path, step: int) -> Rows:
    """Return the training loss of a step, and each validation set's last loss up to it."""
    metrics = checkpoint.parent.parent / run_folder.METRICS
    is_available = checkpoint.parent.name == run_folder.CHECKPOINTS and metrics.is_file()
    losses: dict[str, tuple[int, float]] = {}
    for entry in filter(None, map(run_folder.metrics_entry, metrics.read_bytes().split(b"\n") if is_available else [])):
        if (at := entry["step"]) > step:
            continue
        for name, value in entry.items():
            kind, _, dataset = name.partition("/")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and kind == run_folder.VALIDATION_LOSS and dataset:
                losses[f"validation loss, {dataset}"] = at, value
            elif is_number and name == "loss" and at == step:
                losses = {"training loss": (at, value), **losses}
    if "training loss" not in losses:
        return [("losses", f"not known: the run's {run_folder.METRICS} was not available, or has no step {step}")]
    return [(name, f"{loss:.4f} nats per token, at step {at:,}") for name, (at, loss) in losses.items()]
