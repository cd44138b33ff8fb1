"""The section `optimizer` of a configuration, and the optimizers that it can name; imports no torch.

To add an optimizer, write a subclass of `AdamW` and its torch optimizer, and enter it in `OPTIMIZERS`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_fanformer.errors import broken_fields, did_you_mean
from megatron_fanformer.plan.gradient_buffers import EMBEDDING, OptimizerStates
from megatron_fanformer.plan.matrix_updates import BY_MUON
from megatron_fanformer.runtime.layout import ParallelConfig

if TYPE_CHECKING:  # torch takes seconds to import, and a configuration is checked before that
    import torch

StateDtype = Literal["fp32", "bf16"]
STATE_ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
LARGEST_BF16_DECAY = 1 - 2**-8
"""The largest decay of a state in bf16, whose numbers are up to 2^-7 apart: a larger decay leaves some unchanged."""

Group = Mapping[str, Any]
"""A parameter group, or the entries that `group_entries` returns for one."""


@dataclass(frozen=True)
class AdamW(OptimizerStates):
    """Adam with decoupled decay, as in the authors' implementation, and the base class of the other optimizers.

    Norms, biases and embeddings are not decayed (a tied head is the embedding).

    megatron-core shards the states, clips gradients and keeps main weights for every optimizer, and uses `torch_class`
    instead of its Adam. The distributed optimizer cuts main weights into flat ranges. If an update depends on the shape
    or the name of a weight, the parameter group must say so.
    """

    exp_avg_dtype: StateDtype = "fp32"
    exp_avg_sq_dtype: StateDtype = "fp32"
    resumed_entries: ClassVar[tuple[str, ...]] = ("step",)
    """Entries of parameter groups that a resumed run takes from the checkpoint; its configuration sets all others."""

    def torch_class(self) -> "type[torch.optim.Optimizer] | None":
        """Return the torch optimizer to use instead of megatron-core's Adam; None: use megatron-core's.

        Every state must be a tensor of the weight's shape; everything else belongs in the parameter group. We use our
        Adam if Transformer Engine and apex have no fused Adam for these number formats. Without both, megatron-core
        falls back to torch's AdamW, which keeps a step tensor in every state: the distributed optimizer would load one
        shared tensor into all states, which would advance once per parameter, and the run would silently go wrong.
        """
        import megatron.core.optimizer as megatron_optimizer

        from megatron_fanformer.train.torch_optimizers import Adam, with_bf16_moments

        if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
            return Adam
        formats = {self.exp_avg_dtype, self.exp_avg_sq_dtype}
        if formats == {"fp32"}:
            return None
        # With only one moment in bf16, Transformer Engine's step makes float32 copies of that moment for all weights at
        # once; ours copies it block by block.
        return with_bf16_moments(megatron_optimizer.Adam) if formats == {"bf16"} else Adam

    def connect(self, config: Any, optimizer: Any, stages: list[Any]) -> None:
        """Give our Adam, if megatron-core's `optimizer` contains it, the number formats of its states."""
        from megatron_fanformer.model.config import torch_dtype
        from megatron_fanformer.train.torch_optimizers import Adam

        adam = optimizer.optimizer
        if isinstance(adam, Adam):
            names = {name for group in adam.param_groups for name in self.state_names(group)}
            adam.state_dtypes = {name: torch_dtype(self.state_dtype(name)) for name in names}

    def group_entries(self, name: str, dimensions: int) -> Group:
        """Return the entries of a weight's parameter group; weights with equal entries share a group.

        `wd_mult` multiplies the decay and `lr_mult` the learning rate; an optimizer may define more entries.

        Args:
            name: the weight's name in Megatron's modules, with any prefix; `EMBEDDING` for a tied embedding's copy.
            dimensions: 1 for norms and biases, 2 for matrices.
        """
        return {"wd_mult": 0.0} if dimensions == 1 or EMBEDDING in name else {}

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the states of a parameter group's weights; checkpoints use the same names."""
        return ("exp_avg", "exp_avg_sq")

    def state_dtype(self, name: str) -> StateDtype:
        """Return the number format of a state."""
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}.get(name, "fp32")

    def state_bytes(self, name: str, dimensions: int) -> int:
        """Return the bytes of state per element of a weight; for the arguments see `group_entries`."""
        num_bytes = 0
        # A plain loop, because `plan` calls this tens of thousands of times.
        for state in self.state_names(self.group_entries(name, dimensions)):
            num_bytes += STATE_ELEMENT_BYTES[self.state_dtype(state)]
        return num_bytes

    def takes_whole(self, name: str, dimensions: int) -> bool:
        """Return whether the update of one element depends on the whole weight."""
        return False


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon, which orthogonalizes the momentum of each matrix of a layer; AdamW updates all other weights.

    The whole matrix is orthogonalized even if several ranks hold its parts, so every layout trains the same model.
    (megatron-core's default, `blockwise`, trains another model for each tensor parallel size.) [p | g] of a layer's FAN
    maps is one matrix, and so are gate and up together. QKV is three matrices, as in Megatron-LM: the queries of all
    groups, the keys, and the values.
    """

    def torch_class(self) -> "type[torch.optim.Optimizer]":
        """Return Muon, which contains our Adam, even if Transformer Engine or apex has a fused Adam."""
        from megatron_fanformer.train.torch_optimizers import MuonAndAdam

        return MuonAndAdam

    def connect(self, config: Any, optimizer: Any, stages: list[Any]) -> None:
        """Give the torch optimizer its settings, the formats of its states, and the matrices that it updates."""
        from megatron_fanformer.train.torch_optimizers import connect_muon

        super().connect(config, optimizer, stages)
        connect_muon(config, optimizer, stages, self.takes_whole)

    def group_entries(self, name: str, dimensions: int) -> Group:
        """Return the entry `BY_MUON` for matrices of layers, AdamW's entries for all other weights."""
        return {BY_MUON: True} if self.takes_whole(name, dimensions) else super().group_entries(name, dimensions)

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the momentum for Muon's groups, Adam's moments for all others."""
        return ("momentum_buffer",) if BY_MUON in group else super().state_names(group)

    def state_dtype(self, name: str) -> StateDtype:
        """Return the number format of a state; the momentum has that of the first moment."""
        return self.exp_avg_dtype if name == "momentum_buffer" else super().state_dtype(name)

    def takes_whole(self, name: str, dimensions: int) -> bool:
        """Return whether Muon updates a weight: a matrix of a layer. Names from `plan` begin there: mlp.linear_fc1."""
        return dimensions == 2 and (name.startswith(("self_attention.", "mlp.")) or ".layers." in name)


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
    """Number format in which the second moment is kept."""
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
        """The optimizer of this name, with the number formats of this configuration."""
        rule = OPTIMIZERS[self.name]
        return replace(rule, exp_avg_dtype=self.exp_avg_dtype, exp_avg_sq_dtype=self.exp_avg_sq_dtype)

    def joint_problems(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield the broken rules between fields of this section, and between this section and the layout."""
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
