"""Updates of whole matrices, as Muon computes them: the rank that updates each matrix, communication and memory.

A stage's tensor parallel and data parallel ranks hold a matrix in parts. One of these ranks, the matrix's owner, gets
all parts of the gradient, computes the update of the whole matrix, and sends each rank its part of the update. So ranks
share the work, and every layout gives the same update. Without the distributed optimizer, replicas have the same parts,
and the tensor parallel ranks alone share the work.

Ranks are numbered as in megatron-core's group of tensor and data parallel ranks: tensor parallel ones are innermost.
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

MAIN_BYTES = 4  # of an element of a gradient with Nesterov's momentum, which is in float32
NEWTON_SCHULZ_STEPS = 5
BY_MUON = "is_orthogonalized"  # entry of the parameter groups of matrices that Muon updates


class Term(NamedTuple):
    """The collectives of one purpose."""

    group: str
    kind: str
    purpose: str
    message_bytes: int  # of all calls together
    calls: int = 1

    def times(self, number: int) -> "Term":
        """Return the term repeated `number` times."""
        return self._replace(message_bytes=self.message_bytes * number, calls=self.calls * number)


class Matrix(NamedTuple):
    """One matrix of a stage."""

    rows: int
    columns: int
    part_rows: tuple[int, ...]  # of each part that is orthogonalized by itself
    is_replicated: bool  # whether every tensor parallel rank holds it whole

    @property
    def flops(self) -> int:
        """Return the FLOPs of the matrix's Newton-Schulz steps."""
        return sum(newton_schulz_flops(rows, self.columns) for rows in self.part_rows)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of the Newton-Schulz steps of a matrix, three products in each."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * 2 * (2 * short * short * long + short**3)


