"""The seconds of a training step of a job on a machine, by formula: predicted, not measured.

A micro batch takes pipeline stage i t_i seconds, forward, backward and recomputation. With M micro batches and v chunks
a stage, as 1F1B and the interleaved schedule run them:

    seconds = M max(t) + (sum(t) - max(t)) / v + sends + gradients + weights + optimizer + orthogonalization + host

t adds up FLOPs at the rates that products and attention reach, bytes at the memory's rate, and collectives
(`layer_traffic`) as rings. docs/planning.md says how far off published runs are. Left out: the sum of a tied
embedding's gradients between stages, collectives of a few bytes, evaluation, checkpoints and reading data.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_fanformer.plan.flops import training_flops_per_token
from megatron_fanformer.plan.gradient_buffers import (
    first_stage_buckets,
    first_stage_weights,
    state_bytes,
)
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.layer_traffic import (
    Term,
    embedding_terms,
    head_terms,
    layer_backward,
    layer_forward,
    recomputed,
    recomputed_layers,
)
from megatron_fanformer.plan.machines import Machine
from megatron_fanformer.plan.matrix_updates import MatrixUpdates

FLASH_BACKWARD = 5 / 2  # of forward's products: flash attention's backward computes the scores again
SCORE_PASSES = 4, 7  # of attention in plain products, forward and backward: products, softmax and their gradients
STREAM_PASSES = 2 * 5 + 2 * 6  # numbers moved of each of the hidden size, both ways: two norms, two residual sums
FORWARD_SHARE = 0.4  # of the bytes that element-wise operations move
EMBEDDING_PASSES = 3  # rows read and written, their gradient read
LOGIT_BYTES, FLOAT_LOGIT_BYTES = 2, 104  # moved of each, by the chunked loss head and by Megatron's own in float32
EXPOSED = {
    "tp": ("tensor parallel communication",),
    "cp": ("context parallel communication",),
    "pp": ("pipeline sends",),
    "dp_cp": ("gradient reduction", "weight gathering"),
}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step and its parts, on the rank that the others wait for."""

    seconds: float
    relative_error: float
    """Relative error of `seconds`, as the machine states it."""
    parts: dict[str, float]
    """Seconds by purpose, which sum to `seconds`."""
    exposed: dict[str, float]
    """Seconds of communication beside which nothing is computed, by group: tp, cp, pp, dp_cp."""
    tokens_per_second: float
    """Tokens per second of all ranks together."""
    model_flops_utilization: float
    """Model FLOP/s, as a share of the data sheet's matrix rate in the weights' format."""


