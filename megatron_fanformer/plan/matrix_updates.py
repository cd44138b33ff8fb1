"""Updates of whole matrices, as Muon's are: the rank that computes each, its communication and memory.

A stage's tensor parallel and data parallel ranks hold a matrix in parts. Each matrix has one rank that owns it: it gets
the parts of the others, computes the update of the whole, and sends their parts back. So ranks share the work, and the
update is that of the whole matrix in every layout. Without the distributed optimizer replicas have the same parts, and
the tensor parallel ranks alone share the work.

Ranks are numbered as in megatron-core's group of both, tensor parallel ones first.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.plan.gradient_buffers import (
    Weight,
    chunks,
    gradient_buffer,
    layer_weights,
    limits_buckets,
    weights,
)
from megatron_fanformer.plan.job import ELEMENT_BYTES, Job

MAIN_BYTES = 4  # of an element of a momentum, and of its sums
NEWTON_SCHULZ_STEPS = 5
BY_MUON = "is_orthogonalized"
"""Entry of the parameter groups of matrices that Muon updates."""


class Term(NamedTuple):
    """Collectives of one purpose."""

    group: str
    kind: str
    purpose: str
    message_bytes: int
    """Bytes of all calls together."""
    calls: int = 1

    def times(self, number: int) -> "Term":
        """Return the same, that many times over."""
        return self._replace(message_bytes=self.message_bytes * number, calls=self.calls * number)


class Matrix(NamedTuple):
    """One matrix of a stage."""

    rows: int
    columns: int
    part_rows: tuple[int, ...]  # of the parts that are orthogonalized each by itself
    is_replicated: bool  # whether every tensor parallel rank holds it whole

    @property
    def flops(self) -> int:
        """Return the FLOPs of its Newton-Schulz steps."""
        return sum(newton_schulz_flops(rows, self.columns) for rows in self.part_rows)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of the three products of each step."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * 2 * (2 * short * short * long + short**3)


def owners(flops: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each matrix: the largest first, each to the rank with the least."""
    loads, owner = [(0, rank) for rank in range(ranks)], [0] * len(flops)
    for matrix in sorted(range(len(flops)), key=lambda matrix: (-flops[matrix], matrix)):
        load, owner[matrix] = loads[0]
        heapq.heapreplace(loads, (load + flops[matrix], owner[matrix]))
    return owner


def rounds(owner: Sequence[int]) -> list[list[int]]:
    """Return the matrices by round, of which each rank owns one at most: those that are held at a time."""
    by_round: list[list[int]] = []
    owned = Counter[int]()
    for matrix, rank in enumerate(owner):
        if owned[rank] == len(by_round):
            by_round.append([])
        by_round[owned[rank]].append(matrix)
        owned[rank] += 1
    return by_round


class MatrixUpdates:
    """The matrices of a stage, in the order of its modules, and who owns them."""

    def __init__(self, job: Job, stage: int) -> None:
        parallel = job.parallel
        self._job, self._stage, self._tensor = job, stage, job.tensor_ranks
        self.dtype = "fp32" if job.on_cpu else "bf16"  # of the products, and of the exchanged parts
        self._element_bytes = ELEMENT_BYTES[self.dtype]
        self._replicas = job.state_ranks
        self._group, self._ranks = "tp" if self._replicas == 1 else "tp_dp_cp", self._tensor * self._replicas
        self._matrix_of = {
            weight: _matrix(job.model, weight, self._tensor)
            for weight in layer_weights(job.model, parallel)
            if job.optimizer.takes_whole(weight.name, weight.dimensions)
        }
        held = chunks(job.model, parallel, stage) if self._matrix_of else []
        self._chunks = [(chunk, weights(job.model, parallel, chunk)) for chunk in held]
        every = [weight for _, chunk_weights in self._chunks for weight in chunk_weights]
        self.matrices = [self._matrix_of[weight] for weight in every if weight in self._matrix_of]
        flops = {matrix: matrix.flops for matrix in set(self.matrices)}
        self._flops = [flops[matrix] for matrix in self.matrices]
        self._owner = owners(self._flops, self._ranks)

    @property
    def busiest_flops(self) -> int:
        """Return the FLOPs of the rank that has most to compute."""
        loads = Counter[int]()
        for flops, rank in zip(self._flops, self._owner, strict=True):
            loads[rank] += flops
        return max(loads.values(), default=0)

    def terms(self, rank: int) -> Iterator[Term]:
        """Yield the sends of a rank of the stage: its parts of matrices to their owners, and the parts of its matrices
        to the ranks that hold them.
        """
        if not self.matrices or self._ranks == 1:
            return
        rank %= self._ranks  # replicas that share nothing do alike
        tensor, replica = rank % self._tensor, rank // self._tensor
        sent = returned = 0
        for matrix, elements, owner in zip(self.matrices, self._pieces(replica), self._owner, strict=True):
            if tensor == 0 or not matrix.is_replicated:
                sent += elements
            if owner == rank:
                returned += matrix.rows * matrix.columns * (self._tensor if matrix.is_replicated else 1)
        calls = len(rounds(self._owner))
        yield Term(self._group, "all-to-all", "gradients of matrices", sent * self._element_bytes, calls)
        yield Term(self._group, "all-to-all", "updates of matrices", returned * self._element_bytes, calls)

    def working_bytes(self) -> int:
        """Return the most bytes that the first rank holds beside states: of a round's matrices its parts of the
        momenta's sums; of the one that it owns the whole, two steps of it, and two products with itself.
        """
        pieces, most = list(self._pieces(0)), 0
        for numbers in rounds(self._owner):
            held = MAIN_BYTES * sum(pieces[number] for number in numbers)
            for matrix in (self.matrices[number] for number in numbers if self._owner[number] == 0):
                copies = 2 + (self._ranks > 1)
                short = max(min(rows, matrix.columns) for rows in matrix.part_rows)
                held += self._element_bytes * (copies * matrix.rows * matrix.columns + 2 * short * short)
            most = max(most, held)
        return most

    def _pieces(self, replica: int) -> Iterator[int]:
        """Yield the elements that a data parallel rank holds of a tensor parallel rank's part of each matrix."""
        job = self._job
        for chunk, held in self._chunks:
            is_limited = limits_buckets(job.parallel, self._stage, chunk)
            buffer = gradient_buffer(held, job.parallel, job.data_parallel_size, is_limited=is_limited)
            shares = buffer.shard_elements(self._replicas, replica) if self._replicas > 1 else buffer.elements
            for weight, elements in zip(held, reversed(shares), strict=True):
                if weight in self._matrix_of:
                    yield elements


def _matrix(model: FANformerConfig, weight: Weight, tensor: int) -> Matrix:
    tensor_of_layer = model.placement.tensor(weight.name)
    *_, columns = (size.value(model) for size in tensor_of_layer.shape)
    rows = weight.elements * (1 if weight.is_partial else tensor) // columns  # of both FAN maps, where there are two
    heads_of_group = model.num_attention_heads // model.query_groups
    of_group = tensor_of_layer.rows_of_group(heads_of_group, model.kv_channels)
    return Matrix(rows, columns, tuple(model.query_groups * part for part in of_group) or (rows,), weight.is_partial)
