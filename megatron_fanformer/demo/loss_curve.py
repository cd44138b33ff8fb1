"""A run's losses as a plot."""

from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint.store import VALIDATION_LOSS

VALIDATION_PREFIX = f"{VALIDATION_LOSS}/"


def draw_loss_curve(metrics: list[dict[str, Any]], path: Path, *, entropy: float | None = None) -> None:
    """Draw training and validation losses over the steps into a PNG.

    Args:
        metrics: the objects of metrics.jsonl.
        entropy: of the tokens, in nats; drawn as the line that a model without context cannot pass.
    """
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150)
    training = [(entry["step"], entry["loss"]) for entry in metrics]
    axes.plot(*zip(*training, strict=True), linewidth=1, label="training")
    names = sorted({name for entry in metrics for name in entry if name.startswith(VALIDATION_PREFIX)})
    for name in names:
        points = [(entry["step"], entry[name]) for entry in metrics if name in entry]
        axes.plot(*zip(*points, strict=True), "o-", label=f"validation: {name.removeprefix(VALIDATION_PREFIX)}")
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy of the tokens")
    axes.set(xlabel="step", ylabel="loss, nats per token", title="FANformer")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
