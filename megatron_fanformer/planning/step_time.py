"""The seconds of a training step of a job on a machine, by formula: predicted, not measured.

A step of a pipeline of P stages with v chunks each, where a micro batch takes stage i t_i seconds (forward, backward
and what is recomputed), and M micro batches:

    seconds = M max(t) + (sum(t) - max(t)) / v + sends + gradients + optimizer + weights + orthogonalization

The first two are 1F1B's time, and the interleaved schedule's: one micro batch fills and drains the pipeline, in steps
of a chunk. t_i adds up operations (`roofline`): FLOPs at the rate that large products reach, bytes at the memory's, and
a part of the shorter of the two besides, so that a product with few FLOPs a byte is slower; and collectives
(`layer_traffic`), as rings: n - 1 hops and (n - 1) / n of the tensor's bytes, twice in an all-reduce; but in an
all-to-all each rank's bytes for other domains go through its own adapter.

docs/planning.md has the rest of the model, and how far off published runs are. Left out: the sum of a tied embedding's
gradients between stages, collectives of a few bytes, evaluation, checkpoints and reading data.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.planning import roofline
from megatron_fanformer.planning.flops import training_flops_per_token
from megatron_fanformer.planning.gradient_buffers import (
    GRADIENT_BYTES,
    first_stage_buckets,
    first_stage_weights,
    state_bytes,
)
from megatron_fanformer.planning.job import Job
from megatron_fanformer.planning.layer_traffic import (
    Term,
    embedding_terms,
    head_terms,
    layer_backward,
    layer_forward,
    recomputed,
    recomputed_layers,
)
from megatron_fanformer.planning.machines import Machine
from megatron_fanformer.planning.matrix_updates import MatrixUpdates
from megatron_fanformer.planning.roofline import Operation, Work

FLASH_BACKWARD = 5 / 4  # flash attention's backward computes the scores again: five products in place of four
RING_OPERATIONS = 3  # of each of the Engine's ring steps: attention to the keys received, correcting sums and output
CAST_BYTES = 2 + 1 + 1  # FP8: an element is read in bf16, and written as it is and transposed
SCALE_BYTES = 2  # and read once more before, for a scale of the present tensor's own

TENSOR, CONTEXT, PIPELINE, REPLICAS = "tp", "cp", "pp", "dp_cp"
IN_WORDS = {TENSOR: "tensor parallel", CONTEXT: "context parallel"}
EXPOSED = {
    TENSOR: ("tensor parallel communication",),
    CONTEXT: ("context parallel communication",),
    PIPELINE: ("pipeline sends",),
    REPLICAS: ("gradient reduction", "weight gathering"),
}


@dataclass(frozen=True, kw_only=True)
class Software:
    """What other trainers do in a step that this one does not, or does otherwise; the defaults are this project's.

    Published runs are compared with the formula in their own software's way.
    """

    overlaps_tensor_parallel: bool = False
    """Whether collectives of tensor parallel ranks run beside products throughout, as Transformer Engine's user buffers
    let them."""
    is_fully_sharded: bool = False
    """FSDP: each micro batch gathers a layer's weights before its forward and before its backward, and reduces and
    scatters its gradients."""
    recomputes_operations: bool = False
    """torchtitan's selective checkpointing by operations: attention and every second product are kept (in FP8 no
    product, which its list does not name), all else is computed again."""


OWN = Software()


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


def step_time(job: Job, machine: Machine, *, software: Software = OWN) -> StepTime:
    """Return what a step takes.

    Raises:
        ValueError: the layers do not divide evenly over the stages.
        InputError: the machine does not have a number format that the job uses.
    """
    seconds = _Seconds(job, machine, software)
    stages = seconds.stages()
    longest = max(stages, key=_Parts.total)
    spent = _Parts()
    spent.add(longest, job.num_micro_batches)
    if len(stages) > 1:
        fill = sum(stage.total() for stage in stages) - longest.total()
        spent.add({"pipeline bubble": fill / job.parallel.virtual_stages, "pipeline sends": seconds.sends()})
    spent.add(seconds.update())
    parts = {name: value for name, value in spent.items() if value}
    total = sum(parts.values())
    tokens_per_second = job.tokens_per_step / total
    peak = machine.flops_per_second(job.precision.dtype) * job.world_size
    return StepTime(
        seconds=total,
        relative_error=machine.error_in("fp8" if job.precision.fp8 else job.precision.dtype),
        parts=parts,
        exposed={
            group: value for group, names in EXPOSED.items() if (value := sum(parts.get(name, 0.0) for name in names))
        },
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


def _every_second_product(model: FANformerConfig) -> float:
    """Return the share of FLOPs of keys, attention output and the second half of the gated MLP's first map: the second,
    fourth and sixth of a Transformer layer's products in the order queries, keys, values, output, gate, up, down.
    """
    queries, keys = model.num_attention_heads * model.kv_channels, model.query_groups * model.kv_channels
    inner = model.ffn_hidden_size
    return (keys + queries + inner) / (2 * queries + 2 * keys + 3 * inner)


class _Parts(dict[str, float]):
    """Seconds by purpose."""

    def add(self, more: Mapping[str, float], times: int = 1) -> None:
        """Add other seconds, so many times."""
        for name, seconds in more.items():
            self[name] = self.get(name, 0.0) + times * seconds

    def total(self) -> float:
        """Return the sum over all purposes."""
        return sum(self.values())


class _Seconds:
    """The seconds of the parts of a job on a machine."""

    def __init__(self, job: Job, machine: Machine, software: Software) -> None:
        self._job, self._machine, self._software = job, machine, software
        self._groups = job.group_sizes(0)
        parallel = job.parallel
        nearest = parallel.tensor_model_parallel_size
        self._strides = {TENSOR: 1, CONTEXT: nearest, REPLICAS: nearest}
        self._strides |= {"tp_dp_cp": 1, "intra_dp_cp": nearest, "inter_dist_opt": nearest * job.state_ranks}
        self._strides[PIPELINE] = nearest * parallel.context_parallel_size * job.data_parallel_size
        self._layer_forward = self._layer_backward = 0.0  # of one layer, without what it recomputes

    # -- a micro batch

    def stages(self) -> list[_Parts]:
        """Return seconds of a micro batch by purpose, of each pipeline stage."""
        job = self._job
        segments = job.parallel.segments(job.model.num_layers)
        if segments is None:
            raise ValueError(f"{job.model.num_layers} layers do not divide over {job.stages} stages")
        layer, again = self._layer()
        of_stages = list(zip(*segments, strict=True))
        alike = {chunks: self._stage(chunks, layer, again) for chunks in dict.fromkeys(of_stages)}
        stages = [alike[chunks] for chunks in of_stages]
        for end, more in ((0, self._embedding()), (-1, self._head())):
            stages[end] = _Parts(stages[end])
            stages[end].add(more)
        return stages

    def _stage(self, layers_of_chunks: tuple[int, ...], layer: _Parts, again: float) -> _Parts:
        stage = _Parts()
        stage.add(layer, sum(layers_of_chunks))
        if again:
            stage.add(
                {"recomputation": again}, sum(recomputed_layers(self._job, number) for number in layers_of_chunks)
            )
        return stage

    def _layer(self) -> tuple[_Parts, float]:
        """Return seconds of a layer by purpose; and of what of it is recomputed."""
        job = self._job
        operations = roofline.layer_operations(
            job.model,
            tokens=job.tokens,
            element_bytes=job.element_bytes,
            ranks=job.tensor_ranks,
            sequence_parallel=job.parallel.sequence_parallel,
            fan_form=job.parallel.fan_form,
            has_plain_attention=job.keeps_scores,
        )
        forward, backward = _Parts(), _Parts()
        for operation in operations:
            forward.add({operation.kind: self._work(operation, operation.forward)})
            backward.add({operation.kind: self._work(operation, operation.backward, is_backward=True)})
        self._communicate(forward, list(layer_forward(job)), sum(each.forward.kernels for each in operations))
        self._communicate(backward, list(layer_backward(job)), sum(each.backward.kernels for each in operations))
        self._layer_forward, self._layer_backward = forward.total(), backward.total()
        again = forward.total() if job.parallel.recompute_granularity == "full" else 0.0
        if job.parallel.recompute_granularity == "selective" or self._software.recomputes_operations:
            again = sum(
                self._recomputed(operation) * self._work(operation, operation.forward) for operation in operations
            )
            terms = list(recomputed(job))
            again += sum(map(self._collective, self._sent_round(terms) if job.has_ring else terms))
        forward.add(backward)
        return forward, again

    def _recomputed(self, operation: Operation) -> float:
        """Return the share of an operation's forward that selective recomputation runs again."""
        job = self._job
        if self._software.recomputes_operations:
            if operation.kind == "matrix products":
                return 1.0 if self._is_in_fp8(operation) else _every_second_product(job.model)
            return float(operation.kind == "element-wise")
        if not operation.module or not job.parallel.recomputes(operation.module):
            return 0.0
        if operation.module == "layernorm" and job.layers == "transformer_engine":
            return 0.0 if job.fuses_input_norm else 0.5  # one of the two norms
        return 1.0

    def _communicate(self, direction: _Parts, terms: list[Term], kernels: int) -> None:
        """Add what a direction communicates, less what is hidden; and how much longer the host takes to launch it all.

        Linear layers start two of a backward's collectives beside their products, which they slow by about as much:
        that hides nothing.
        """
        machine = self._machine
        spent = dict.fromkeys(IN_WORDS, 0.0)
        if self._job.has_ring:
            terms = self._sent_round(terms)
            kernels += RING_OPERATIONS * (self._groups[CONTEXT] - 1)
        for term in terms:
            spent[term.group] += self._collective(term)
        if self._software.overlaps_tensor_parallel:
            spent[TENSOR] -= machine.overlap * min(spent[TENSOR], direction["matrix products"])
        if self._job.has_ring:
            spent[CONTEXT] -= machine.overlap * min(spent[CONTEXT], direction["attention"])  # a ring beside it
        direction.add({f"{IN_WORDS[group]} communication": value for group, value in spent.items() if value})
        if self._job.kernels.cuda_graph_impl == "none":
            launches = kernels + sum(term.calls for term in terms if self._groups[term.group] > 1)
            beside = direction.total() if machine.launches_ahead else 0.0
            direction.add({"host": max(0.0, launches * machine.launch_seconds - beside)})

    def _sent_round(self, terms: Iterable[Term]) -> list[Term]:
        """Return the terms with the Engine's ring in place of its collectives over context parallel ranks.

        n - 1 times a rank sends keys and values on; in backward their gradients too, n - 1 times of n exchanges.
        """
        ranks = self._groups[CONTEXT]
        found = []
        for term in terms:
            if term.group == CONTEXT:
                sent, is_backward = term.message_bytes // ranks * (ranks - 1), term.kind == "reduce-scatter"
                calls, sent = (ranks, 2 * sent) if is_backward else (ranks - 1, sent)
                term = Term(CONTEXT, "send", term.purpose, sent, calls)
            found.append(term)
        return found

    def _embedding(self) -> dict[str, float]:
        moved = roofline.EMBEDDING_PASSES * self._job.hidden_bytes
        return {
            "element-wise": moved / self._machine.memory_rate,
            "tensor parallel communication": sum(map(self._collective, embedding_terms(self._job))),
        }

    def _head(self) -> dict[str, float]:
        job = self._job
        head = roofline.head_operation(
            job.model,
            tokens=job.tokens,
            element_bytes=job.element_bytes,
            ranks=job.tensor_ranks,
            is_chunked=job.kernels.chunked_loss_head,
        )
        computed = sum(self._work(head, work) for work in (head.forward, head.backward))
        return {
            "loss head": computed,
            "tensor parallel communication": sum(map(self._collective, head_terms(job))),
        }

    def _work(self, operation: Operation, work: Work, *, is_backward: bool = False) -> float:
        """Return an operation in one direction: its FLOPs' time and its bytes'."""
        job, machine = self._job, self._machine
        moved, flops = float(work.bytes), float(work.flops)
        dtype: str = job.precision.dtype
        efficiency = machine.product_efficiency
        if operation.kind == "attention" and not job.keeps_scores:
            efficiency, flops = machine.attention_efficiency, flops * (FLASH_BACKWARD if is_backward else 1)
        elif self._is_in_fp8(operation):
            dtype, efficiency = "fp8", machine.fp8_product_efficiency
            of_scale = SCALE_BYTES if job.precision.fp8_recipe == "tensorwise" else 0
            moved += (CAST_BYTES + of_scale) * operation.operands // 2  # an operand a direction
        moving = moved / machine.memory_rate
        if not flops:
            return moving
        computing = flops / (machine.flops_per_second(dtype) * efficiency)
        return max(computing, moving) + machine.unhidden * min(computing, moving)

    def _is_in_fp8(self, operation: Operation) -> bool:
        precision = self._job.precision
        in_bf16 = ("loss head",) if precision.fp8_fan else ("loss head", "FAN map")
        return bool(precision.fp8) and operation.kind == "matrix products" and operation.name not in in_bf16

    def _collective(self, term: Term) -> float:
        return collective_seconds(term, self._groups[term.group], self._strides[term.group], self._machine)

    # -- a step

    def sends(self) -> float:
        """Exposed exchanges between stages, both ways: with 1F1B every one.

        Interleaved, exchanges run beside a chunk's computation while forward and backward take turns. Those of the
        first stage's warm-up and flush, which megatron-core counts so, block (overlap_p2p_comm_warmup_flush is off).
        """
        job, parallel = self._job, self._job.parallel
        exchange = 2 * self._collective(Term(PIPELINE, "send", "", job.boundary_bytes))
        fill = exchange * (job.stages - 1)
        if parallel.virtual_stages == 1:
            return fill + exchange * job.num_micro_batches
        chunks = parallel.virtual_stages * job.num_micro_batches
        blocking = min(chunks, 2 * (job.stages - 1) + (parallel.virtual_stages - 1) * job.stages)
        return fill + exchange * (blocking + (1 - self._machine.overlap) * (chunks - blocking))

    def update(self) -> dict[str, float]:
        """Return what comes once a step, on the first stage, whose backward is the last to end.

        Replicas sum gradients beside the backward of the last micro batch, all but the last bucket; and gather weights
        beside the first forward, all but the first.
        """
        job, parallel = self._job, self._job.parallel
        layers = (parallel.layers_per_stage(job.model.num_layers) or [0])[0]
        held = first_stage_weights(job.model, parallel, layers)
        of_each = [weight.elements for weight in held]
        elements, states = sum(of_each), state_bytes(held, of_each, job.optimizer)
        buckets = first_stage_buckets(job.model, parallel, job.data_parallel_size, layers)
        backward = layers * self._layer_backward
        if parallel.virtual_stages > 1:  # each chunk's last backward is of as many micro batches as there are stages
            backward *= min(job.stages, job.num_micro_batches)
        kind = "reduce-scatter" if parallel.use_distributed_optimizer else "all-reduce"
        reduce = Term(job.state_group, kind, "gradients", elements * job.gradient_bytes)
        between = Term("inter_dist_opt", "all-reduce", "gradients", reduce.message_bytes // job.state_ranks)
        gather = Term(job.state_group, "all-gather", "weights", elements * job.element_bytes)
        once = {
            "between steps": self._machine.step_seconds,
            "optimizer": self._optimizer(elements, states),
        }
        if self._software.is_fully_sharded:
            once |= self._sharded(gather, reduce, layers)
        else:
            once["gradient reduction"] = self._beside(
                [reduce, between], buckets, backward, parallel.overlap_grad_reduce
            )
            if parallel.use_distributed_optimizer:
                once["weight gathering"] = self._beside([gather], buckets, backward / 2, parallel.overlap_param_gather)
        once["orthogonalization"] = self._orthogonalization()
        return once

    def _orthogonalization(self) -> float:
        """Return the seconds of updates of whole matrices on the stage that has most: the gradients' norm, before them,
        is of all stages.
        """
        layers = self._job.parallel.layers_per_stage(self._job.model.num_layers) or [0]
        matrices = MatrixUpdates(self._job, layers.index(max(layers)))
        if not matrices.matrices:
            return 0.0
        of_products = self._machine.flops_per_second(matrices.dtype, field="optimizer.name")  # not the weights'
        rate = of_products * self._machine.product_efficiency
        return matrices.busiest_flops / rate + sum(map(self._collective, matrices.longest_terms()))

    def _sharded(self, gather: Term, reduce: Term, layers: int) -> dict[str, float]:
        """Return the exposed seconds of FSDP in a step: a layer's weights are gathered beside the one before it."""
        gathering, reducing = (self._collective(term._replace(calls=layers)) for term in (gather, reduce))
        forward, backward = layers * self._layer_forward, layers * self._layer_backward
        hidden_in_forward = self._machine.overlap * min(gathering, forward)
        hidden_in_backward = self._machine.overlap * min(gathering + reducing, backward)
        of_reduction = reducing / (gathering + reducing) if reducing else 0.0
        times = self._job.num_micro_batches
        return {
            "gradient reduction": times * (reducing - of_reduction * hidden_in_backward),
            "weight gathering": times * (2 * gathering - hidden_in_forward - (1 - of_reduction) * hidden_in_backward),
        }

    def _beside(self, terms: list[Term], buckets: int, window: float, overlaps: bool | None) -> float:
        """Return the exposed seconds of collectives one after the other, in buckets, beside a computation of `window`
        seconds.
        """
        if not overlaps:
            return sum(map(self._collective, terms))
        seconds = sum(self._collective(term._replace(calls=buckets)) for term in terms)
        hidden = min(seconds * (buckets - 1) / buckets, window)
        return seconds - self._machine.overlap * hidden

    def _optimizer(self, elements: int, states: int) -> float:
        """Return the seconds of the update of the rank's share of the weights, and of its gradients zeroed."""
        job = self._job
        copied = job.element_bytes if job.element_bytes < GRADIENT_BYTES else 0
        if job.gradient_bytes < GRADIENT_BYTES:  # they are read once more, and a float32 copy is written
            copied += job.gradient_bytes + GRADIENT_BYTES
        updated = elements * (roofline.UPDATED + copied) + 2 * states  # which are read and written
        moved = elements * job.gradient_bytes + updated / job.state_ranks
        return moved / self._machine.memory_rate
