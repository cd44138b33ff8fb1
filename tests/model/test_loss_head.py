"""The chunked loss head is the plain one: losses, gradients and training; and never are there all tokens' logits."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANformerConfig, KernelsConfig
from megatron_fanformer.model.loss_head import LossHead
from megatron_fanformer.parity.trial import TrialConfig, run_trial
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.parallel import RankGrid, rank_grid
from megatron_fanformer.train.optimizer import OptimizerConfig
from megatron_fanformer.train.step import wrap_stages
from tests.small_runs import RunOnRanks
from tests.tiny import tiny_model
from tests.train.layouts import layout, ranks_of

SAME_FP32 = 1e-6  # of the greatest element: sums in another order
SAME_TRAINING = 2e-5  # of a tensor's norm, after layers, clipping and Adam
BF16_LOGITS = 2**-6  # three bf16 roundings, one of them of the logits
SAME_LOSS_IN_BF16 = 2e-6  # nats: losses come from the same bf16 logits, in float32

CONFIG = tiny_model(num_layers=1, vocab_size=250, seq_length=24)  # 256 rows with padding
UNTIED = dataclasses.replace(CONFIG, untie_embeddings_and_output_weights=True)
MICRO_BATCH = 3
TOKENS = MICRO_BATCH * CONFIG.seq_length

# -- the head alone


class Problem(NamedTuple):
    """What all heads are given, whole: hidden states [s, b, h], weight [v, h], labels and loss mask [s, b]."""

    x_sbh: Tensor
    weight_vh: Tensor
    labels_sb: Tensor
    mask_sb: Tensor

    @classmethod
    def drawn(cls, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> "Problem":
        """`scale` is of the weights: at 1 the logits are of unit size, and losses are somewhat above ln 256."""
        generator = torch.Generator().manual_seed(0)
        size = (CONFIG.seq_length, MICRO_BATCH)
        x_sbh = torch.randn(*size, CONFIG.hidden_size, generator=generator)
        weight_vh = torch.randn(256, CONFIG.hidden_size, generator=generator) * scale / CONFIG.hidden_size**0.5
        labels_sb = torch.randint(CONFIG.vocab_size, size, generator=generator)
        mask_sb = (torch.rand(size, generator=generator) < 0.8).float()
        return cls(x_sbh.to(dtype), weight_vh.to(dtype), labels_sb, mask_sb)


class Outcome(NamedTuple):
    """Losses of all tokens, unmasked, and the gradients of their masked sum."""

    losses_sb: Tensor
    x_sbh: Tensor
    weight_vh: Tensor
    z_loss: float = 0.0
    """The masked sum of z-losses, which is part of what is differentiated."""


TENSORS = Outcome._fields[:3]


def exact(problem: Problem, z_loss_coefficient: float = 0.0) -> Outcome:
    """In float64, by torch's own cross entropy."""
    x_sbh, weight_vh = (tensor.detach().double().requires_grad_() for tensor in problem[:2])
    logits = (x_sbh @ weight_vh.t()).flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, problem.labels_sb.flatten(), reduction="none")
    losses_sb = losses.view_as(problem.labels_sb)
    z_losses = z_loss_coefficient * logits.logsumexp(-1).square()
    z_loss = (z_losses * problem.mask_sb.flatten()).sum()
    ((losses_sb * problem.mask_sb).sum() + z_loss).backward()
    return Outcome(losses_sb.detach(), x_sbh.grad, weight_vh.grad, z_loss.item())


class Way(NamedTuple):
    """How a head is spread, and what it is computed by."""

    parallel: ParallelConfig
    kernels: KernelsConfig
    z_loss_coefficient: float = 0.0


def last_stage(way: Way, grid: RankGrid, config: FANformerConfig, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"kernels": way.kernels, "z_loss_coefficient": way.z_loss_coefficient}
    return build_stages(config, way.parallel, grid, dtype=dtype, seed=0, **options)[-1]


