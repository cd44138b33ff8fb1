"""A run's losses as a plot."""

from typing import Any

from megatron_fanformer.checkpoint.store import VALIDATION_LOSS
from megatron_fanformer.pictures import drawn

VALIDATION_PREFIX = f"{VALIDATION_LOSS}/"


def loss_picture(metrics: list[dict[str, Any]], *, entropy: float | None = None) -> bytes:
    """A PNG of the training and validation losses over the steps.

    Args:
        metrics: the objects of metrics.jsonl.
        entropy: of the tokens, in nats; drawn as the line that a model without context cannot pass.
    """

    def draw(panels: Any) -> None:
        axes = panels[0, 0]
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

    return drawn(draw)