class Parts(dict[str, float]):
    """Seconds by purpose; 0 of others."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def total(self) -> float:
        """Return the sum over all purposes."""
        return sum(self.values())

    def plus(self, more: "Parts") -> "Parts":
        """Return the seconds of both."""
        return Parts({name: self[name] + more[name] for name in {**self, **more}})

    def times(self, number: float) -> "Parts":
        """Return the seconds of so many."""
        return Parts({name: number * seconds for name, seconds in self.items()})


def step_time(job: Job, machine: Machine, *, overlaps_tensor_parallel: bool = False) -> StepTime:
    """Return what a step takes.

    Args:
        overlaps_tensor_parallel: whether products hide tensor parallel collectives, as the Engine's user buffers let
            other trainers do.

    Raises:
        ValueError: the layers do not divide evenly over the stages.
        InputError: the machine does not have a number format that the job uses.
    """
    forward, backward = _layer(job, machine, overlaps_tensor_parallel)
    stages = _stages(job, machine, forward, backward)
    longest = max(stages, key=Parts.total)
    parts = longest.times(job.num_micro_batches)
    if job.stages > 1:
        fill = sum(stage.total() for stage in stages) - longest.total()
        parts["pipeline bubble"] = fill / job.parallel.virtual_stages
        parts["pipeline sends"] = _sends(job, machine)
    parts.update(_update(job, machine, backward.total()))
    seconds = parts.total()
    tokens_per_second = job.tokens_per_step / seconds
    peak = machine.flops_per_second(job.precision.dtype) * job.world_size
    return StepTime(
        seconds=seconds,
        relative_error=machine.error_in("fp8" if job.precision.fp8 else job.precision.dtype),
        parts={name: value for name, value in parts.items() if value},
        exposed={group: value for group, names in EXPOSED.items() if (value := sum(parts[name] for name in names))},
        tokens_per_second=tokens_per_second,
        model_flops_utilization=tokens_per_second * training_flops_per_token(job.model) / peak,
    )


def collective_seconds(term: Term, ranks: int, stride: int, machine: Machine) -> float:
    """Return what collectives over `ranks` ranks take, each `stride` ranks from the next.

    Those of a group that are in one domain take turns in the ring, which leaves the domain once: every one of them adds
    its adapter to the network's rate. In an all-to-all each sends what is for other domains through its own.
    """
    if ranks == 1 or not term.calls:
        return 0.0
    in_domain = max(1, min(ranks, machine.domain_size // stride))
    domains = -(-ranks // in_domain)
    if term.kind == "send":  # the slowest of the group sets the pace
        link = machine.domain if domains == 1 else machine.network
        return term.calls * (machine.collective_seconds + link.latency_seconds) + term.message_bytes / link.rate
    rate, hops = machine.domain.rate, (ranks - domains) * machine.domain.latency_seconds
    if domains > 1:
        adapters = (ranks - 1) / (ranks - in_domain) if term.kind == "all-to-all" else in_domain
        across = adapters * machine.network.rate
        rate = across if in_domain == 1 else min(rate, across)
        hops += (domains - 1) * machine.network.latency_seconds
    rounds = 2 if term.kind == "all-reduce" else 1
    share = (ranks - 1) / ranks
    return term.calls * (machine.collective_seconds + rounds * hops) + rounds * share * term.message_bytes / rate


def _collectives(job: Job, machine: Machine, terms: Iterable[Term]) -> float:
    nearest, groups = job.tensor_ranks, job.group_sizes(0)
    strides = {"tp": 1, "tp_dp_cp": 1, "inter_dist_opt": nearest * job.state_ranks}
    strides["pp"] = nearest * job.parallel.context_parallel_size * job.data_parallel_size
    return sum(
        collective_seconds(term, groups[term.group], strides.get(term.group, nearest), machine) for term in terms
    )


# -- a micro batch


def _layer(job: Job, machine: Machine, overlaps_tensor_parallel: bool) -> tuple[Parts, Parts]:
    """Return the seconds of a layer's forward and backward by purpose."""
    model, ranks, tokens = job.model, job.tensor_ranks, job.tokens
    part_tokens = tokens // ranks if job.parallel.sequence_parallel else tokens
    (rows, columns), (rows_2, columns_2) = model.ffn_maps
    heads = model.num_attention_heads * model.kv_channels
    maps = model.hidden_size * (model.qkv_rows + heads) + rows * columns + rows_2 * columns_2
    fan_tokens = part_tokens if model.has_fan and not job.has_column_fan else tokens / ranks
    fan_flops = 2 * model.hidden_size * model.fan_rows * fan_tokens
    rate = machine.flops_per_second(job.precision.dtype)
    product_rate = map_rate = fan_rate = rate * machine.product_efficiency
    if job.precision.fp8:
        map_rate = machine.flops_per_second("fp8") * machine.fp8_product_efficiency
        fan_rate = map_rate if job.precision.fp8_fan else product_rate
    products = 2 * maps * tokens / ranks / map_rate + fan_flops / fan_rate
    attention_flops = 2 * heads / ranks * model.seq_length * tokens  # of the unmasked half
    forward, backward = Parts({"matrix products": products}), Parts({"matrix products": 2 * products})
    if job.keeps_scores:
        score_bytes = heads // model.kv_channels * tokens * model.seq_length // ranks * job.element_bytes
        computing = 2 * attention_flops / product_rate
        forward["attention"] = computing + SCORE_PASSES[0] * score_bytes / machine.memory_rate
        backward["attention"] = 2 * computing + SCORE_PASSES[1] * score_bytes / machine.memory_rate
    else:
        forward["attention"] = attention_flops / (rate * machine.attention_efficiency)
        backward["attention"] = FLASH_BACKWARD * forward["attention"]
    widths = 4 * (heads + model.value_size) + 3 * rows + 2 * columns_2  # rotary embedding, the MLP's activation
    if model.has_fan:
        widths += 3 * model.fan_rows + 2 * model.hidden_size
    numbers = STREAM_PASSES * model.hidden_size * part_tokens + widths * tokens / ranks
    for parts, share, terms in (
        (forward, FORWARD_SHARE, list(layer_forward(job))),
        (backward, 1 - FORWARD_SHARE, list(layer_backward(job))),
    ):
        parts["element-wise"] = share * numbers * job.element_bytes / machine.memory_rate
        tensor, context = (_collectives(job, machine, (t for t in terms if t.group == group)) for group in ("tp", "cp"))
        if overlaps_tensor_parallel:
            tensor -= machine.overlap * min(tensor, parts["matrix products"])
        if job.has_ring:  # sends keys and values round beside attention
            context -= machine.overlap * min(context, parts["attention"])
        parts["tensor parallel communication"], parts["context parallel communication"] = tensor, context
        if job.kernels.cuda_graph_impl == "none":
            parts["host"] = max(0.0, machine.layer_seconds / 2 - parts.total())
    return forward, backward


