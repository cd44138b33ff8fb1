"""Two FAN layers in place of the feed-forward network (placement `ffn`), as the two linear maps of megatron-core's MLP.

Source: the encoder layers of the FAN authors' repository (YihongDong/FAN, time series), where two FAN layers replace
the two linear maps, h wide to f and back, with nothing between or after them. "Reasoning is Periodicity?" does not say
how it builds its variant FFN <- FAN; this module is one interpretation (docs/experiments.md#variants).

    [p1 | g1] = W1 x + b1      x1 = [cos p1, sin p1, g1]       W1 has (1 - p_ratio) f rows
    [p2 | g2] = W2 x1 + b2     y = [cos p2, sin p2, g2]        W2 has (1 - p_ratio) h rows

with GELU on g1 and g2 in the original FAN (`activation: gelu`).

cos, sin and GELU act on single features: a tensor parallel rank that owns P1/T periodic and G1/T linear rows of W1
computes the features of x1 from these rows by itself, and owns W2's columns for these features. The ranks' products
with W2 are summed before cos and sin: p2 | g2 is (1 - p_ratio) h wide, while a Transformer's MLP sums outputs h wide.
An all-reduce sums them, or under sequence parallelism a reduce-scatter; each rank then activates its part of s.

Shapes: s sequence, b micro batch, T tensor parallel ranks, h hidden size, f width of x1, k rows of p | g on this rank.
"""

from typing import Any, ClassVar

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.fan_functions import Activation, FANActivation, FANOutput, FANShard
from megatron_fanformer.model.fan_layer import whole_tensor_factory


class FANFeedForwardBackend(LocalSpecProvider):
    """megatron-core's provider of local layers, with FAN layers for the linear maps of its MLP."""

    def __init__(self, fan: FANConfig) -> None:
        self._fan = fan

    def column_parallel_linear(self) -> Any:
        """Return the spec of the first FAN layer."""
        return ModuleSpec(module=FANColumnParallelLinear, params={"fan": self._fan})

    def row_parallel_linear(self) -> Any:
        """Return the spec of the second FAN layer."""
        return ModuleSpec(module=FANRowParallelLinear, params={"fan": self._fan})


def already_activated(x: Tensor) -> Tensor:
    """Return x: megatron-core's MLP needs an activation between its maps, but the first FAN layer has activated x."""
    return x


class _FANLayer:
    """A mix-in, inherited before one of megatron-core's linear layers, that turns this layer into a FAN layer.

    The MLP's `bias` and `skip_bias_add` are ignored: FAN has its own bias, which is added before cos and sin.
    """

    divides_rows: ClassVar[bool]
    """Whether tensor parallel ranks divide the rows of the map; otherwise they divide the columns."""

    def __init__(
        self, input_size: int, output_size: int, *, fan: FANConfig, bias: bool, skip_bias_add: bool, **kwargs: Any
    ) -> None:
        if kwargs["config"].activation_func is not already_activated:
            raise ValueError(
                "the configuration has an activation between the MLP's maps, but placement ffn has none there; build "
                "the model by megatron_fanformer.model.build (stock Megatron-LM cannot build this placement)"
            )
        output = FANOutput.of_width(output_size, fan.p_ratio)
        super().__init__(input_size, output.rows, bias=fan.bias, skip_bias_add=False, **kwargs)  # type: ignore[call-arg]
        tp_group: Any = self.tp_group  # type: ignore[attr-defined]
        x1 = FANOutput.of_width(output_size if self.divides_rows else input_size, fan.p_ratio)  # between the layers
        self.shard = FANShard.of_rank(tp_group.rank(), tp_group.size(), [x1])
        # Neither layer gathers, as on one rank: the first activates this rank's part of x1, the second the sum p2 | g2.
        local_output = self.shard.outputs[0] if self.divides_rows else output
        self.activation = Activation(FANShard(1, 0, (local_output,)), group=None, gelu=fan.activation == "gelu")

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the features [cos p, sin p, g]; the None says that no bias is left to add."""
        pre_sbk, _ = super().forward(x)  # type: ignore[misc]
        (features,) = FANActivation.apply(pre_sbk, self.activation)
        return features, None


class FANColumnParallelLinear(_FANLayer, ColumnParallelLinear):
    """x [s, b, h] (under sequence parallelism gathered from all ranks) -> this rank's features of x1 [s, b, f / T]."""

    divides_rows = True

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the rank's rows as parts of the whole [p | g] map, which is the same in every layout."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        for name in ("weight", "bias"):
            key = prefix + name
            if key in state:
                state[key] = whole_tensor_factory(state[key], [name], self.shard.row_ranges())
        return state


class FANRowParallelLinear(_FANLayer, RowParallelLinear):
    """This rank's features of x1 [s, b, f / T] -> y [s, b, h], or under sequence parallelism its part [s / T, b, h]."""

    divides_rows = False

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the rank's columns as parts of the whole matrix, which reads [cos p1, sin p1, g1] in this order."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        if self.shard.ranks > 1:  # a single rank's columns are the whole matrix, in this order
            key = f"{prefix}weight"
            state[key] = whole_tensor_factory(state[key], ["weight"], self.shard.feature_ranges(), dim=1)
        return state
