"""Where a model has FAN layers: one record for each placement, which everything else asks.

    PLACEMENTS["qkv"].in_attention    whether there is a FAN map in front of attention

A new placement is an entry in `PLACEMENTS` (and, for exports, in that of `hf/configuration_fanformer.py`). One that is
made of other parts is a subclass, which overrides the sizes and rules that differ. torch is not imported.

Sizes: h hidden size, f inner width of the feed-forward network, q width of all queries, v of all values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LOCAL_ONLY = "whose FAN layers are local ones alone"


class Output(NamedTuple):
    """Describe what a FAN layer makes: [cos p, sin p, g]."""

    width: int
    p_ratio: float
    field: str = "p_ratio"
    """The field of `model.fan` that its p_ratio is from."""

    @property
    def periodic(self) -> int:
        """P, the rows of its map whose cos and sin it is made of."""
        return int(self.p_ratio * self.width)

    @property
    def rows(self) -> int:
        """P + G, the rows of its map."""
        return self.width - self.periodic


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One placement; the defaults are a Transformer's."""

    name: str
    """Its value of `model.fan.placement`."""
    model: str
    """What a model of it is called."""
    in_attention: bool = False
    """Whether a FAN map is in front of attention, whose output X_F queries and keys are projected from."""
    has_own_values: bool = False
    """Whether the values are a second output of that map, with no matrix after it; else they are projected, too."""
    in_ffn: bool = False
    """Whether two FAN layers take the place of the SwiGLU."""
    reference_block: str | None = None
    """The block type of the authors' format; None: it has no such model."""

    @property
    def has_fan(self) -> bool:
        """Return whether there are FAN layers at all."""
        return self.in_attention or self.in_ffn

    def attention_outputs(self, h: int, v: int, p_ratio: float, v_p_ratio: float | None) -> list[Output]:
        """Return the outputs of attention's FAN map: X_F, and the values where they are its own."""
        outputs = [Output(h, p_ratio)] if self.in_attention else []
        if self.has_own_values:
            outputs.append(Output(v, p_ratio) if v_p_ratio is None else Output(v, v_p_ratio, "v_p_ratio"))
        return outputs

    def ffn_outputs(self, h: int, f: int, p_ratio: float) -> list[Output]:
        """Return the outputs of the two FAN layers in place of the SwiGLU, if they are there."""
        return [Output(f, p_ratio), Output(h, p_ratio)] if self.in_ffn else []

    def projected_rows(self, q: int, v: int) -> int:
        """Return the rows of the matrix behind attention's FAN map: of Q, K and V, or of Q and K alone."""
        return q + v + (0 if self.has_own_values else v)

    def ffn_maps(self, h: int, f: int, p_ratio: float) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return rows and columns of the feed-forward network's two matrices."""
        if not self.in_ffn:
            return (2 * f, h), (h, f)
        first, second = self.ffn_outputs(h, f, p_ratio)
        return (first.rows, h), (second.rows, f)

    def ffn_parameters_a_channel(self, h: int, p_ratio: float, has_bias: bool) -> float:
        """Return how many parameters one more of f has."""
        return (1 - p_ratio) * (2 * h + has_bias) if self.in_ffn else 3 * h

    # -- rules

    def field_problems(self, v_p_ratio: float | None) -> Iterator[str]:
        """Yield what is wrong with the fields of `model.fan` at this placement."""
        if v_p_ratio is not None and not self.has_own_values:
            yield (
                f"model.fan.v_p_ratio is {v_p_ratio}, but at placement {self.name} the values have no FAN "
                f"layer of their own; set it to null, or placement to {QK_AND_V.name}"
            )

    def form_problems(self, fan_form: str) -> Iterator[str]:
        """Yield why tensor parallel ranks cannot have the FAN maps in that form."""
        if fan_form == "sequence" and self.in_ffn:
            yield (
                f"parallel.fan_form is sequence at model.fan.placement {self.name}, whose maps tensor parallel ranks "
                "share; set it to column"
            )

    def recompute_problems(self, *, ranks: int, keeps_g: bool, fan_rows: int, h: int) -> Iterator[str]:
        """Yield why recomputing attention's FAN map (keeping p | g in place of its outputs) saves nothing.

        Args:
            ranks: tensor parallel ones.
            keeps_g: whether a GELU keeps g.
            fan_rows: of attention's map.
        """
        if not self.in_attention:
            instead = "name mlp in its place" if self.in_ffn else "remove it"
            yield (
                f"parallel.recompute_modules has fan, but model.fan.placement is {self.name}, so that there is "
                f"no FAN map in front of attention to recompute; {instead}"
            )
        # Attention keeps the values, which on one rank are the map's own output: only X_F (and a GELU's g) is freed.
        if ranks == 1 and self.has_own_values and not keeps_g and fan_rows >= h:
            yield (
                f"parallel.recompute_modules has fan, but at placement {self.name} and tensor_model_parallel_size 1 it "
                f"frees X_F, {h} wide, and keeps p | g of both outputs, {fan_rows} wide; remove it"
            )

    def engine_problems(self, *, fused_single_qkv_rope: bool) -> Iterator[str]:
        """Yield why Transformer Engine's layers cannot be those of a model."""
        if self.in_ffn:
            yield (
                f"model.fan.placement is {self.name}, {LOCAL_ONLY}, but the layers here are Transformer "
                "Engine's; set kernels.transformer_impl to local"
            )
        if fused_single_qkv_rope and self.has_own_values:
            yield (
                f"kernels.fused_single_qkv_rope is true at model.fan.placement {self.name}, whose values are in "
                "another tensor than queries and keys; set it to false"
            )


SEQUENTIAL, FANFORMER = "sequential", "fanformer"  # the authors' block types

QK_AND_V = Placement(
    name="qk_and_v", model="FANformer", in_attention=True, has_own_values=True, reference_block=FANFORMER
)

PLACEMENTS: dict[str, Placement] = {
    each.name: each
    for each in (
        Placement(name="qkv", model="FANformer", in_attention=True, reference_block=SEQUENTIAL),
        QK_AND_V,
        Placement(name="ffn", model="Transformer with FAN layers for its MLP", in_ffn=True),
        Placement(name="none", model="Transformer", reference_block=SEQUENTIAL),
    )
}
"""Every placement by its name."""


def placement_with(*, in_attention: bool, has_own_values: bool = False, in_ffn: bool = False) -> Placement | None:
    """Return the placement that has FAN layers there and nowhere else; None: there is none."""
    wanted = (in_attention, has_own_values, in_ffn)
    found = (each for each in PLACEMENTS.values() if (each.in_attention, each.has_own_values, each.in_ffn) == wanted)
    return next(found, None)
