#!/usr/bin/env python3
"""Transformer Engine's layers against the local ones, as a table: every variant, some layouts, fp32 and bf16; then FP8.

    python tools/engine_table.py

Needs a checkout, no GPU: the Engine's extension is the stand-in of tests/engine_on_cpu. Each row is one forward and
backward pass of a two-layer model (tests/engine/passes.py); differences are of the loss, in nats, and of the gradient
that differs most, as the norm of the difference over the norm.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

FP8_RECIPES = {"tensorwise": 1, "blockwise": 1, "delayed": 3}
"""By Megatron's names: the passes until the scales are those of the tensors."""


def main() -> None:
    """Print both tables as Markdown."""
    from megatron_fanformer.runtime import device, megatron_cpu

    device.quieten_libraries()
    megatron_cpu.install()
    from megatron_fanformer.runtime.rank_pool import RankPool
    from tests.engine_on_cpu import installing

    with RankPool("cuda", backend="gloo", prepare=installing.install) as pool:
        compare_layers(pool)
        compare_fp8(pool)


def compare_layers(pool) -> None:  # type: ignore[no-untyped-def]
    """Against the local layers on one rank."""
    import torch

    from megatron_fanformer import markdown
    from tests.engine.passes import LAYOUTS, VARIANTS, one_pass, ranks_of, worst_gradient

    print(markdown.heading(["variant", "layout", "loss, fp32", "gradient, fp32", "loss, bf16", "gradient, bf16"]))
    for variant in VARIANTS:
        for layout in LAYOUTS:
            if variant == "Transformer" and "FAN" in layout:
                continue
            row = []
            for dtype in (torch.float32, torch.bfloat16):
                local = pool.run(1, one_pass, "local", variant, "one rank", None, dtype)
                ours = pool.run(ranks_of(layout), one_pass, "transformer_engine", variant, layout, None, dtype)
                row += [f"{abs(ours[0].loss - local[0].loss):.1e}", f"{worst_gradient(ours, local):.1e}"]
            print(markdown.row([variant, layout, *row]), flush=True)


def compare_fp8(pool) -> None:  # type: ignore[no-untyped-def]
    """Against the same layout in bf16."""
    import torch

    from megatron_fanformer import markdown
    from megatron_fanformer.model.config import PrecisionConfig
    from tests.engine.passes import LAYOUTS, one_pass, ranks_of, worst_gradient

    print(f"\n{markdown.heading(['recipe', 'layout', 'fp8_fan', 'loss', 'gradient'])}")
    for recipe, passes in FP8_RECIPES.items():
        for layout in LAYOUTS:
            given = (ranks_of(layout), one_pass, "transformer_engine", "paper", layout)
            bf16 = pool.run(*given)
            for fp8_fan in (False, True):
                precision = PrecisionConfig(dtype="bf16", fp8="hybrid", fp8_recipe=recipe, fp8_fan=fp8_fan)
                fp8 = pool.run(*given, precision, torch.bfloat16, (), passes)
                loss, gradient = abs(fp8[0].loss - bf16[0].loss), worst_gradient(fp8, bf16)
                cells = [recipe, layout, str(fp8_fan).lower(), f"{loss:.1e}", f"{gradient:.2f}"]
                print(markdown.row(cells), flush=True)


if __name__ == "__main__":
    main()