def head_outcome(problem: Problem, way: Way, config: FANformerConfig = UNTIED, scale: float = 1.0) -> Outcome:
    """This rank's losses, and its parts of the gradients of a multiple of their sum, of a whole problem."""
    with rank_grid(way.parallel, "cpu") as grid:
        stage = last_stage(way, grid, config, problem.x_sbh.dtype)
        ranks, rank = way.parallel.tensor_model_parallel_size, grid.groups.tp.rank()
        weight = head_weight(stage)
        weight.data.copy_(problem.weight_vh.chunk(ranks)[rank])
        x_sbh = problem.x_sbh.chunk(ranks)[rank] if way.parallel.sequence_parallel else problem.x_sbh
        x_sbh = x_sbh.clone().requires_grad_()
        losses_sb = head_losses(stage, x_sbh, problem)
        (scale * (losses_sb * problem.mask_sb).sum()).backward()
        z_loss = stage.output_layer.take_z_losses() if way.z_loss_coefficient else None
        return Outcome(losses_sb.detach(), x_sbh.grad, weight.grad, 0.0 if z_loss is None else z_loss.item())


def head_weight(stage: Any) -> Any:
    is_tied = stage.share_embeddings_and_output_weights
    return stage.shared_embedding_or_output_weight() if is_tied else stage.output_layer.weight


def head_losses(stage: Any, x_sbh: Tensor, problem: Problem) -> Tensor:
    weight = head_weight(stage)
    if isinstance(stage.output_layer, LossHead):
        return stage.output_layer.losses(x_sbh, weight, labels_sb=problem.labels_sb, loss_mask_sb=problem.mask_sb)
    logits, _ = stage.output_layer(x_sbh, weight)
    return stage.compute_language_model_loss(problem.labels_sb.t(), logits).t()


def fused(chunk_tokens: int | None = None, **degrees: Any) -> Way:
    return Way(layout(**degrees), KernelsConfig(loss_head_chunk_tokens=chunk_tokens))


def plain(**degrees: Any) -> Way:
    return Way(layout(**degrees), KernelsConfig(chunked_loss_head=False))


