"""The placements of FAN in the layer, by the name in `model.fan.placement`: tensors, modules and rules of each.

`Placement` is an ordinary Transformer's layer; each placement of FAN is a class that overrides the differences.
Configuration is checked before torch is imported, so that methods which build or compute import it, and Megatron.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from megatron_fanformer.model.config import FANConfig, FANformerConfig

Rows = tuple[int, int]
"""Number of rows of a FAN map, and the width of their output."""


class Size(NamedTuple):
    """One size in the shape of a tensor."""

    symbol: str
    """Symbol in the table of names (docs/conversion.md)."""
    of: Callable[["FANformerConfig"], int]


class LayerTensor(NamedTuple):
    """A tensor of every layer, by its names within the layer in the three formats."""

    name: str
    """Name in Megatron."""
    shape: tuple[Size, ...]
    """Shape of Megatron's tensor."""
    reference: tuple[str, ...]
    """Names in the authors' format; empty where that cannot express it."""
    hf: tuple[str, ...]
    reference_transform: str = "as it is"
    """Transform to those tensors, by its name in `convert.name_table`."""
    hf_transform: str = "as it is"
    is_there: Callable[["FANformerConfig"], bool] = lambda model: True
    """True if a model of that placement has it."""

    def rows_of_group(self, heads_of_group: int, head_size: int) -> tuple[int, ...]:
        """Return the rows of queries, keys and values in each query group of an interleaved matrix; none of others."""
        rows = dict(zip(QKV_PARTS, (heads_of_group * head_size, head_size, head_size), strict=True))
        return tuple(rows[part] for part in self.hf if part in rows)


class FANMap(NamedTuple):
    """The rows of a FAN output that tensor parallel ranks share (in the `column` form)."""

    tensor: str
    """Megatron's name of the weight that holds the rows."""
    field: str
    """Field of `model.fan` that sets its p_ratio."""
    width: int
    """Width of the output."""
    p_ratio: float


H = Size("h", lambda model: model.hidden_size)
F = Size("f", lambda model: model.ffn_hidden_size)
GATE_AND_UP = Size("2f", lambda model: 2 * model.ffn_hidden_size)
HEAD = Size("d", lambda model: model.kv_channels)
QUERIES = Size("n d", lambda model: model.num_attention_heads * model.kv_channels)
QKV_ROWS = Size("(n + 2k) d", lambda model: model.qkv_rows)

QKV_PARTS = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")


def linear_qkv(reference: str) -> LayerTensor:
    """Return the matrix of queries, keys and values, which the authors name by the layer in front of it."""
    return LayerTensor(
        "self_attention.linear_qkv.weight",
        (QKV_ROWS, H),
        (reference,),
        QKV_PARTS,
        "all q, then all k, then all v",
        "separate q, k and v",
    )


