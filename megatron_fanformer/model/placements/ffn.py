"""Placement `ffn`: two FAN layers in place of the MLP, h + FAN_2(FAN_1(norm(h))), and attention as a Transformer's.

`model/fan_ffn.py` has the layers, and their source.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_fanformer.model.placements.attention import fan_tensors
from megatron_fanformer.model.placements.base import F, FANMap, H, Placement, Rows, Shape, Size
from megatron_fanformer.runtime.layout import FANForm

if TYPE_CHECKING:
    from megatron_fanformer.model.config import FANConfig, FANformerConfig

ROWS_1 = Size("P1 + G1", lambda model: model.ffn_maps[0][0])
ROWS_2 = Size("P2 + G2", lambda model: model.ffn_maps[1][0])
FIRST, SECOND = "mlp.linear_fc1", "mlp.linear_fc2"


class FFN(Placement):
    """Two FAN layers in place of the MLP."""

    name = "ffn"
    title = "Transformer with FAN layers for its MLP"
    in_words = "FAN layers in place of its MLP"
    is_fanformer = True
    mlp_tensors = (
        *fan_tensors(FIRST, (ROWS_1, H), None, "mlp.fan_1"),
        *fan_tensors(SECOND, (ROWS_2, F), None, "mlp.fan_2"),
    )
    reference_fields = None
    fan_forms: ClassVar[Mapping[FANForm, str]] = {"column": "FAN layers for the FFN"}
    has_engine_layers = False
    has_fan_mlp = True
    rows_are_of = " in the first layer"
    ffn_unit = 4

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the first layer's: ranks share the columns of the second map, and so no row of it."""
        return [FANMap(f"{FIRST}.weight", "p_ratio", model.ffn_hidden_size, model.fan.p_ratio)]

    def seen_maps(self, layer: Mapping[str, Shape]) -> list[Rows]:
        """Return the first layer's, as wide as the second's input."""
        return [(layer[FIRST][0], layer[SECOND][1])]

    def fits(self, layer: Mapping[str, Shape]) -> bool:
        """Return whether the first map has not the rows of a SwiGLU's gate and up."""
        return layer[FIRST][0] != 2 * layer[SECOND][1]

    def ffn_maps(self, model: "FANformerConfig") -> tuple[Rows, Rows]:
        """Return (1 - p_ratio) f rows of h columns, and (1 - p_ratio) h rows of f."""
        h, f, p_ratio = model.hidden_size, model.ffn_hidden_size, model.fan.p_ratio
        return (f - int(p_ratio * f), h), (h - int(p_ratio * h), f)

    def parameters_of_ffn_unit(self, model: "FANformerConfig") -> float:
        """Return those of the share of rows that one more of the width takes."""
        return (1 - model.fan.p_ratio) * (2 * model.hidden_size + model.fan.bias)

    def local_mlp(self, fan: "FANConfig") -> Any:
        """Return megatron-core's MLP of two FAN layers."""
        from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend

        from megatron_fanformer.model.fan_ffn import FANFeedForwardBackend

        return get_mlp_module_spec_for_backend(backend=FANFeedForwardBackend(fan))

    def mlp_fields(self, *, on_cpu: bool) -> dict[str, Any]:
        """Return that nothing acts between the two."""
        from megatron_fanformer.model.fan_ffn import already_activated

        return {"activation_func": already_activated}

    def recompute_problems(self, model: "FANformerConfig", tensor: int) -> Iterator[str]:
        """Yield the recomputations of these layers."""
        yield self._nothing_to_recompute("name mlp in its place")

    def stream_order(self, order: Any) -> Any:
        """Return that of a FAN layer's features, which are written into the stream."""
        return order.features("stream", order.model.hidden_size)

    def mlp_orders(self, order: Any) -> dict[str, list[Any]]:
        """Return the rows of both layers, and the features of the first."""
        width = order.model.ffn_hidden_size
        inner, outer = order.fan_rows("ffn", width), order.fan_rows("stream", order.model.hidden_size)
        return {
            "linear_fc1.weight": [inner, order.hidden],
            "linear_fc1.bias": [inner],
            "linear_fc2.weight": [outer, order.features("ffn", width)],
            "linear_fc2.bias": [outer],
        }
