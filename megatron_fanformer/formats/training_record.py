"""The known facts about the training behind weights, for the model card of an export.

It is read from a run's checkpoint, its saved configuration and the metrics in its run's folder, where available. What
none of them says is left out or reported as unknown: nothing is inferred. Only the last part of a path is reported.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_fanformer import markdown
from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.stored_files import SavedProgress, saved_progress
from megatron_fanformer.checkpoint.tensor_table import read_table
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.formats.megatron_lm import Run
from megatron_fanformer.formats.model_card import RECEIPT
from megatron_fanformer.formats.name_table import Format, listed

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
        rows = _rows(store.saved_config(checkpoint), progress, _loss_rows(checkpoint, progress.step))
    if not rows and format == "megatron" and (averaged := _averaged(checkpoint)):
        return markdown.as_text(f"The weights are an average of the checkpoints {' and '.join(averaged)}.")
    if not rows:
        return (
            f"Not known: the weights were converted from {ORIGINS[format]}, which holds no record of the steps, the "
            "data and the losses of their training."
        )
    return markdown.table(["", ""], ((markdown.as_text(name), markdown.as_text(text)) for name, text in rows))


def _averaged(checkpoint: Path) -> list[str]:
    """Return each checkpoint that `merge` has averaged into this one, in words; none where it was not made by that."""
    receipt = checkpoint.parent.parent / RECEIPT
    sources = store.read_mapping(receipt).get("sources") if receipt.is_file() else None
    stated = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    return [
        f"{_run_name(str(source.get('path')))} step {source.get('step')} (weight {source.get('weight')})"
        for source in stated
    ]


def _run_name(checkpoint: str) -> str:
    """Return the last part of the path or URL of the run that a checkpoint is of."""
    path = Path(checkpoint)
    return path.parent.parent.name if path.parent.name == store.CHECKPOINTS else path.name


def _rows(saved: Saved, progress: SavedProgress, losses: Rows) -> Rows:
    return [*_length_rows(saved, progress), *losses, *_recipe_rows(saved), *_data_rows(saved.get("data", {}))]


def layout(saved: Saved) -> str:
    """Parallel degrees, optimizer, type and device of a run's saved configuration."""
    parallel = saved.get("parallel", {})
    degrees = ", ".join(f"{short} {parallel.get(name) or 1}" for short, name in DEGREES.items())
    optimizer = "distributed optimizer" if parallel.get("use_distributed_optimizer") else "plain optimizer"
    dtype = saved.get("precision", {}).get("dtype", "?")
    return f"{degrees}; {optimizer}; {dtype} on {saved.get('runtime', {}).get('device', '?')}"


def _length_rows(saved: Saved, progress: SavedProgress) -> Rows:
    training, sequence = saved.get("training", {}), saved.get("model", {}).get("seq_length")
    planned = training.get("train_iters")
    more = f" of {planned:,} planned" if isinstance(planned, int) and planned != progress.step else ""
    rows = [("steps", f"{progress.step:,}{more}")]
    if isinstance(sequence, int):
        rows.append(("tokens", f"{progress.consumed_samples * sequence:,}"))
    if start := saved.get("checkpoint", {}).get("load"):
        rows.append(("started from", f"the weights of {Path(str(start)).name}, whose own training is not counted here"))
    return rows


# -- losses


def _loss_rows(checkpoint: Path, step: int) -> Rows:
    is_of_a_run = checkpoint.parent.name == store.CHECKPOINTS
    losses = _losses(checkpoint.parent.parent / store.METRICS, step) if is_of_a_run else {}
    if not losses:
        return [("losses", f"not known: the run's {store.METRICS} was not available, or has no step {step}")]
    return [(name, f"{loss:.4f} nats per token, at step {at:,}") for name, (at, loss) in losses.items()]


def _losses(metrics: Path, step: int) -> dict[str, tuple[int, float]]:
    """Return by name the training loss of a step, and each validation set's last loss up to it."""
    found: dict[str, tuple[int, float]] = {}
    for entry in _entries(metrics):
        at = entry["step"]
        if at > step:
            continue
        for name, value in entry.items():
            kind, _, dataset = name.partition("/")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and kind == store.VALIDATION_LOSS and dataset:
                found[f"validation loss, {dataset}"] = at, value
            elif is_number and name == "loss" and at == step:
                found = {"training loss": (at, value), **found}
    return found if "training loss" in found else {}


def _entries(metrics: Path) -> Iterator[dict[str, Any]]:
    """Return what a metrics file says of steps; nothing where it cannot be read."""
    try:
        with regular_file(metrics).open("rb") as lines:
            yield from filter(None, map(store.metrics_entry, lines))
    except OSError:
        return


# -- recipe


def _recipe_rows(saved: Saved) -> Rows:
    training, rate = saved.get("training", {}), saved.get("optimizer", {}).get("lr")
    rows = []
    if "global_batch_size" in training:
        sequence = saved.get("model", {}).get("seq_length", "?")
        rows.append(("global batch", f"{training['global_batch_size']} sequences of {sequence} tokens"))
    if rate is not None:
        rows.append(("peak learning rate", f"{rate}{_schedule(saved.get('schedule', {}))}"))
    if "parallel" in saved:
        rows.append(("layout", layout(saved)))
    if "seed" in training:
        rows.append(("seed", str(training["seed"])))
    return rows


def _schedule(schedule: Saved) -> str:
    style, warmup = schedule.get("lr_decay_style"), schedule.get("lr_warmup_iters")
    return (f"; {style}" if style else "") + (f" after {warmup} steps of warm-up" if warmup else "")


def _data_rows(data: Saved) -> Rows:
    rows = [("training data", _names(data.get("train_data")))]
    validation = data.get("valid_data")
    for name, words in validation.items() if isinstance(validation, dict) else ():
        rows.append((f"validation data, {name}", _names(words)))
    if data.get("split"):
        rows.append(("split", str(data["split"])))
    return [(name, text) for name, text in rows if text]


def _names(words: Any) -> str:
    """Return the names of a blend's files, each after its weight, if it has one."""
    if not isinstance(words, list):
        return ""
    return listed(_with_weights([part for word in words for part in str(word).split()]))


def _with_weights(words: Sequence[str]) -> list[str]:
    is_weighted = len(words) % 2 == 0 and all(map(_is_number, words[::2]))
    names = [("@" if word.startswith("@") else "") + Path(word.removeprefix("@")).name for word in words]
    return [f"{weight} {name}" for weight, name in zip(words[::2], names[1::2], strict=True)] if is_weighted else names


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False