def _head_norm(part: str) -> LayerTensor:
    return LayerTensor(
        f"self_attention.{part}_layernorm.weight",
        (HEAD,),
        (),
        (f"self_attn.{part}_norm.weight",),
        is_there=lambda model: model.qk_layernorm,
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
    """True if there is FAN anywhere in the layer."""
    is_in_attention: ClassVar[bool] = False
    """True if there is a FAN map in front of attention."""
    attention_tensors: ClassVar[tuple[LayerTensor, ...]] = (linear_qkv("att_proj.weight"),)
    """Tensors before core attention."""
    mlp_tensors: ClassVar[tuple[LayerTensor, ...]] = SWIGLU
    in_words: ClassVar[str] = title
    """The layer's structure in one sentence."""
    reference_fields: ClassVar[Mapping[str, Any] | None] = {"block_type": "sequential", "use_ATF": False}
    """Fields of the authors' configuration that state it; None: they have no such model."""
    has_own_values: ClassVar[bool] = False
    """True if a FAN layer makes the values, which then lie in another tensor than queries and keys."""
    has_engine_layers: ClassVar[bool] = True
    """True if Transformer Engine's layers can compute it."""
    has_fan_mlp: ClassVar[bool] = False
    """True if FAN layers take the place of the MLP."""

    # -- tensors

    def tensors(self, model: "FANformerConfig") -> list[LayerTensor]:
        """Return a layer's tensors, in the order of conversions."""
        return [tensor for tensor in self.all_tensors() if tensor.is_there(model)]

    def all_tensors(self) -> list[LayerTensor]:
        """Return these and those that only some models have: biases, norms of heads."""
        return [INPUT_NORM, *self.attention_tensors, *HEAD_NORMS, PROJECTION, MLP_NORM, *self.mlp_tensors]

    def tensor(self, name: str) -> LayerTensor:
        """Return the tensor of a layer that Megatron calls so."""
        return next(tensor for tensor in self.all_tensors() if tensor.name == name)

    def outputs(self, fan: "FANConfig", hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return width and p_ratio of the outputs of attention's FAN map; none without one."""
        return []

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the FAN maps of a layer whose rows tensor parallel ranks share."""
        return []

    def reference_qkv(self, model: "FANformerConfig", block: Callable[[str], Any], x: Any, fan: Any) -> Sequence[Any]:
        """Return queries, keys and values [b, s, ...] of x by the authors' equations.

        Args:
            block: loads a tensor by its name in the authors' block.
            fan: a FAN layer, called with the name of its map, x, and its width.
        """
        return self._split(model, x @ block("att_proj.weight").T)

    @staticmethod
    def _split(model: "FANformerConfig", rows: Any) -> Sequence[Any]:
        queries = model.num_attention_heads * model.kv_channels
        parts: Sequence[Any] = rows.split(
            [queries, *[model.value_size] * ((model.qkv_rows - queries) // model.value_size)], dim=-1
        )
        return parts

    # -- formulas

    def parameters(self, model: "FANformerConfig") -> int:
        """Return the weights of a layer."""
        return sum(math.prod(size.of(model) for size in tensor.shape) for tensor in self.tensors(model))

    def qkv_rows(self, model: "FANformerConfig") -> int:
        """Return the rows of the matrix that makes queries, keys and values (those that FAN does not make)."""
        return model.num_attention_heads * model.kv_channels + 2 * model.value_size

    def ffn_maps(self, model: "FANformerConfig") -> tuple[Rows, Rows]:
        """Return rows and columns of the MLP's two matrices."""
        h, f = model.hidden_size, model.ffn_hidden_size
        return (2 * f, h), (h, f)

    def parameters_of_ffn_unit(self, model: "FANformerConfig") -> float:
        """Return the weights that one more of d_ff adds to a layer."""
        return 3 * model.hidden_size

    # -- modules

    def attention(self) -> tuple[Any, Any]:
        """Return the classes of self-attention and of its submodules, with a `fan_linear` where FAN is in front."""
        from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules

        return SelfAttention, SelfAttentionSubmodules

    def local_mlp(self, fan: "FANConfig") -> Any:
        """Return the ModuleSpec of the MLP of local layers."""
        from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend

        from megatron_fanformer.model.local_layers import LocalBackend

        return get_mlp_module_spec_for_backend(backend=LocalBackend(), use_te_activation_func=True)

    def mlp_fields(self, *, on_cpu: bool) -> dict[str, Any]:
        """Return fields of megatron-core's configuration."""
        from torch.nn.functional import silu

        return {
            "gated_linear_unit": True,
            "activation_func": silu,
            # A GPU's SwiGLU is fused, by the Engine or torch's compiler; a CPU uses the local layers' own, for which
            # `use_te_activation_func` is megatron-core's switch, despite its name.
            "bias_activation_fusion": not on_cpu,
            "use_te_activation_func": on_cpu,
        }

    # -- rules

    def recompute_problems(self, model: "FANformerConfig", tensor: int) -> Iterator[str]:
        """Yield why naming `fan` in recompute_modules saves nothing at that tensor parallel size, one line each."""
        yield self._nothing_to_recompute("remove it")

    def _nothing_to_recompute(self, instead: str) -> str:
        return (
            f"parallel.recompute_modules has fan, but model.fan.placement is {self.name}, so that there is "
            f"no FAN map in front of attention to recompute; {instead}"
        )


# -- in front of attention

FAN, V_FAN, QK = "self_attention.fan.linear", "self_attention.fan.v_linear", "self_attention.linear_qk"

FAN_ROWS = Size("P + G", lambda model: model.hidden_size - model.periodic_size)
V_FAN_ROWS = Size("Pv + Gv", lambda model: model.value_size - int(model.fan.value_p_ratio * model.value_size))
QK_ROWS = Size("(n + k) d", lambda model: model.qkv_rows)


def fan_tensors(name: str, shape: tuple[Size, ...], reference: str | None, hf: str) -> tuple[LayerTensor, LayerTensor]:
    """Return weight and bias of a FAN map, whose rows [p | g] are alike in all formats."""
    reference_names = [() if reference is None else (f"{reference}.{part}",) for part in ("weight", "bias")]
    rows = "rows [p | g]"
    return (
        LayerTensor(f"{name}.weight", shape, reference_names[0], (f"{hf}.weight",), rows, rows),
        LayerTensor(
            f"{name}.bias", shape[:1], reference_names[1], (f"{hf}.bias",), rows, rows, lambda model: model.fan.bias
        ),
    )


FAN_TENSORS = fan_tensors(FAN, (FAN_ROWS, H), "att_proj.fanlayer.input_linear", "self_attn.fan")


class QKV(Placement):
    """Queries, keys and values are projected from X_F."""

    name = "qkv"
    title = "FANformer"
    is_fanformer = is_in_attention = True
    attention_tensors: ClassVar[tuple[LayerTensor, ...]] = (*FAN_TENSORS, linear_qkv("att_proj.linear.weight"))
    reference_fields: ClassVar[Mapping[str, Any]] = {"block_type": "sequential", "use_ATF": True}

    def outputs(self, fan: "FANConfig", hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return X_F alone."""
        return [(hidden_size, fan.p_ratio)]

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the map of X_F, and the values' where they have one."""
        outputs = self.outputs(model.fan, model.hidden_size, model.value_size)
        names = ((f"{FAN}.weight", "p_ratio"), (f"{V_FAN}.weight", "v_p_ratio"))
        return [FANMap(*name, *output) for name, output in zip(names, outputs, strict=False)]

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
    reference_fields: ClassVar[Mapping[str, Any]] = {"block_type": "fanformer", "use_ATF": True}
    has_own_values = True

    def outputs(self, fan: "FANConfig", hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        """Return X_F and the values."""
        return [(hidden_size, fan.p_ratio), (value_size, fan.value_p_ratio)]

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


# -- in place of the MLP

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
    has_engine_layers = False
    has_fan_mlp = True

    def maps(self, model: "FANformerConfig") -> list[FANMap]:
        """Return the first layer's: ranks share the columns of the second map, and so no row of it."""
        return [FANMap(f"{FIRST}.weight", "p_ratio", model.ffn_hidden_size, model.fan.p_ratio)]

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


PLACEMENTS: dict[str, Placement] = {placement.name: placement for placement in (QKV(), QKAndV(), FFN(), Placement())}
TRANSFORMER = Placement.name

if TYPE_CHECKING:
    PlacementName = str
else:
    PlacementName = Literal[tuple(PLACEMENTS)]


def all_tensors() -> dict[LayerTensor, list[str]]:
    """Return every tensor that a layer may have, with the placements that have it."""
    attention = [tensor for placement in PLACEMENTS.values() for tensor in placement.attention_tensors]
    mlp = [tensor for placement in PLACEMENTS.values() for tensor in placement.mlp_tensors]
    return {
        tensor: [name for name, placement in PLACEMENTS.items() if tensor in placement.all_tensors()]
        for tensor in dict.fromkeys([INPUT_NORM, *attention, *HEAD_NORMS, PROJECTION, MLP_NORM, *mlp])
    }