def _stages(job: Job, machine: Machine, forward: Parts, backward: Parts) -> list[Parts]:
    """Return the seconds of a micro batch by purpose, of each pipeline stage."""
    segments = job.parallel.segments(job.model.num_layers)
    if segments is None:
        raise ValueError(f"{job.model.num_layers} layers do not divide over {job.stages} stages")
    layer, again = forward.plus(backward), _recomputed(job, machine, forward)
    stages = []
    for chunks in zip(*segments, strict=True):
        stages.append(layer.times(sum(chunks)))
        stages[-1]["recomputation"] = again * sum(recomputed_layers(job, number) for number in chunks)
    first, last = stages[0], stages[-1]
    first["element-wise"] += EMBEDDING_PASSES * job.hidden_bytes / machine.memory_rate
    first["tensor parallel communication"] += _collectives(job, machine, embedding_terms(job))
    logits = job.tokens * job.model.padded_vocab_size // job.tensor_ranks
    rate = machine.flops_per_second(job.precision.dtype) * machine.product_efficiency
    moved = logits * (LOGIT_BYTES if job.kernels.chunked_loss_head else FLOAT_LOGIT_BYTES)
    last["loss head"] = 3 * 2 * logits * job.model.hidden_size / rate + moved / machine.memory_rate
    last["tensor parallel communication"] += _collectives(job, machine, head_terms(job))
    return stages


def _recomputed(job: Job, machine: Machine, forward: Parts) -> float:
    """Return the seconds of a layer's forward that run again."""
    model, parallel = job.model, job.parallel
    if parallel.recompute_granularity == "full":
        return forward.total()
    seconds = _collectives(job, machine, recomputed(job))
    numbers = 0.0
    if parallel.recomputes("core_attn"):
        seconds += forward["attention"]
    if parallel.recomputes("mlp"):
        (rows, columns), (rows_2, columns_2) = model.ffn_maps
        maps = rows * columns + rows_2 * columns_2
        others = model.qkv_rows + model.num_attention_heads * model.kv_channels + model.fan_rows
        seconds += forward["matrix products"] * maps / (maps + model.hidden_size * others)
        numbers += (rows + columns_2) / job.tensor_ranks
    if parallel.recomputes("fan"):
        numbers += (model.fan_rows + model.hidden_size) / job.tensor_ranks
    if parallel.recomputes("layernorm") and not job.fuses_input_norm:
        numbers += 2 * job.boundary_bytes / job.activation_bytes
    return seconds + numbers * job.activation_bytes / machine.memory_rate


