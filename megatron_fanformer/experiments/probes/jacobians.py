"""Jacobians of a trained model's layers, by depth: their largest singular values at a text.

A layer's is that of its output by its input, all tokens of a sequence together; the other is that of its output by the
embeddings, through all layers up to it. Computed in float32 by the model for transformers.

Shapes: b sequences, s tokens, h hidden size.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.probes.outcome import Log, Measured
from megatron_fanformer.experiments.probes.settings import LipschitzSettings
from megatron_fanformer.experiments.result import Cell, Finding, Table
from megatron_fanformer.formats.checkpoints import Checkpoint, open_checkpoint
from megatron_fanformer.formats.huggingface import to_huggingface_config
from megatron_fanformer.formats.name_table import convert
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.pictures import drawn, set_logarithmic

Map = Callable[[Tensor], Tensor]
MOST_BYTES = 1 << 26  # of a text


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Largest singular values, over the sequences, of each layer."""

    of_layers: list[float]
    from_embeddings: list[float]


def measure_checkpoints(settings: LipschitzSettings, log: Log) -> Measured:
    """Return the norms of every named checkpoint.

    Raises:
        InputError: one cannot be opened, or the text cannot be read or is too short.
        CorruptError: one is damaged.
    """
    found = {}
    for name in settings.checkpoints:
        checkpoint = open_checkpoint(Path(name))
        ids_bs = _input(settings, checkpoint)
        found[name] = jacobian_norms(load_model(checkpoint), ids_bs, settings.iterations)
        log(f"{name}: {len(found[name].of_layers)} layers")
    read = "random token ids" if settings.text is None else f"the text {settings.text}"
    return Measured(
        findings=[_finding(name, norms, read) for name, norms in found.items()],
        tables=[_table(name, norms) for name, norms in found.items()],
        pictures={"jacobians.png": drawn(lambda panels: _draw(panels[0], found), columns=2)},
    )


def load_model(checkpoint: Checkpoint) -> FANformerForCausalLM:
    """Return the checkpoint of any format as the model for transformers, in float32, with attention that can be
    derived.
    """
    stated = to_huggingface_config(checkpoint.config)
    model = FANformerForCausalLM._from_config(stated, attn_implementation="eager").float().eval()
    unpadded = dataclasses.replace(checkpoint.config, make_vocab_size_divisible_by=1)
    tensors = convert(checkpoint.tensors, checkpoint.config, checkpoint.format, "hf", target_config=unpadded)
    absent, stray = model.load_state_dict({name: tensors[name].float() for name in tensors}, strict=False)
    assert not stray and set(absent) <= {"lm_head.weight"}, "only a tied head is not among the tensors"
    model.tie_weights()
    return model


def _input(settings: LipschitzSettings, checkpoint: Checkpoint) -> Tensor:
    """Return token ids [b, s]: the text's first ones, or random ones by seed 0."""
    shape = (settings.sequences, min(settings.sequence_length, checkpoint.config.seq_length))
    if settings.text is None:
        return torch.randint(checkpoint.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    if checkpoint.tokenizer is None:
        raise InputError(f"{checkpoint.path} has no tokenizer to read lipschitz.text with; leave it out")
    try:
        text = regular_file(Path(settings.text), most_bytes=MOST_BYTES).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"lipschitz.text {settings.text} cannot be read ({error}); name a file of text") from None
    ids = load_tokenizer(checkpoint.tokenizer, needs_eod=False).encode(text)[: shape[0] * shape[1]]
    if len(ids) < shape[0] * shape[1]:
        raise InputError(
            f"lipschitz.text has {len(ids)} tokens, and {shape[0] * shape[1]} are needed; name a longer one"
        )
    return torch.tensor(ids).view(shape)


