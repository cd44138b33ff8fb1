"""The seconds of a training step of a job on a machine, by formula: predicted, not measured.

Pipeline stage i computes a micro batch, forward, backward and recomputation, in t_i seconds. With M micro batches and v
chunks a stage, in 1F1B (v = 1) or the interleaved schedule:

    seconds = M max(t) + (sum(t) - max(t)) / v + sends + gradients + weights + optimizer + orthogonalization + host

t_i is the sum of FLOPs at the rates that products and attention reach, of bytes at the memory's rate, and of
collectives (`communication`) at the links' rates. docs/planning.md has the error on published runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_fanformer.plan.communication import layer_backward, layer_forward, layer_recomputation, recomputed_layers
from megatron_fanformer.plan.gradient_buffers import first_stage_buckets, first_stage_weights, state_bytes
from megatron_fanformer.plan.job import Job, training_flops_per_token
from megatron_fanformer.plan.machines import Machine
from megatron_fanformer.plan.matrix_updates import MatrixUpdates, Term

FLASH_BACKWARD = 5 / 2  # products in flash attention's backward, which computes the scores again, for each in forward
STREAM_PASSES = 22  # times that norms and residual sums of a layer read or write hidden states, forward and backward
FORWARD_SHARE = 0.4  # forward's share of the bytes that element-wise operations move
SCORE_PASSES = 11  # times that plain attention reads or writes all scores, forward and backward
LOGIT_BYTES, FLOAT_LOGIT_BYTES = 2, 104  # moved for each logit, by the chunked loss head and by Megatron's in float32


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step and its parts, on the rank that the others wait for."""

    seconds: float
    relative_error: float  # of `seconds`, as the machine states it
    parts: dict[str, float]  # seconds by purpose, which sum to `seconds`
    tokens_per_second: float  # of all ranks together
    model_flops_utilization: float  # model FLOP/s, as a share of the data sheet's matrix rate in the weights' format


def step_time(job: Job, machine: Machine, *, overlaps_tensor_parallel: bool = False) -> StepTime:
    """Return the time of a training step of a job on a machine.

    With `overlaps_tensor_parallel`, products hide tensor parallel collectives, as with the Engine's user buffers.

    Raises:
        ValueError: the layers do not divide evenly over the stages.
        InputError: the machine does not have a number format that the job uses.
    """
    segments = job.parallel.segments(job.model.num_layers)
    if segments is None:
        raise ValueError(f"{job.model.num_layers} layers do not divide over {job.stages} stages")
    layers = [sum(chunk_layers) for chunk_layers in zip(*segments, strict=True)]  # of each stage
    layer = _layer(job, machine, overlaps_tensor_parallel)
    recomputed = sum(recomputed_layers(job, number) for chunk in segments for number in chunk)
    layer["recomputation"] *= recomputed / job.model.num_layers  # from one layer's to the mean of all layers
    head = _loss_head(job, machine)
    stage_seconds = [number * sum(layer.values()) for number in layers]
    stage_seconds[-1] += head
    slowest = stage_seconds.index(max(stage_seconds))
    parts = {name: job.num_micro_batches * layers[slowest] * seconds for name, seconds in layer.items()}
    parts["loss head"] = job.num_micro_batches * head if slowest == job.stages - 1 else 0.0
    if job.stages > 1:
        virtual = job.parallel.virtual_stages
        parts["pipeline bubble"] = (sum(stage_seconds) - stage_seconds[slowest]) / virtual
        exchange = 2 * _collectives(job, machine, [Term("pp", "send", "", job.boundary_bytes)])  # there and back
        exposed = 1 - machine.overlap if virtual > 1 else 1  # share of sends that no computation hides
        parts["pipeline sends"] = exchange * (job.stages - 1 + exposed * virtual * job.num_micro_batches)
    parts |= _once_a_step(job, machine, layers[0], sum(parts.values()) / job.num_micro_batches)
    seconds = sum(parts.values())
    tokens_per_second = job.tokens_per_step / seconds
    peak = machine.flops_per_second(job.precision.dtype) * job.world_size
    return StepTime(
        seconds=seconds,
        relative_error=machine.error_in("fp8" if job.precision.fp8 else job.precision.dtype),
        parts={name: value for name, value in parts.items() if value},
        tokens_per_second=tokens_per_second,
        model_flops_utilization=tokens_per_second * training_flops_per_token(job.model) / peak,
    )


