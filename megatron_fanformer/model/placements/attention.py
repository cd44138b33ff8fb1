"""FAN in front of attention: placement `qkv`, the paper's, and `qk_and_v`, the authors' block `fanformer`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_fanformer.model.placements.base import (
    QKV_PARTS,
    FANMap,
    H,
    LayerTensor,
    Placement,
    Rows,
    Shape,
    Size,
    linear_qkv,
)
from megatron_fanformer.runtime.layout import FANForm

if TYPE_CHECKING:
    from megatron_fanformer.model.config import FANConfig, FANformerConfig

FAN, V_FAN, QK = "self_attention.fan.linear", "self_attention.fan.v_linear", "self_attention.linear_qk"

FAN_ROWS = Size("P + G", lambda model: model.hidden_size - model.periodic_size)
V_FAN_ROWS = Size("Pv + Gv", lambda model: model.value_size - int(model.fan.value_p_ratio * model.value_size))
QK_ROWS = Size("(n + k) d", lambda model: model.qkv_rows)


def fan_tensors(name: str, shape: tuple[Size, ...], reference: str | None, hf: str) -> tuple[LayerTensor, LayerTensor]:
    """Return weight and bias of a FAN map, whose rows [p | g] are alike in all formats."""
    of_reference = [() if reference is None else (f"{reference}.{part}",) for part in ("weight", "bias")]
    rows = "rows [p | g]"
    return (
        LayerTensor(f"{name}.weight", shape, of_reference[0], (f"{hf}.weight",), rows, rows),
        LayerTensor(
            f"{name}.bias", shape[:1], of_reference[1], (f"{hf}.bias",), rows, rows, lambda model: model.fan.bias
        ),
    )


FAN_TENSORS = fan_tensors(FAN, (FAN_ROWS, H), "att_proj.fanlayer.input_linear", "self_attn.fan")


class QKV(Placement):
    """Queries, keys and values are projected from X_F."""

    name = "qkv"
    title = "FANformer"
    is_fanformer = is_in_attention = True
    attention_tensors: ClassVar[tuple[LayerTensor, ...]] = (*FAN_TENSORS, linear_qkv("att_proj.linear.weight"))
    own_tensors = frozenset({FAN})
    reference_fields: ClassVar[Mapping[str, Any]] = {"block_type": "sequential", "use_ATF": True}
    fan_forms: ClassVar[Mapping[FANForm, str]] = {"column": "FAN column", "sequence": "FAN sequence"}

    def outputs(self, fan: "FANConfig", hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return X_F alone."""
        return [(hidden_size, fan.p_ratio)]

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the map of X_F, and the values' where they have one."""
        outputs = self.outputs(model.fan, model.hidden_size, model.value_size)
        names = ((f"{FAN}.weight", "p_ratio"), (f"{V_FAN}.weight", "v_p_ratio"))
        return [FANMap(*name, *output) for name, output in zip(names, outputs, strict=False)]

    def seen_maps(self, layer: Mapping[str, Shape]) -> list[Rows]:
        """Return that of X_F, which is as wide as the stream."""
        return [(layer[FAN][0], layer["input_layernorm"][0])]

    def reference_qkv(self, model: "FANformerConfig", block: Callable[[str], Any], x: Any, fan: Any) -> Sequence[Any]:
        """Return the parts of a product of X_F."""
        x_f = fan("att_proj.fanlayer", x, model.hidden_size)
        return self._split(model, x_f @ block("att_proj.linear.weight").T)

    def attention(self) -> tuple[Any, Any]:
        """Return Megatron's self-attention behind a FAN map."""
        from megatron_fanformer.model.attention import FANSelfAttention, FANSelfAttentionSubmodules

        return FANSelfAttention, FANSelfAttentionSubmodules

    def recompute_problems(self, model: "FANformerConfig", tensor: int) -> Iterator[str]:
        """Yield nothing: X_F is freed."""
        yield from ()

    def attention_orders(self, order: Any) -> dict[str, list[Any]]:
        """Return the rows of the FAN map, and X_F's coordinates for its readers."""
        rows = order.fan_rows("x_f", order.model.hidden_size)
        return {
            **super().attention_orders(order),
            "fan.linear.weight": [rows, order.hidden],
            "fan.linear.bias": [rows],
            "linear_qkv.weight": [order.qkv_rows(), order.x_f],
        }


class QKAndV(QKV):
    """Queries and keys are projected from X_F; values are the output of a FAN layer of their own."""

    name = "qk_and_v"
    attention_tensors = (
        *FAN_TENSORS,
        *fan_tensors(V_FAN, (V_FAN_ROWS, H), "v_fan.input_linear", "self_attn.v_fan"),
        LayerTensor(
            f"{QK}.weight",
            (QK_ROWS, H),
            ("att_proj.linear.weight",),
            QKV_PARTS[:2],
            "all q, then all k",
            "separate q and k",
        ),
    )
    own_tensors = frozenset({FAN, V_FAN})
    reference_fields: ClassVar[Mapping[str, Any]] = {"block_type": "fanformer", "use_ATF": True}
    has_own_values = True

    def outputs(self, fan: "FANConfig", hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return X_F and the values."""
        return [(hidden_size, fan.p_ratio), (value_size, fan.value_p_ratio)]

    def seen_maps(self, layer: Mapping[str, Shape]) -> list[Rows]:
        """Return that of X_F and of the values, which are as wide as all keys."""
        hidden_size = layer["input_layernorm"][0]
        return [*super().seen_maps(layer), (layer[V_FAN][0], layer[QK][0] - hidden_size)]

    def reference_qkv(self, model: "FANformerConfig", block: Callable[[str], Any], x: Any, fan: Any) -> Sequence[Any]:
        """Return queries and keys of a product of X_F, and the values' FAN layer."""
        return [*super().reference_qkv(model, block, x, fan), fan("v_fan", x, model.value_size)]

    def qkv_rows(self, model: "FANformerConfig") -> int:
        """Return those of queries and keys alone."""
        return super().qkv_rows(model) - model.value_size

    def attention(self) -> tuple[Any, Any]:
        """Return an attention whose FAN map has two outputs."""
        from megatron_fanformer.model.attention import FANSelfAttentionSubmodules, FANValueAttention

        return FANValueAttention, FANSelfAttentionSubmodules

    def recompute_problems(self, model: "FANformerConfig", tensor: int) -> Iterator[str]:
        """Yield where keeping p | g in place of the outputs saves nothing.

        Attention keeps the values, which on one rank are the map's own output: only X_F (and a GELU's g) is freed.
        """
        if tensor == 1 and model.fan.activation != "gelu" and model.fan_rows >= model.hidden_size:
            yield (
                f"parallel.recompute_modules has fan, but at placement {self.name} and tensor_model_parallel_size 1 it "
                f"frees X_F, {model.hidden_size} wide, and keeps p | g of both outputs, {model.fan_rows} wide; remove "
                "it"
            )

    def group_order(self, order: Any) -> Any:
        """Return none: a value's channel says whether it is a cosine, a sine or linear, and its head cannot move."""
        return None

    def attention_orders(self, order: Any) -> dict[str, list[Any]]:
        """Return also those of the values' map, whose rows are channels of heads, and stay where those need them."""
        return {
            **super().attention_orders(order),
            "fan.v_linear.weight": [None, order.hidden],
            "fan.v_linear.bias": [None],
            "linear_qk.weight": [None, order.x_f],
        }