# -- a step


def _sends(job: Job, machine: Machine) -> float:
    """Return the exposed exchanges between stages, both ways: with 1F1B every one.

    Interleaved, exchanges run beside a chunk's computation while forward and backward take turns. Those of the first
    stage's warm-up and flush, which megatron-core counts so, block (overlap_p2p_comm_warmup_flush is off).
    """
    parallel = job.parallel
    exchange = 2 * _collectives(job, machine, [Term("pp", "send", "", job.boundary_bytes)])
    chunks = parallel.virtual_stages * job.num_micro_batches
    blocking = chunks
    if parallel.virtual_stages > 1:
        blocking = min(chunks, 2 * (job.stages - 1) + (parallel.virtual_stages - 1) * job.stages)
    return exchange * (job.stages - 1 + blocking + (1 - machine.overlap) * (chunks - blocking))


def _update(job: Job, machine: Machine, layer_backward_seconds: float) -> Parts:
    """Return what comes once a step, on the first stage, whose backward is the last to end.

    Replicas sum gradients beside the backward of the last micro batch, all but the last bucket; and gather weights
    beside the first forward, all but the first.
    """
    parallel, parts = job.parallel, Parts()
    of_stages = parallel.layers_per_stage(job.model.num_layers) or [0]
    held = first_stage_weights(job.model, parallel, of_stages[0])
    of_each = [weight.elements for weight in held]
    elements = sum(of_each)
    buckets = first_stage_buckets(job.model, parallel, job.data_parallel_size, of_stages[0])
    window = of_stages[0] * layer_backward_seconds
    if parallel.virtual_stages > 1:  # each chunk's last backward is of as many micro batches as there are stages
        window *= min(job.stages, job.num_micro_batches)

    def exposed(terms: list[Term], beside: float, overlaps: bool | None) -> float:
        if not overlaps:
            return _collectives(job, machine, terms)
        seconds = _collectives(job, machine, (term._replace(calls=buckets) for term in terms))
        return seconds - machine.overlap * min(seconds * (buckets - 1) / buckets, beside)

    kind = "reduce-scatter" if parallel.use_distributed_optimizer else "all-reduce"
    reduce = Term(job.state_group, kind, "gradients", elements * job.gradient_bytes)
    between = Term("inter_dist_opt", "all-reduce", "gradients", reduce.message_bytes // job.state_ranks)
    parts["gradient reduction"] = exposed([reduce, between], window, parallel.overlap_grad_reduce)
    if parallel.use_distributed_optimizer:
        gather = Term(job.state_group, "all-gather", "weights", elements * job.element_bytes)
        parts["weight gathering"] = exposed([gather], window / 2, parallel.overlap_param_gather)
    # Zeroed gradients; of the rank's share gradient and main weight read, written, and copied where formats differ.
    copies = sum(size for size in (job.element_bytes, job.gradient_bytes + 4 * (job.gradient_bytes < 4)) if size != 4)
    states = 2 * state_bytes(held, of_each, job.optimizer)  # read and written
    moved = elements * job.gradient_bytes + (elements * (3 * 4 + copies) + states) / job.state_ranks
    parts["optimizer"] = moved / machine.memory_rate
    parts["between steps"] = machine.step_seconds
    matrices = MatrixUpdates(job, of_stages.index(max(of_stages)))  # the gradients' norm, before them, is of all stages
    if matrices.matrices:
        rate = machine.flops_per_second(matrices.dtype, field="optimizer.name") * machine.product_efficiency
        sent = _collectives(job, machine, matrices.terms(0))
        parts["orthogonalization"] = matrices.busiest_flops / rate + sent
    return parts