def jacobian_norms(model: FANformerForCausalLM, ids_bs: Tensor, iterations: int) -> Norms:
    """Return the largest singular values of every layer's Jacobian, and of those from the embeddings to its output.

    Args:
        iterations: of the power iteration, which approaches the value from below.
    """
    length = ids_bs.shape[1]
    positions = model.model.rotary_emb(torch.arange(length)[None])
    causal = torch.full((length, length), float("-inf")).triu(1)

    def layer(number: int) -> Map:
        module = model.model.layers[number]
        return lambda x_bsh: module(x_bsh, position_embeddings=positions, attention_mask=causal)

    def through(number: int) -> Map:
        def run(x_bsh: Tensor) -> Tensor:
            for each in range(number + 1):
                x_bsh = layer(each)(x_bsh)
            return x_bsh

        return run

    model.requires_grad_(False)
    embeddings_bsh = model.model.embed_tokens(ids_bs)
    x_bsh, of_layers, from_embeddings = embeddings_bsh, [], []
    for number in range(len(model.model.layers)):
        of_layers.append(largest_singular_value(layer(number), x_bsh, iterations))
        from_embeddings.append(largest_singular_value(through(number), embeddings_bsh, iterations))
        x_bsh = layer(number)(x_bsh).detach()
    return Norms(of_layers=of_layers, from_embeddings=from_embeddings)


def largest_singular_value(function: Map, at_bsh: Tensor, iterations: int) -> float:
    """Compute that of the function's Jacobian at each sequence, by power iteration on JᵀJ; return the largest.

    Sequences must not see each other: theirs are the diagonal blocks of the Jacobian.
    """
    at_bsh = at_bsh.detach().requires_grad_()
    out = function(at_bsh)
    along = torch.zeros_like(out, requires_grad=True)
    # Jᵀ along is linear in `along`, so that its own derivative is J: forward and backward by one recorded graph.
    pulled = torch.autograd.grad(out, at_bsh, along, create_graph=True)[0]

    def pushed(direction: Tensor) -> Tensor:
        return torch.autograd.grad(pulled, along, direction, retain_graph=True)[0]

    direction = _unit(torch.randn(at_bsh.shape, generator=torch.Generator().manual_seed(0)))
    for _ in range(iterations):
        direction = _unit(torch.autograd.grad(out, at_bsh, pushed(direction), retain_graph=True)[0])
    return pushed(direction).flatten(1).norm(dim=1).max().item()


def _unit(x_bsh: Tensor) -> Tensor:
    return x_bsh / x_bsh.flatten(1).norm(dim=1)[:, None, None]


def _finding(name: str, norms: Norms, read: str) -> Finding:
    last, typical = norms.from_embeddings[-1], statistics.geometric_mean(norms.of_layers)
    return Finding(
        name=f"Jacobian from the embeddings to the last layer, {name}",
        ours=last,
        unit="largest singular value",
        shows=None,
        sentence=f"{name}, on {read}: the largest singular value from the embeddings to the output of all "
        f"{len(norms.of_layers)} layers is {last:.3g}; a layer's own is {typical:.3g} in the geometric mean.",
    )


def _table(name: str, norms: Norms) -> Table:
    values = zip(norms.of_layers, norms.from_embeddings, strict=True)
    rows: list[list[Cell]] = [[number, *pair] for number, pair in enumerate(values, start=1)]
    columns = ["layer", "its own", "from the embeddings"]
    return Table(title=f"Largest singular values of {name}", columns=columns, rows=rows)


def _draw(panels: Any, found: dict[str, Norms]) -> None:
    for name, norms in found.items():
        depths = range(1, len(norms.of_layers) + 1)
        draw_by_depth(panels[0], depths, {name: norms.of_layers}, title="a layer's Jacobian")
        draw_by_depth(panels[1], depths, {name: norms.from_embeddings}, title="from the embeddings")


def draw_by_depth(axes: Any, depths: Sequence[int], lines: Mapping[str, Sequence[float]], *, title: str) -> None:
    """Positive figures over the number of layers, dashed where they are of float64."""
    for name, values in lines.items():
        axes.plot(depths, values, marker=".", label=name, linestyle="--" if "float64" in name else "-")
    axes.set(xlabel="layers", title=title)
    set_logarithmic(axes.yaxis)
    axes.legend()
