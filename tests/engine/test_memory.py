"""What a layer of the Engine keeps from forward to backward, counted by storage, against the memory formula."""

import itertools
from typing import Any

import pytest
import torch

from megatron_fanformer.model.config import FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.layer_memory import layer_memory
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.optimizers import OPTIMIZERS
from tests.engine.passes import FIELDS, LAYOUTS, MODEL, VARIANTS, batch, model_on_rank, ranks_of
from tests.small_runs import RunOnRanks

RECIPES = (None, "tensorwise", "delayed", "blockwise")


SCALARS = 64  # bytes; scales, seeds and offsets


def kept_by_layer(model: FANformerConfig, layout: str, precision: PrecisionConfig, modules: list[str]) -> int:
    """Bytes of all storages that a layer's forward keeps: without weights, scalars, and the angles of all layers."""
    recomputed = dict(recompute_granularity="selective", recompute_modules=modules) if modules else {}
    with model_on_rank("transformer_engine", model, layout, precision, **recomputed) as (stage, _):
        layer = stage.decoder.layers[0]
        storages: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        forward = layer.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            angles = kwargs["rotary_pos_emb"]
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = forward(*args, **kwargs)
            storages.pop((angles[0] if isinstance(angles, tuple) else angles).untyped_storage()._cdata, None)
            return output

        layer.forward = watched
        tokens, positions = batch()
        stage(tokens, positions, None, labels=tokens.roll(-1, 1))
        weights = {weight.untyped_storage()._cdata for weight in stage.parameters()}
        kept = [storage.nbytes() for number, storage in storages.items() if number not in weights]
        return sum(number for number in kept if number > SCALARS)


def by_formula(model: FANformerConfig, layout: str, precision: PrecisionConfig, modules: list[str]) -> int:
    recomputed = dict(recompute_granularity="selective", recompute_modules=modules) if modules else {}
    job = Job(
        model=model,
        parallel=ParallelConfig(**{**FIELDS[layout], **recomputed}),
        kernels=KernelsConfig(gradient_accumulation_fusion=True),
        precision=precision,
        optimizer=OPTIMIZERS["adamw"],
        data_parallel_size=1,
        micro_batch_size=2,
        num_micro_batches=1,
        layers="transformer_engine",
    )
    return layer_memory(job).saved


ALWAYS = (
    ("delayed", "tp2 sp", "qk_and_v"),
    (None, "tp2 sp, FAN sequence", "paper"),
    (None, "tp2", "norms of heads, grouped"),
)
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full)
    for case in itertools.product(RECIPES, LAYOUTS, VARIANTS)
]


@pytest.mark.parametrize(("recipe", "layout", "variant"), CASES)
def test_a_layer_keeps_what_the_formula_says(
    run_on_engine_ranks: RunOnRanks, recipe: str | None, layout: str, variant: str
) -> None:
    """To the byte."""
    fp8: dict[str, Any] = {} if recipe is None else dict(fp8="hybrid", fp8_recipe=recipe)
    given = (VARIANTS[variant], layout, PrecisionConfig(dtype="bf16", **fp8), [])
    for kept in run_on_engine_ranks(ranks_of(layout), kept_by_layer, *given):
        assert kept == by_formula(*given)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "modules", [["core_attn"], ["layernorm"], ["mlp"], ["fan"], ["core_attn", "layernorm", "mlp", "fan"]], ids="+".join
)
def test_what_is_recomputed_is_not_kept(run_on_engine_ranks: RunOnRanks, layout: str, modules: list[str]) -> None:
    given = (MODEL, layout, PrecisionConfig(dtype="bf16"), modules)
    for kept in run_on_engine_ranks(ranks_of(layout), kept_by_layer, *given):
        assert kept == by_formula(*given)
