"""The section `optimizer` of a configuration, and the rules by which weights are updated; imports no torch.

A new optimizer is a file with a subclass of `AdamW` and of its torch optimizer, and an entry of `OPTIMIZERS`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_fanformer.errors import broken_fields, did_you_mean
from megatron_fanformer.plan.gradient_buffers import EMBEDDING, OptimizerStates
from megatron_fanformer.plan.matrix_updates import BY_MUON
from megatron_fanformer.runtime.layout import ParallelConfig

if TYPE_CHECKING:  # torch takes seconds to import, and a configuration is checked before
    import torch

StateDtype = Literal["fp32", "bf16"]
STATE_ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
LARGEST_BF16_DECAY = 1 - 2**-8
"""Of a state in bf16, whose numbers are up to 2^-7 apart: nearer to 1, some values round back to themselves."""

Group = Mapping[str, Any]
"""A parameter group, or the entries that `group_of` returns for one."""


@dataclass(frozen=True)
class AdamW(OptimizerStates):
    """The update of weights and its states: Adam with decoupled decay, as the reference has it.

    Norms, biases and embeddings are not decayed (a tied head is the embedding). Other optimizers override what differs.

    megatron-core shards, clips and keeps main weights for any of them, with `torch_class` in the place of its Adam.
    The distributed optimizer cuts main weights into flat ranges: what an update has to know of a weight's shape or name
    must stand in its parameter group.
    """

    exp_avg_dtype: StateDtype = "fp32"
    exp_avg_sq_dtype: StateDtype = "fp32"
    resumed_entries: ClassVar[tuple[str, ...]] = ("step",)
    """Entries that a resumed run takes from a checkpoint's parameter groups; its configuration sets the others."""

    def torch_class(self) -> "type[torch.optim.Optimizer] | None":
        """Return the torch optimizer that takes the place of megatron-core's Adam; None leaves that one.

        It keeps its state in tensors of the weight's shape, and everything else in the parameter group. Ours stands in
        where neither Transformer Engine nor apex brings a fused one for these moments: with torch's AdamW, megatron-
        core's distributed optimizer loads the *same* step tensor into every parameter's state; it then advances once
        per parameter, and a resumed run silently goes wrong.
        """
        import megatron.core.optimizer as megatron_optimizer

        from megatron_fanformer.train.torch_optimizers import Adam, with_bf16_moments

        if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
            return Adam
        formats = {self.exp_avg_dtype, self.exp_avg_sq_dtype}
        if formats == {"fp32"}:
            return None
        # Of one moment in bf16 the Engine's step makes float32 copies of all weights' at once; ours of a block.
        return with_bf16_moments(megatron_optimizer.Adam) if formats == {"bf16"} else Adam

    def connect(self, config: Any, optimizer: Any, stages: list[Any]) -> None:
        """Give the torch optimizer of megatron-core's `optimizer` its settings: the formats of states to our Adam."""
        from megatron_fanformer.model.config import torch_dtype
        from megatron_fanformer.train.torch_optimizers import Adam

        adam = optimizer.optimizer
        if isinstance(adam, Adam):
            names = {name for group in adam.param_groups for name in self.states(group)}
            adam.state_dtypes = {name: torch_dtype(self.state_dtype(name)) for name in names}

    def group_of(self, name: str, dimensions: int) -> Group:
        """Return the entries that set a weight's parameter group apart; weights with the same ones share a group.

        `wd_mult` multiplies the decay, `lr_mult` the learning rate; others are the rule's own.

        Args:
            name: as Megatron's modules name it, with any prefix; a tied embedding's second copy goes by `EMBEDDING`.
            dimensions: 1 of norms and biases, 2 of matrices.
        """
        return {"wd_mult": 0.0} if dimensions == 1 or EMBEDDING in name else {}

    def states(self, group: Group) -> tuple[str, ...]:
        """Return the names of a weight's states in a parameter group, as checkpoints have them."""
        return ("exp_avg", "exp_avg_sq")

    def state_dtype(self, name: str) -> StateDtype:
        """Return the number format of a state."""
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}.get(name, "fp32")

    def state_bytes(self, name: str, dimensions: int) -> int:
        """Return the bytes of state of each element of a weight; arguments as for `group_of`."""
        number = 0
        for state in self.states(self.group_of(name, dimensions)):  # a search calls it tens of thousands of times
            number += STATE_ELEMENT_BYTES[self.state_dtype(state)]
        return number

    def takes_whole(self, name: str, dimensions: int) -> bool:
        """Return whether the update of an element depends on all of its weight."""
        return False


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon orthogonalizes the momentum of each matrix of a layer; all other weights are updated as by AdamW.

    The whole matrix is orthogonalized, whatever ranks hold it, so every layout trains the same model (megatron-core's
    default, `blockwise`, is another model for each tensor parallel size). [p | g] of a layer's FAN maps is one matrix,
    and so are gate and up together; QKV is three, as in Megatron-LM: the queries of all groups, the keys, the values.
    """

    def torch_class(self) -> "type[torch.optim.Optimizer]":
        """Return Muon's, with an Adam of ours, also where Transformer Engine or apex brings one."""
        from megatron_fanformer.train.torch_optimizers import MuonAndAdam

        return MuonAndAdam

    def connect(self, config: Any, optimizer: Any, stages: list[Any]) -> None:
        """Give the torch optimizer its settings and formats, and the matrices with the ranks that hold their parts."""
        from megatron_fanformer.train.torch_optimizers import connect_muon

        super().connect(config, optimizer, stages)
        connect_muon(config, optimizer, stages, self.takes_whole)

    def group_of(self, name: str, dimensions: int) -> Group:
        """Return the mark of the matrices of layers, or Adam's entries."""
        return {BY_MUON: True} if self.takes_whole(name, dimensions) else super().group_of(name, dimensions)

    def states(self, group: Group) -> tuple[str, ...]:
        """Return the momentum, or Adam's moments."""
        return ("momentum_buffer",) if BY_MUON in group else super().states(group)

    def state_dtype(self, name: str) -> StateDtype:
        """Return the number format of a state; the momentum is a first moment."""
        return self.exp_avg_dtype if name == "momentum_buffer" else super().state_dtype(name)

    def takes_whole(self, name: str, dimensions: int) -> bool:
        """Return whether it is a matrix of a layer."""
        in_layer = name.startswith(("self_attention.", "mlp.")) or ".layers." in name
        return dimensions == 2 and in_layer