def owners(flops: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each matrix: from the most FLOPs down, each goes to the rank with the fewest FLOPs so far."""
    loads = [(0, rank) for rank in range(ranks)]  # a heap of the ranks' FLOPs so far
    owner = [0] * len(flops)
    for matrix in sorted(range(len(flops)), key=lambda matrix: (-flops[matrix], matrix)):
        load, owner[matrix] = loads[0]  # the least FLOPs, and their rank
        heapq.heapreplace(loads, (load + flops[matrix], owner[matrix]))
    return owner


def rounds(owner: Sequence[int]) -> list[list[int]]:
    """Group matrices into rounds that are updated one after the other; a rank owns at most one matrix of a round."""
    by_round: list[list[int]] = []
    owned = Counter[int]()
    for matrix, rank in enumerate(owner):
        if owned[rank] == len(by_round):
            by_round.append([])
        by_round[owned[rank]].append(matrix)
        owned[rank] += 1
    return by_round


class MatrixUpdates:
    """The matrices of a stage, in the order of its modules, and the rank that owns each."""

    def __init__(self, job: Job, stage: int) -> None:
        parallel = job.parallel
        self._job, self._stage, self._tensor = job, stage, job.tensor_ranks
        self.dtype = "fp32" if job.on_cpu else "bf16"  # of the products, and of the exchanged parts
        self._element_bytes = ELEMENT_BYTES[self.dtype]
        self._replicas = job.state_ranks  # the replicas that share the work
        self._ranks = self._tensor * self._replicas
        self._group = "tp" if self._replicas == 1 else "tp_dp_cp"
        self._matrix_of = {
            weight: _matrix(job.model, weight, self._tensor)
            for weight in layer_weights(job.model, parallel)
            if job.optimizer.takes_whole(weight.name, weight.dimensions)
        }
        stage_chunks = chunks(job.model, parallel, stage) if self._matrix_of else []
        self._chunks = [(chunk, weights(job.model, parallel, chunk)) for chunk in stage_chunks]
        stage_weights = (weight for _, chunk_weights in self._chunks for weight in chunk_weights)
        self.matrices = [self._matrix_of[weight] for weight in stage_weights if weight in self._matrix_of]
        flops = {matrix: matrix.flops for matrix in set(self.matrices)}  # all layers have equal matrices
        self._flops = [flops[matrix] for matrix in self.matrices]
        self._owner = owners(self._flops, self._ranks)

    @property
    def busiest_flops(self) -> int:
        """Return the FLOPs of the matrices of the rank that has the most."""
        loads = Counter[int]()
        for flops, rank in zip(self._flops, self._owner, strict=True):
            loads[rank] += flops
        return max(loads.values(), default=0)

    def terms(self, rank: int) -> Iterator[Term]:
        """Yield the sends of a rank: gradients of its parts of matrices to the matrices' owners, and updates of the
        matrices that it owns to the ranks that hold parts of them.
        """
        if not self.matrices or self._ranks == 1:
            return
        rank %= self._ranks  # replicas with the same parts do the same
        tensor, replica = rank % self._tensor, rank // self._tensor
        sent = returned = 0
        for matrix, elements, owner in zip(self.matrices, self._pieces(replica), self._owner, strict=True):
            if tensor == 0 or not matrix.is_replicated:  # the first rank alone sends a gradient that all ranks have
                sent += elements
            if owner == rank:
                returned += matrix.rows * matrix.columns * (self._tensor if matrix.is_replicated else 1)
        calls = len(rounds(self._owner))
        yield Term(self._group, "all-to-all", "gradients of matrices", sent * self._element_bytes, calls)
        yield Term(self._group, "all-to-all", "updates of matrices", returned * self._element_bytes, calls)

    def working_bytes(self) -> int:
        """Return the most bytes that the first rank needs in a round, beside the optimizer's states: for its parts of
        the round's gradients, for copies of the matrix that it owns, and for two products of that matrix with itself.
        """
        pieces = list(self._pieces(0))  # elements by the matrix's number
        copies = 2 if self._ranks == 1 else 3  # before and after a Newton-Schulz step; as other ranks sent the matrix
        most = 0
        for numbers in rounds(self._owner):
            round_bytes = MAIN_BYTES * sum(pieces[number] for number in numbers)
            for matrix in (self.matrices[number] for number in numbers if self._owner[number] == 0):
                short = max(min(rows, matrix.columns) for rows in matrix.part_rows)
                round_bytes += self._element_bytes * (copies * matrix.rows * matrix.columns + 2 * short * short)
            most = max(most, round_bytes)
        return most

    def _pieces(self, replica: int) -> Iterator[int]:
        """Yield, for each matrix, how many elements of a tensor parallel rank's part the replica `replica` updates."""
        job = self._job
        for chunk, held in self._chunks:
            is_limited = limits_buckets(job.parallel, self._stage, chunk)
            buffer = gradient_buffer(held, job.parallel, job.data_parallel_size, is_limited=is_limited)
            shares = buffer.shard_elements(self._replicas, replica) if self._replicas > 1 else buffer.elements
            for weight, elements in zip(held, reversed(shares), strict=True):  # a buffer has the last weight first
                if weight in self._matrix_of:
                    yield elements


def _matrix(model: FANformerConfig, weight: Weight, ranks: int) -> Matrix:
    """Return the matrix of which `weight` is the part of one of `ranks` tensor parallel ranks."""
    tensor_of_layer = model.placement.tensor(weight.name)
    *_, columns = (size.value(model) for size in tensor_of_layer.shape)
    # The weight may hold the rows of two FAN maps, of X_F and of the values, where `shape` has those of one.
    rows = weight.elements * (1 if weight.is_partial else ranks) // columns
    heads_of_group = model.num_attention_heads // model.query_groups
    group_rows = tensor_of_layer.rows_of_group(heads_of_group, model.kv_channels)
    part_rows = tuple(model.query_groups * part for part in group_rows) or (rows,)  # Q, K and V apart
    return Matrix(rows, columns, part_rows, weight.is_partial)
