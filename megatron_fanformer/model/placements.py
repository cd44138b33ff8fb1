"""The placements of FAN in the layer, by the names that `model.fan.placement` takes: their tensors and modules.

`Placement` describes an ordinary Transformer layer; a subclass for a placement of FAN overrides what differs.
Configurations are checked before torch is imported: a method that needs torch or Megatron imports it itself.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from megatron_fanformer.model.config import FANConfig, FANformerConfig


class Size(NamedTuple):
    """One size in the shape of a tensor."""

    symbol: str
    """Symbol in the table of names (docs/conversion.md)."""
    value: Callable[["FANformerConfig"], int]


class LayerTensor(NamedTuple):
    """A tensor that every layer has, and its names within the layer in the three formats."""

    name: str
    """Name in Megatron."""
    shape: tuple[Size, ...]
    """Shape of Megatron's tensor."""
    reference: tuple[str, ...]
    """Names in the authors' format; empty if that format has no such tensor."""
    hf: tuple[str, ...]
    """Names in an export for transformers."""
    reference_transform: str = "as it is"
    """Transform from Megatron's tensor to the authors' tensors, by its name in `convert.name_table`."""
    hf_transform: str = "as it is"
    exists_in: Callable[["FANformerConfig"], bool] = lambda model: True
    """Whether a model of a placement with this tensor has it: biases and norms of heads are optional."""

    def rows_of_group(self, heads_of_group: int, head_size: int) -> tuple[int, ...]:
        """Return how many rows of queries, keys and values a query group has; empty if the tensor has no such rows."""
        rows = dict(zip(QKV_PARTS, (heads_of_group * head_size, head_size, head_size), strict=True))
        return tuple(rows[part] for part in self.hf if part in rows)


class FANMap(NamedTuple):
    """A FAN map whose rows are divided over the tensor parallel ranks (in the `column` form)."""

    tensor: str
    """Megatron's name of the map's weight."""
    field: str
    """Field of `model.fan` that sets its p_ratio."""
    width: int
    """Width of the map's output [cos p, sin p, g]."""
    p_ratio: float


H = Size("h", lambda model: model.hidden_size)
F = Size("f", lambda model: model.ffn_hidden_size)
GATE_AND_UP = Size("2f", lambda model: 2 * model.ffn_hidden_size)
HEAD = Size("d", lambda model: model.kv_channels)
QUERIES = Size("n d", lambda model: model.num_attention_heads * model.kv_channels)
QKV_ROWS = Size("(n + 2k) d", lambda model: model.qkv_rows)

QKV_PARTS = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")


def linear_qkv(reference: str) -> LayerTensor:
    """Return the matrix of queries, keys and values; the authors' name of the matrix depends on the layer in front."""
    return LayerTensor(
        "self_attention.linear_qkv.weight",
        (QKV_ROWS, H),
        reference=(reference,),
        hf=QKV_PARTS,
        reference_transform="all q, then all k, then all v",
        hf_transform="separate q, k and v",
    )


def _head_norm(part: str) -> LayerTensor:  # `part`: "q" or "k"
    return LayerTensor(
        f"self_attention.{part}_layernorm.weight",
        (HEAD,),
        reference=(),
        hf=(f"self_attn.{part}_norm.weight",),
        exists_in=lambda model: model.qk_layernorm,
    )


HEAD_NORMS = (_head_norm("q"), _head_norm("k"))
INPUT_NORM = LayerTensor("input_layernorm.weight", (H,), ("attn_norm.weight",), ("input_layernorm.weight",))
PROJECTION = LayerTensor(
    "self_attention.linear_proj.weight", (H, QUERIES), ("attn_out.weight",), ("self_attn.o_proj.weight",)
)
MLP_NORM = LayerTensor("pre_mlp_layernorm.weight", (H,), ("ff_norm.weight",), ("post_attention_layernorm.weight",))
SWIGLU = (
    LayerTensor(
        "mlp.linear_fc1.weight",
        (GATE_AND_UP, H),
        ("ff_proj.weight",),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "up, then gate",
        "separate gate and up",
    ),
    LayerTensor("mlp.linear_fc2.weight", (H, F), ("ff_out.weight",), ("mlp.down_proj.weight",)),
)