def term_seconds(term: Term, ranks: int, stride: int, machine: Machine) -> float:
    """Return the time of a term's collectives over `ranks` ranks, each `stride` ranks from the next.

    A ring visits all of the group's ranks in a domain before it crosses the network. The group has as many rings as
    ranks in a domain, and each ring crosses by a different rank's adapter, so the rates of these adapters add up.
    All-to-alls and sends have no ring: each rank uses its own adapter alone.
    """
    if ranks == 1 or not term.calls:
        return 0.0
    ranks_in_domain = max(1, min(ranks, machine.domain_size // stride))
    rate = machine.domain.rate
    if ranks_in_domain < ranks:
        adapters = 1 if term.kind in ("all-to-all", "send") else ranks_in_domain
        network_rate = adapters * machine.network.rate
        rate = network_rate if ranks_in_domain == 1 else min(rate, network_rate)
    share_of_others = (ranks - 1) / ranks
    moved_share = {"send": 1.0, "all-reduce": 2 * share_of_others}.get(term.kind, share_of_others)
    return term.calls * machine.collective_seconds + moved_share * term.message_bytes / rate


def _collectives(job: Job, machine: Machine, terms: Iterable[Term]) -> float:
    """Return the seconds of a first-stage rank's collectives, which run one after the other."""
    tensor, groups = job.tensor_ranks, job.group_sizes(0)
    # Steps from one rank of a group to the next; a group that is not listed has one rank in every `tensor` ranks.
    strides = {"tp": 1, "tp_dp_cp": 1, "inter_dist_opt": tensor * job.state_ranks}
    strides["pp"] = tensor * job.parallel.context_parallel_size * job.data_parallel_size
    return sum(term_seconds(term, groups[term.group], strides.get(term.group, tensor), machine) for term in terms)


def _layer(job: Job, machine: Machine, overlaps_tensor_parallel: bool) -> dict[str, float]:
    """Return the seconds of one layer for one micro batch by purpose, forward, backward and recomputation."""
    products, mlp_products = _matrix_products(job, machine)
    attention, attention_backward = _core_attention(job, machine)
    moving = _moved_numbers(job) * job.element_bytes / machine.memory_rate
    terms = [*layer_forward(job), *layer_backward(job)]
    tensor = _collectives(job, machine, (term for term in terms if term.group == "tp"))
    context = _collectives(job, machine, (term for term in terms if term.group == "cp"))
    if overlaps_tensor_parallel:
        tensor -= machine.overlap * min(tensor, 3 * products)
    parts = {
        "matrix products": 3 * products,  # backward has two for each in forward
        "attention": attention + attention_backward,
        "element-wise": moving,
        "tensor parallel communication": tensor,
        "context parallel communication": context,
        "host": 0.0,
        "recomputation": 0.0,
    }
    forward_computing = products + attention + FORWARD_SHARE * moving
    if job.kernels.cuda_graph_impl == "none":  # a GPU waits for the host, which takes equally long for both passes
        forward = forward_computing + (tensor + context) / 2
        backward = sum(parts.values()) - forward
        parts["host"] = sum(max(0.0, machine.layer_seconds / 2 - seconds) for seconds in (forward, backward))
    if job.parallel.recompute_granularity == "full":
        parts["recomputation"] = forward_computing
    recomputed_widths = 0  # numbers a token that recomputed element-wise operations move
    if job.parallel.recomputes("core_attn"):
        parts["recomputation"] += attention
    if job.parallel.recomputes("mlp"):
        (rows, _), (_, columns_2) = job.model.ffn_maps
        parts["recomputation"] += mlp_products
        recomputed_widths += rows + columns_2
    if job.parallel.recomputes("fan"):
        recomputed_widths += job.model.fan_rows + job.model.hidden_size
    recomputed_bytes = recomputed_widths * job.tokens / job.tensor_ranks * job.element_bytes
    parts["recomputation"] += recomputed_bytes / machine.memory_rate
    parts["recomputation"] += _collectives(job, machine, layer_recomputation(job))
    return parts


def _matrix_products(job: Job, machine: Machine) -> tuple[float, float]:
    """Return the seconds of the forward products with one layer's weights for one micro batch, and the MLP's share."""
    model, ranks, tokens = job.model, job.tensor_ranks, job.tokens
    mlp = sum(rows * columns for rows, columns in model.ffn_maps)  # elements of weights, here and below
    maps = model.hidden_size * (model.qkv_rows + model.num_attention_heads * model.kv_channels) + mlp
    fan = model.hidden_size * model.fan_rows
    # A rank computes 1 / ranks of a column FAN map's rows for all tokens, but all rows of another for its own tokens.
    part_tokens = tokens // ranks if job.parallel.sequence_parallel else tokens
    fan_tokens = tokens / ranks if job.has_column_fan else part_tokens
    map_rate = fan_rate = machine.flops_per_second(job.precision.dtype) * machine.product_efficiency
    if job.precision.fp8:
        map_rate = machine.flops_per_second("fp8") * machine.fp8_product_efficiency
        fan_rate = map_rate if job.precision.fp8_fan else fan_rate
    seconds = 2 * maps * tokens / ranks / map_rate + 2 * fan * fan_tokens / fan_rate
    return seconds, seconds * mlp / (maps + fan)


def _moved_numbers(job: Job) -> float:
    """Return how many numbers one layer's element-wise operations move for one micro batch, forward and backward."""
    model, ranks, tokens = job.model, job.tensor_ranks, job.tokens
    part_tokens = tokens // ranks if job.parallel.sequence_parallel else tokens
    queries_width = model.num_attention_heads * model.kv_channels
    (rows, _), (_, columns_2) = model.ffn_maps
    widths = 4 * (queries_width + model.value_size) + 3 * rows + 2 * columns_2  # a token's, in rotation and the MLP
    if model.has_fan:
        widths += 3 * model.fan_rows + 2 * model.hidden_size
    return STREAM_PASSES * model.hidden_size * part_tokens + widths * tokens / ranks


def _core_attention(job: Job, machine: Machine) -> tuple[float, float]:
    """Return the seconds of one layer's attention scores and context for one micro batch, forward and backward."""
    model, ranks = job.model, job.tensor_ranks
    queries_width = model.num_attention_heads * model.kv_channels
    rate = machine.flops_per_second(job.precision.dtype)
    # Two products of two FLOPs, over the half of the scores that is not masked.
    flash = 2 * queries_width / ranks * model.seq_length * job.tokens / (rate * machine.attention_efficiency)
    if not job.keeps_scores:
        return flash, FLASH_BACKWARD * flash
    score_bytes = model.num_attention_heads // ranks * job.tokens * model.seq_length * job.element_bytes
    products = 2 * flash * machine.attention_efficiency / machine.product_efficiency  # of masked scores, too
    moving = SCORE_PASSES * score_bytes / machine.memory_rate
    return products + FORWARD_SHARE * moving, 2 * products + (1 - FORWARD_SHARE) * moving


def _loss_head(job: Job, machine: Machine) -> float:
    """Return the seconds of the loss head for a micro batch."""
    logits = job.tokens * job.model.padded_vocab_size // job.tensor_ranks
    rate = machine.flops_per_second(job.precision.dtype) * machine.product_efficiency
    moved = logits * (LOGIT_BYTES if job.kernels.chunked_loss_head else FLOAT_LOGIT_BYTES)
    return 3 * 2 * logits * job.model.hidden_size / rate + moved / machine.memory_rate


def _once_a_step(job: Job, machine: Machine, layers: int, micro_batch_seconds: float) -> dict[str, float]:
    """Return the seconds of work that is done once a step, by purpose, on the first stage, whose backward ends last.

    Replicas sum gradients during the last micro batch's backward, except the last bucket, and gather weights during the
    first micro batch's forward, except the first bucket.
    """
    parallel = job.parallel
    held = first_stage_weights(job.model, parallel, layers)
    elements = sum(weight.elements for weight in held)
    buckets = first_stage_buckets(job.model, parallel, job.data_parallel_size, layers)

    def exposed(terms: list[Term], computing_seconds: float, overlaps: bool | None) -> float:
        """Return the seconds of collectives that no computation hides; it can hide all buckets but one."""
        seconds = _collectives(job, machine, terms)
        hidden = machine.overlap * min(seconds * (1 - 1 / buckets), computing_seconds) if overlaps else 0.0
        return seconds - hidden

    kind = "reduce-scatter" if parallel.use_distributed_optimizer else "all-reduce"
    reduce = Term(job.state_group, kind, "gradients", elements * job.gradient_bytes)
    between = Term("inter_dist_opt", "all-reduce", "gradients", reduce.message_bytes // job.state_ranks)
    once = {"gradient reduction": exposed([reduce, between], 2 / 3 * micro_batch_seconds, parallel.overlap_grad_reduce)}
    if parallel.use_distributed_optimizer:
        gather = Term(job.state_group, "all-gather", "weights", elements * job.element_bytes)
        once["weight gathering"] = exposed([gather], micro_batch_seconds / 3, parallel.overlap_param_gather)
    # Every gradient is set to zero. For the elements that a rank updates, gradients (float32), main weights and states
    # are read; main weights and states are written, and the weights, if their format is narrower.
    states = 2 * state_bytes(held, [weight.elements for weight in held], job.optimizer)
    updated = elements * (3 * 4 + (job.element_bytes if job.element_bytes < 4 else 0)) + states
    once["optimizer"] = (elements * job.gradient_bytes + updated / job.state_ranks) / machine.memory_rate
    once["between steps"] = machine.step_seconds
    matrices = MatrixUpdates(job, 0)
    if matrices.matrices:
        rate = machine.flops_per_second(matrices.dtype) * machine.product_efficiency
        once["orthogonalization"] = matrices.busiest_flops / rate + _collectives(job, machine, matrices.terms(0))
    return once