def error(found: Tensor, expected: Tensor) -> float:
    """The greatest difference, over the greatest element."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("chunk_tokens", "config"),
    [(7, CONFIG), (None, CONFIG), (1, UNTIED), (36, UNTIED)],
    ids=["tied-7", "tied-all", "untied-1", "untied-36"],
)
def test_losses_and_gradients_are_the_plain_heads(
    run_on_ranks: RunOnRanks, chunk_tokens: int | None, config: FANformerConfig
) -> None:
    problem = Problem.drawn()
    (found,) = run_on_ranks(1, head_outcome, problem, fused(chunk_tokens), config)
    (expected,) = run_on_ranks(1, head_outcome, problem, plain(), config)
    for name, truth in zip(TENSORS, exact(problem), strict=False):
        assert error(getattr(found, name), getattr(expected, name)) < SAME_FP32, name
        assert error(getattr(found, name), truth) < SAME_FP32, name
    assert (found.x_sbh[problem.mask_sb == 0] == 0).all()


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    ("dtype", "coefficient", "bound"),
    [
        (torch.float32, 0.0, SAME_FP32),
        (torch.float32, 0.05, SAME_FP32),
        (torch.float32, -0.08, SAME_FP32),  # which takes some tokens' probabilities below 0
        (torch.bfloat16, 0.05, BF16_LOGITS),
    ],
    ids=str,
)
def test_tensor_parallel_parts_are_the_whole_and_z_loss_is_in_the_gradient_alone(
    run_on_ranks: RunOnRanks, ranks: int, sequence_parallel: bool, dtype: torch.dtype, coefficient: float, bound: float
) -> None:
    problem = Problem.drawn(scale=3, dtype=dtype)
    way = fused(7, tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel)
    found: list[Outcome] = run_on_ranks(ranks, head_outcome, problem, way._replace(z_loss_coefficient=coefficient))
    truth, without = exact(problem, coefficient), exact(problem)
    assert not coefficient or distance(truth.weight_vh, without.weight_vh) > 0.1
    x_sbh = torch.cat([rank.x_sbh for rank in found]) if sequence_parallel else found[0].x_sbh
    assert error(x_sbh, truth.x_sbh) < bound
    assert error(torch.cat([rank.weight_vh for rank in found]), truth.weight_vh) < bound
    for rank in found:
        assert error(rank.losses_sb, truth.losses_sb) < bound
        assert rank.z_loss == pytest.approx(truth.z_loss, rel=bound)
        assert sequence_parallel or torch.equal(rank.x_sbh, x_sbh)


@pytest.mark.parametrize(("ranks", "scale", "as_good"), [(1, 1, 1.02), (2, 3, 1.3)])
def test_bf16_is_as_far_from_exact_as_the_plain_head(
    run_on_ranks: RunOnRanks, ranks: int, scale: float, as_good: float
) -> None:
    """On one rank it has the same roundings, of which small logits show the most; a vocabulary's shares have others.

    `as_good` is times the plain head's own distance from float64.
    """
    problem = Problem.drawn(scale=scale, dtype=torch.bfloat16)
    both = [head(tensor_model_parallel_size=ranks) for head in (fused, plain)]
    found, expected = (run_on_ranks(ranks, head_outcome, problem, way) for way in both)
    truth = exact(problem)
    assert (found[0].losses_sb - expected[0].losses_sb).abs().max() < SAME_LOSS_IN_BF16
    assert distance(found[0].x_sbh, truth.x_sbh) < as_good * distance(expected[0].x_sbh, truth.x_sbh)
    weights = [torch.cat([rank.weight_vh for rank in outcome]) for outcome in (found, expected)]
    own, plains = (distance(weight, truth.weight_vh) for weight in weights)
    assert own < as_good * plains


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_far_below_the_other_still_learns_its_labels(run_on_ranks: RunOnRanks, dtype: torch.dtype) -> None:
    problem = Problem.drawn(dtype=dtype)
    x_sbh = problem.x_sbh.abs()
    weight_vh = problem.weight_vh.clone()
    weight_vh[:128] = -10  # some hundreds below the other rank's logits: no float32 has their exponential
    problem = problem._replace(x_sbh=x_sbh, weight_vh=weight_vh)
    ranks = run_on_ranks(2, head_outcome, problem, fused(tensor_model_parallel_size=2))
    truth = exact(problem)
    bound = SAME_FP32 if dtype == torch.float32 else BF16_LOGITS
    assert error(ranks[0].losses_sb, truth.losses_sb) < bound
    assert error(ranks[0].x_sbh, truth.x_sbh) < bound
    assert error(torch.cat([rank.weight_vh for rank in ranks]), truth.weight_vh) < bound


# -- what is held


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.elements = max(self.elements, output.numel())
        return output


def largest_tensor(problem: Problem, way: Way, is_differentiated: bool) -> int:
    with rank_grid(way.parallel, "cpu") as grid:
        stage = last_stage(way, grid, CONFIG, torch.float32)
        wrap_stages([stage], way.parallel)
        x_sbh = problem.x_sbh.clone().requires_grad_()
        with LargestTensor() as largest, torch.set_grad_enabled(is_differentiated):
            losses_sb = head_losses(stage, x_sbh, problem)
            if is_differentiated:
                (losses_sb * problem.mask_sb).sum().backward()
        return largest.elements


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_no_tensor_is_larger_than_a_chunks_logits_or_the_weight(
    run_on_ranks: RunOnRanks, is_differentiated: bool
) -> None:
    weight_elements, problem = 256 * CONFIG.hidden_size, Problem.drawn()
    (elements,) = run_on_ranks(1, largest_tensor, problem, fused(24), is_differentiated)
    assert elements == (weight_elements if is_differentiated else max(weight_elements, 24 * 256))
    (plains,) = run_on_ranks(1, largest_tensor, problem, plain(), is_differentiated)
    assert plains == TOKENS * 256 > 2 * elements


# -- weights that the gradient is not of


def refusal(problem: Problem, use: str) -> str:
    """What backward says to a use of the losses."""
    way = fused(7)
    with rank_grid(way.parallel, "cpu") as grid:
        stage = last_stage(way, grid, UNTIED, torch.float32)
        if use.startswith("wrapped"):
            wrap_stages([stage], way.parallel)
        losses_sb = head_losses(stage, problem.x_sbh.clone().requires_grad_(), problem)
        weighted = (losses_sb * problem.mask_sb).sum()
        try:
            if use == "other tokens":
                losses_sb.sum().backward()
            elif use == "wrapped, other scale":
                (weighted / problem.mask_sb.sum()).backward()
            else:
                weighted.backward(retain_graph=True)
                weighted.backward()
        except RuntimeError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("other tokens", "weighted in another proportion than the loss mask"),
        ("wrapped, other scale", "is in main_grad already"),
        ("wrapped, twice", "taken already"),
    ],
)
def test_a_use_that_would_be_wrong_is_refused(run_on_ranks: RunOnRanks, use: str, message: str) -> None:
    (shown,) = run_on_ranks(1, refusal, Problem.drawn(), use)
    assert message in shown


@pytest.mark.parametrize("mask", ["drawn", "fractions", "zeros"])
def test_a_scale_of_the_whole_sum_is_taken_over(run_on_ranks: RunOnRanks, mask: str) -> None:
    problem = Problem.drawn()
    if mask != "drawn":
        problem = problem._replace(mask_sb=torch.rand(problem.mask_sb.shape) * (mask == "fractions"))
    (found,) = run_on_ranks(1, head_outcome, problem, fused(7), UNTIED, 0.37)
    truth = exact(problem)
    for part in ("x_sbh", "weight_vh"):
        difference = (getattr(found, part) - 0.37 * getattr(truth, part)).abs().max()
        assert difference <= SAME_FP32 * getattr(truth, part).abs().max()


# -- the head in a model that trains


# One of each way in which ranks share the head's work; the golden losses hold the head in the others.
@pytest.mark.parametrize(
    ("text", "config"),
    [
        *((text, CONFIG) for text in ("", "tp=2,sp=true", "pp=2", "dp=2,overlap=true,ddp_bucket_size=3000")),
        *((text, UNTIED) for text in ("tp=2", "pp=2")),
        pytest.param("cp=2", CONFIG, marks=pytest.mark.full),
    ],
)
def test_training_is_the_plain_heads(run_on_ranks: RunOnRanks, text: str, config: FANformerConfig) -> None:
    """Two steps of micro batches with masked tokens: losses, gradients as the buffers have them, and weights."""
    trial = TrialConfig(
        model=dataclasses.replace(config, num_layers=4),
        optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.1),
        global_batch_size=8,
        micro_batch_size=2,
        steps=2,
        dtype="fp32",
        device="cpu",
    )
    parallel = layout(text)
    trials = (dataclasses.replace(trial, kernels=way.kernels) for way in (fused(7), plain()))
    found, expected = (run_on_ranks(ranks_of(parallel), run_trial, own, parallel) for own in trials)
    for own, plains in zip(found, expected, strict=True):
        assert own.losses == pytest.approx(plains.losses, rel=SAME_FP32)
        for kind in ("outputs", "gradients", "weights"):
            for piece, right in zip(getattr(own, kind), getattr(plains, kind), strict=True):
                assert piece.name == right.name
                bound = SAME_TRAINING * max(float(abs(right.values).max()), SAME_FP32)
                assert abs(piece.values - right.values).max() <= bound, piece.name