class Placement:
    """Placement `none`: an ordinary Transformer, h + attn(norm(h)), then h + mlp(norm(h)) with a SwiGLU."""

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "Transformer"
    is_fanformer: ClassVar[bool] = False
    """Whether the layer has FAN anywhere."""
    is_in_attention: ClassVar[bool] = False
    """Whether a FAN map stands in front of attention."""
    attention_tensors: ClassVar[tuple[LayerTensor, ...]] = (linear_qkv("att_proj.weight"),)
    """Tensors in front of core attention; the last one is the matrix of queries, keys and (projected) values."""
    mlp_tensors: ClassVar[tuple[LayerTensor, ...]] = SWIGLU
    description: ClassVar[str] = title
    """The layer's structure, as error messages call it."""
    reference_fields: ClassVar[Mapping[str, Any] | None] = {"block_type": "sequential", "use_ATF": False}
    """Fields of the authors' configuration that state the placement; None: the authors have no such model."""
    has_own_values: ClassVar[bool] = False
    """Whether a FAN layer makes the values; the matrix behind FAN then makes queries and keys alone."""
    has_engine_layers: ClassVar[bool] = True
    """Whether Transformer Engine's layers can compute the layer."""
    has_fan_mlp: ClassVar[bool] = False
    """Whether FAN layers take the place of the MLP."""

    # -- tensors

    def tensors(self, model: "FANformerConfig") -> list[LayerTensor]:
        """Return the tensors of a layer of this model, in the order of conversions."""
        return [tensor for tensor in self.all_tensors() if tensor.exists_in(model)]

    def all_tensors(self) -> list[LayerTensor]:
        """Return the tensors of a layer, with biases and norms of heads, which only some models have."""
        return [INPUT_NORM, *self.attention_tensors, *HEAD_NORMS, PROJECTION, MLP_NORM, *self.mlp_tensors]

    def tensor(self, name: str) -> LayerTensor:
        """Return the tensor that Megatron calls `name` within a layer."""
        return next(tensor for tensor in self.all_tensors() if tensor.name == name)

    def outputs(self, fan: "FANConfig", hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return the width and the p_ratio of every output of attention's FAN map; an empty list without the map."""
        return []

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the layer's FAN maps whose rows the tensor parallel ranks divide; a Transformer has none."""
        return []

    def reference_qkv(
        self, model: "FANformerConfig", block: Callable[[str], Any], x: Any, fan: Callable[[str, Any, int], Any]
    ) -> list[Any]:
        """Return queries, keys and values [batch, sequence, ...] of normed hidden states x, by the authors' equations.

        Args:
            block: loads a tensor by its name in the authors' block.
            fan: computes a FAN layer, given its name in the authors' block, its input and the width of its output.
        """
        x_f = fan("att_proj.fanlayer", x, model.hidden_size) if self.is_in_attention else x
        projected = x_f @ block(self.attention_tensors[-1].reference[0]).T  # the last one: the matrix of Q, K (and V)
        widths = [model.num_attention_heads * model.kv_channels, model.value_size]
        if self.has_own_values:
            return [*projected.split(widths, dim=-1), fan("v_fan", x, model.value_size)]
        return list(projected.split([*widths, model.value_size], dim=-1))

    # -- formulas

    def parameters(self, model: "FANformerConfig") -> int:
        """Return the number of weights of a layer."""
        return sum(math.prod(size.value(model) for size in tensor.shape) for tensor in self.tensors(model))

    def qkv_rows(self, model: "FANformerConfig") -> int:
        """Return the rows of the matrix of queries, keys and values (without values that a FAN layer makes)."""
        value_rows = 0 if self.has_own_values else model.value_size
        return model.num_attention_heads * model.kv_channels + model.value_size + value_rows

    def ffn_maps(self, model: "FANformerConfig") -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows and the columns of each of the MLP's two matrices."""
        h, f = model.hidden_size, model.ffn_hidden_size
        return (2 * f, h), (h, f)

    def parameters_per_ffn_unit(self, model: "FANformerConfig") -> float:
        """Return how many weights a layer gains if `ffn_hidden_size` grows by one."""
        return 3 * model.hidden_size  # a row of the gate, a row of up, and a column of the second matrix

    # -- modules

    def attention(self) -> tuple[Any, Any]:
        """Return the classes of self-attention and of its submodules, which have a `fan_linear` if FAN is in front."""
        from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules

        return SelfAttention, SelfAttentionSubmodules

    def mlp_backend(self, fan: "FANConfig") -> Any:
        """Return megatron-core's provider of the layers of the local MLP."""
        from megatron_fanformer.model.local_layers import LocalBackend

        return LocalBackend()

    def mlp_fields(self, *, on_cpu: bool) -> dict[str, Any]:
        """Return the fields by which megatron-core's configuration describes the MLP."""
        from torch.nn.functional import silu

        return {
            "gated_linear_unit": True,
            "activation_func": silu,
            # On a GPU the Engine or torch's compiler fuses SwiGLU. On a CPU megatron-core takes `LocalBackend`'s
            # activation if `use_te_activation_func` is set, despite that name.
            "bias_activation_fusion": not on_cpu,
            "use_te_activation_func": on_cpu,
        }


# -- in front of attention

FAN, V_FAN, QK = "self_attention.fan.linear", "self_attention.fan.v_linear", "self_attention.linear_qk"

FAN_ROWS = Size("P + G", lambda model: model.hidden_size - int(model.fan.p_ratio * model.hidden_size))
V_FAN_ROWS = Size("Pv + Gv", lambda model: model.value_size - int(model.fan.value_p_ratio * model.value_size))
QK_ROWS = Size("(n + k) d", lambda model: model.qkv_rows)


def fan_tensors(name: str, shape: tuple[Size, ...], reference: str | None, hf: str) -> tuple[LayerTensor, LayerTensor]:
    """Return the weight (of this shape) and the bias of a FAN map; `reference`: None if the authors lack it."""

    def tensor(part: str, shape: tuple[Size, ...], exists_in: Callable[["FANformerConfig"], bool]) -> LayerTensor:
        reference_names = () if reference is None else (f"{reference}.{part}",)
        transform = "rows [p | g]"  # to both other formats, which have the same order of rows
        return LayerTensor(f"{name}.{part}", shape, reference_names, (f"{hf}.{part}",), transform, transform, exists_in)

    return tensor("weight", shape, lambda model: True), tensor("bias", shape[:1], lambda model: model.fan.bias)


FAN_TENSORS = fan_tensors(FAN, (FAN_ROWS, H), "att_proj.fanlayer.input_linear", "self_attn.fan")


class QKV(Placement):
    """Placement `qkv`: queries, keys and values are projected from X_F."""

    name = "qkv"
    title = "FANformer"
    is_fanformer = is_in_attention = True
    attention_tensors: ClassVar[tuple[LayerTensor, ...]] = (*FAN_TENSORS, linear_qkv("att_proj.linear.weight"))
    reference_fields: ClassVar[Mapping[str, Any]] = {"block_type": "sequential", "use_ATF": True}

    def outputs(self, fan: "FANConfig", hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return the width and the p_ratio of X_F, and of the values if a FAN layer makes them."""
        values = [(value_size, fan.value_p_ratio)] if self.has_own_values else []
        return [(hidden_size, fan.p_ratio), *values]

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the map to X_F, and the map to the values if a FAN layer makes them."""
        outputs = self.outputs(model.fan, model.hidden_size, model.value_size)
        tensors_and_fields = ((f"{FAN}.weight", "p_ratio"), (f"{V_FAN}.weight", "v_p_ratio"))
        return [FANMap(*pair, *output) for pair, output in zip(tensors_and_fields, outputs, strict=False)]  # 1 or 2

    def attention(self) -> tuple[Any, Any]:
        """Return the classes of Megatron's self-attention with a FAN map in front, and of its submodules."""
        from megatron_fanformer.model.attention import FANSelfAttention, FANSelfAttentionSubmodules

        return FANSelfAttention, FANSelfAttentionSubmodules


class QKAndV(QKV):
    """Placement `qk_and_v`: queries and keys are projected from X_F; a second FAN layer makes the values."""

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
    reference_fields: ClassVar[Mapping[str, Any]] = {"block_type": "fanformer", "use_ATF": True}
    has_own_values = True

    def attention(self) -> tuple[Any, Any]:
        """Return the classes of a self-attention with a second FAN map, for the values, and of its submodules."""
        from megatron_fanformer.model.attention import FANSelfAttentionSubmodules, FANValueAttention

        return FANValueAttention, FANSelfAttentionSubmodules


# -- in place of the MLP

ROWS_1 = Size("P1 + G1", lambda model: model.ffn_maps[0][0])
ROWS_2 = Size("P2 + G2", lambda model: model.ffn_maps[1][0])
FIRST, SECOND = "mlp.linear_fc1", "mlp.linear_fc2"


class FFN(Placement):
    """Placement `ffn`: two FAN layers in place of the MLP."""

    name = "ffn"
    title = "Transformer with FAN layers for its MLP"
    description = "FAN layers in place of its MLP"
    is_fanformer = True
    mlp_tensors = (
        *fan_tensors(FIRST, (ROWS_1, H), None, "mlp.fan_1"),
        *fan_tensors(SECOND, (ROWS_2, F), None, "mlp.fan_2"),
    )
    reference_fields = None
    has_engine_layers = False
    has_fan_mlp = True

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the map of the first layer; the ranks divide the columns of the second layer's map, not its rows."""
        return [FANMap(f"{FIRST}.weight", "p_ratio", model.ffn_hidden_size, model.fan.p_ratio)]

    def ffn_maps(self, model: "FANformerConfig") -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (1 - p_ratio) f rows of h columns, and (1 - p_ratio) h rows of f columns."""
        h, f, p_ratio = model.hidden_size, model.ffn_hidden_size, model.fan.p_ratio
        return (f - int(p_ratio * f), h), (h - int(p_ratio * h), f)

    def parameters_per_ffn_unit(self, model: "FANformerConfig") -> float:
        """Return the parameters of 1 - p_ratio rows of the first map, with biases, and of a column of the second."""
        return (1 - model.fan.p_ratio) * (2 * model.hidden_size + model.fan.bias)

    def mlp_backend(self, fan: "FANConfig") -> Any:
        """Return a provider of FAN layers for the MLP's linear maps."""
        from megatron_fanformer.model.fan_ffn import FANFeedForwardBackend

        return FANFeedForwardBackend(fan)

    def mlp_fields(self, *, on_cpu: bool) -> dict[str, Any]:
        """Return the identity as the activation between the two FAN layers."""
        from megatron_fanformer.model.fan_ffn import already_activated

        return {"activation_func": already_activated}


PLACEMENTS: dict[str, Placement] = {placement.name: placement for placement in (QKV(), QKAndV(), FFN(), Placement())}
TRANSFORMER = Placement.name

if TYPE_CHECKING:
    PlacementName = str
else:
    PlacementName = Literal[tuple(PLACEMENTS)]


def all_tensors() -> dict[LayerTensor, list[str]]:
    """Return every tensor that a layer may have, with the names of the placements that have the tensor."""
    attention = [tensor for placement in PLACEMENTS.values() for tensor in placement.attention_tensors]
    mlp = [tensor for placement in PLACEMENTS.values() for tensor in placement.mlp_tensors]
    return {
        tensor: [name for name, placement in PLACEMENTS.items() if tensor in placement.all_tensors()]
        for tensor in dict.fromkeys([INPUT_NORM, *attention, *HEAD_NORMS, PROJECTION, MLP_NORM, *mlp])  # each once
    }