OPTIMIZERS: dict[str, AdamW] = {"adamw": AdamW(), "muon": Muon()}
"""The optimizers by `optimizer.name`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer's settings; the defaults are the paper's recipe for 1B."""

    name: str = "adamw"
    """The optimizer: `adamw`, or `muon` for the matrices of layers and AdamW for all other weights
    (docs/recipe.md#muon). A run keeps the one that it began with."""
    lr: float = 4e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled decay of linear weights."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-5
    """Added to the root of the second moment."""
    exp_avg_dtype: StateDtype = "fp32"
    """Number format in which the first moment is kept, and Muon's momentum. In `bf16` each takes 2 bytes a weight
    less; steps are still computed in float32 (docs/parallelism.md#moments-in-bf16)."""
    exp_avg_sq_dtype: StateDtype = "fp32"
    """The same of the second moment."""
    muon_momentum: float = 0.95
    """Decay of Muon's momentum, which is Nesterov's."""
    muon_extra_scale_factor: float = 0.2
    """Muon's update is multiplied by this, and by the root of the matrix's longer side; at 0.2 it is as large as
    AdamW's, so that one rate serves both."""
    clip_grad: float = 1.0
    """The global gradient norm is clipped to this; 0 does not clip."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        lines = []
        if self.name not in OPTIMIZERS:
            remedy = did_you_mean(self.name.lower(), OPTIMIZERS, f"name {', '.join(OPTIMIZERS)}")
            lines.append(f"optimizer.name is {self.name!a}, which is no optimizer here; {remedy}")
        broken = partial(broken_fields, "optimizer", self)
        return [
            *lines,
            *broken("not be negative", lambda value: value < 0, "lr", "weight_decay", "clip_grad"),
            *broken("lie in [0, 1)", lambda value: not 0 <= value < 1, "adam_beta1", "adam_beta2", "muon_momentum"),
            *broken("be above 0", lambda value: value <= 0, "adam_eps", "muon_extra_scale_factor"),
        ]

    @property
    def rule(self) -> AdamW:
        """The rule by which weights are updated, with the states' number formats."""
        formats = {"exp_avg_dtype": self.exp_avg_dtype, "exp_avg_sq_dtype": self.exp_avg_sq_dtype}
        return replace(OPTIMIZERS[self.name], **formats)

    def joint_problems(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield the rules that its fields break together, and in a layout, one line each."""
        decays = [("adam_beta1", "exp_avg_dtype"), ("adam_beta2", "exp_avg_sq_dtype")]
        if self.name == "muon":
            decays.append(("muon_momentum", "exp_avg_dtype"))
        for decay, dtype in decays:
            if getattr(self, dtype) == "bf16" and getattr(self, decay) > LARGEST_BF16_DECAY:
                yield (
                    f"optimizer.{decay} is {getattr(self, decay)} with optimizer.{dtype} bf16, in which a step's decay "
                    f"above {LARGEST_BF16_DECAY} is rounded away; set the former to less, or the latter to fp32"
                )
        instances = parallel.num_distributed_optimizer_instances
        if self.name == "muon" and instances > 1:
            yield (
                f"parallel.num_distributed_optimizer_instances is {instances} with optimizer.name muon, whose matrices "
                "all data-parallel ranks share; set the former to 1, or the latter to adamw"
            )
