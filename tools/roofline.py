"""Prints the least time of a training step by part, from FLOPs and bytes alone.

    python tools/roofline.py --preset fanformer-1b --micro-batch-size 8 --tflops 790 --gigabytes-per-second 4000

The rates are a machine's: what its matrix products and its memory reach. The table is of one micro batch and one
update, on one rank that holds the whole model.
"""

import argparse
import dataclasses
from typing import NamedTuple, get_args

from megatron_fanformer import markdown
from megatron_fanformer.model.config import PRESETS, FANformerConfig
from megatron_fanformer.planning.roofline import (
    EMBEDDING_PASSES,
    UPDATED,
    ZEROED,
    Kind,
    head_operation,
    layer_operations,
)

STATE_BYTES = 2 * 4  # of AdamW: both moments


class Part(NamedTuple):
    """Describe what one kind of work adds up to in a step of one micro batch, forward and backward."""

    name: str
    flops: int
    bytes: int

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The least time: of computing, or of moving, whichever is longer."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def step_parts(model: FANformerConfig, *, tokens: int, element_bytes: int, state_bytes: int) -> list[Part]:
    """Return every part of a step of one micro batch and one update, on one rank that holds the whole model.

    Args:
        tokens: of the micro batch.
        element_bytes: of weights and activations.
        state_bytes: what the optimizer keeps of each weight.
    """
    layer = sorted(
        layer_operations(model, tokens=tokens, element_bytes=element_bytes),
        key=lambda operation: get_args(Kind).index(operation.kind),
    )
    operations = [(operation, model.num_layers) for operation in layer]
    operations.append((head_operation(model, tokens=tokens, element_bytes=element_bytes), 1))
    totals: dict[str, tuple[int, int]] = {}
    for operation, times in operations:
        flops, moved = totals.get(operation.name, (0, 0))
        both = (operation.forward, operation.backward)
        totals[operation.name] = (
            flops + times * sum(work.flops for work in both),
            moved + times * sum(work.bytes for work in both),
        )
    copy = element_bytes if element_bytes < 4 else 0  # in float32 the weight is the one that is updated
    per_weight = UPDATED + 2 * state_bytes + ZEROED + copy  # states are read and written
    return [
        *(Part(name=name, flops=flops, bytes=moved) for name, (flops, moved) in totals.items()),
        Part(name="embedding", flops=0, bytes=EMBEDDING_PASSES * tokens * model.hidden_size * element_bytes),
        Part(name="optimizer", flops=0, bytes=model.num_parameters * per_weight),
    ]


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="fanformer-1b", metavar="NAME")
    parser.add_argument("--micro-batch-size", type=int, default=8, metavar="SAMPLES")
    parser.add_argument("--seq-length", type=int, metavar="TOKENS", help="the preset's own by default")
    parser.add_argument("--element-bytes", type=int, default=2, choices=(2, 4), help="of weights and activations")
    parser.add_argument("--tflops", type=float, required=True, help="of matrix products, in 10^12 per second")
    parser.add_argument("--gigabytes-per-second", type=float, required=True, help="of memory, in 10^9 per second")
    options = parser.parse_args()
    preset = PRESETS[options.preset]
    model = dataclasses.replace(preset, seq_length=options.seq_length or preset.seq_length)
    tokens = options.micro_batch_size * model.seq_length
    parts = step_parts(model, tokens=tokens, element_bytes=options.element_bytes, state_bytes=STATE_BYTES)
    rates = (options.tflops * 1e12, options.gigabytes_per_second * 1e9)
    total = sum(part.seconds(*rates) for part in parts)
    flops = sum(part.flops for part in parts)
    moved = sum(part.bytes for part in parts)
    rows = [(part.name, part.flops, part.bytes, part.seconds(*rates)) for part in parts]
    cells = [
        [name, f"{flop / 1e12:.2f}", f"{size / 1e9:.2f}", f"{flop / size:.0f}", f"{1000 * s:.2f}", f"{s / total:.1%}"]
        for name, flop, size, s in [*rows, ("together", flops, moved, total)]
    ]
    print(markdown.table(["part", "TFLOP", "GB", "FLOP per byte", "ms, at least", "share"], cells, align="lrrrrr"))
    print(f"\n{tokens:,} tokens; at most {tokens / total:,.0f} tokens/s, {flops / total / rates[0]:.1%} of the rate.")


if __name__ == "__main__":
    main()
