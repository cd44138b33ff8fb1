"""The section `optimizer` of a configuration, and the optimizers that it can name; without torch.

A new one is a file with a subclass of `UpdateRule`, and an entry of `OPTIMIZERS`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from megatron_fanformer.errors import broken_fields, did_you_mean
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.muon import Muon
from megatron_fanformer.train.update_rule import AdamW, StateDtype, UpdateRule

LARGEST_BF16_DECAY = 1 - 2**-8
"""Of a state in bf16, whose neighbors are up to 2^-7 apart: nearer to 1, some values round back to what they were."""


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
    def rule(self) -> UpdateRule:
        """Return how weights are updated, with these settings."""
        return OPTIMIZERS[self.name].configured(self)

    def joint_problems(self, parallel: ParallelConfig) -> list[str]:
        """Return the rules that its fields break together, and in a layout, one line each."""
        return [*self._rounding_problems(), *self._instance_problems(parallel)]

    def _rounding_problems(self) -> Iterator[str]:
        decays = [("adam_beta1", "exp_avg_dtype"), ("adam_beta2", "exp_avg_sq_dtype")]
        if self.name == "muon":
            decays.append(("muon_momentum", "exp_avg_dtype"))
        for decay, dtype in decays:
            if getattr(self, dtype) == "bf16" and getattr(self, decay) > LARGEST_BF16_DECAY:
                yield (
                    f"optimizer.{decay} is {getattr(self, decay)} with optimizer.{dtype} bf16, in which a step's decay "
                    f"above {LARGEST_BF16_DECAY} is rounded away; set the former to less, or the latter to fp32"
                )

    def _instance_problems(self, parallel: ParallelConfig) -> list[str]:
        instances = parallel.num_distributed_optimizer_instances
        if self.name != "muon" or instances == 1:
            return []
        return [
            f"parallel.num_distributed_optimizer_instances is {instances} with optimizer.name muon, whose matrices all "
            "data-parallel ranks share; set the former to 1, or the latter to adamw"
        ]


OPTIMIZERS: dict[str, UpdateRule] = {"adamw": AdamW(), "muon": Muon()}
"""The optimizers by `optimizer.name`."""
