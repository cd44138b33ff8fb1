"""Logits of a model of any format, from its own tensors, each in memory only while its layer runs.

A checkpoint of ours runs through megatron-core's model class, a Hugging Face folder through its own: the code that
their users run. Their weights are filled in when a layer is about to run, and dropped after it. A reference checkpoint
runs through `reference_model`: the authors' code is not installed here.

Shapes: b batch, s sequence, v rows of the head.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from megatron_fanformer.errors import CorruptError
from megatron_fanformer.formats.huggingface import to_huggingface_config
from megatron_fanformer.formats.name_table import Format
from megatron_fanformer.formats.verify.reference_model import reference_logits
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.local_shards import local_shards
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid
from megatron_fanformer.runtime.seeding import seed_everything

Logits = Callable[[Tensor], Tensor]
"""Maps ids [b, s] to logits [b, s, v] in float32."""
Load = Callable[[str], Tensor]
_LAYER_NUMBER = re.compile(r"\.\d+\.")


class UsedTensors:
    """Returns tensors by name in float32, and records which were requested.

    A layer's tensors reuse the memory of the layer before, which has run by then: fresh memory for each would take
    longer than the model's own work.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """`dtype` to round to first; None: as they are."""
        self._tensors, self._dtype = tensors, dtype
        self.used: set[str] = set()
        self._room: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """Return the tensor of a name; raises CorruptError where there is none."""
        if name not in self._tensors:
            raise CorruptError(f"the model asks for {name}, which was not written")
        self.used.add(name)
        tensor = self._tensors[name]
        if self._dtype is not None:
            tensor = tensor.to(self._dtype)
        in_any_layer = _LAYER_NUMBER.sub(".", name, count=1)
        if tensor.dtype == torch.float32 or in_any_layer == name:
            return tensor.float()
        room = self._room.get(in_any_layer)
        if room is None or room.shape != tensor.shape:
            room = self._room[in_any_layer] = torch.empty(tensor.shape)
        return room.copy_(tensor)

    def give_back(self) -> None:
        """Free the memory of the last layer."""
        self._room.clear()


def logits_of(format: Format, config: FANformerConfig, load: Load, grid: RankGrid) -> Logits:
    """Return the model of a format: `load` returns its tensors in float32, each time one is needed.

    Raises:
        CorruptError: later, where a tensor is missing or has another shape than the model's.
    """
    if format == "reference":
        return lambda ids_bs: reference_logits(config, load, ids_bs)
    if format == "hf":
        return _huggingface(config, load)
    return _megatron(config, load, grid)


def _huggingface(config: FANformerConfig, load: Load) -> Logits:
    with no_init_weights():
        model = FANformerForCausalLM(to_huggingface_config(dataclasses.replace(config, num_layers=1))).eval()
    number = _run_as_all(model.model, config.num_layers)
    model.config.num_hidden_layers = config.num_layers
    tied = {} if config.untie_embeddings_and_output_weights else {"lm_head.weight": "model.embed_tokens.weight"}
    parts = {name: [_Part(tied.get(name, name), ...)] for name, _ in model.named_parameters(remove_duplicate=False)}
    _fill_all_while_running(model, parts, load, number)

    @torch.no_grad()
    def logits(ids_bs: Tensor) -> Tensor:
        out: Tensor = model(input_ids=ids_bs, use_cache=False).logits
        return out.float()

    return logits


def _megatron(config: FANformerConfig, load: Load, grid: RankGrid) -> Logits:
    seed_everything(0)  # megatron-core needs its random states
    one_layer = dataclasses.replace(config, num_layers=1)
    (stage,) = build_stages(one_layer, ParallelConfig(), grid, dtype=torch.float32, seed=None)
    parts = {
        name: [_Part(shard.key, shard.global_slice()) for shard in local_shards({name: value})]
        for name, value in sharded_state(stage, grid).items()
    }
    number = _run_as_all(stage.decoder, config.num_layers)
    _fill_all_while_running(stage.eval(), parts, load, number)
    if not config.untie_embeddings_and_output_weights:
        _hand_over_embedding(stage, load)

    @torch.no_grad()
    def logits(ids_bs: Tensor) -> Tensor:
        positions = torch.arange(ids_bs.shape[1]).expand_as(ids_bs)
        out: Tensor = stage(input_ids=ids_bs, position_ids=positions, attention_mask=None)
        return out.float()

    return logits


class _Part(NamedTuple):
    """Rows of a parameter: a part of the tensor with that name."""

    name: str
    part: Any


class _Counter:
    """Counts the layers as they run."""

    def __init__(self, layers: int) -> None:
        self._layers, self.value = layers, -1

    def advance(self) -> None:
        """To the next one; after the last comes the first of the next run."""
        self.value = (self.value + 1) % self._layers


def _run_as_all(decoder: Any, layers: int) -> _Counter:
    """Run the one layer of `decoder.layers` as each of them in turn: all would be a whole model in memory."""
    (layer,) = decoder.layers
    decoder.layers = nn.ModuleList([layer] * layers)
    number = _Counter(layers)
    layer.register_forward_pre_hook(lambda *_: number.advance())
    return number


def _fill_all_while_running(model: nn.Module, parts: Mapping[str, list[_Part]], load: Load, number: _Counter) -> None:
    """Remove all parameters, and give each module its own while it runs."""
    for path, module in model.named_modules():
        own = [name for name, value in module._parameters.items() if value is not None]
        loads = {name: functools.partial(_assembled, load, parts[f"{path}.{name}"], number) for name in own}
        if own:
            _fill_while_running(module, loads)


def _assembled(load: Load, parts: list[_Part], number: _Counter) -> Tensor:
    """Return a parameter from its parts; each tensor is loaded once, and copied only where the parts are not all of
    it.
    """
    names = dict.fromkeys(part.name for part in parts)
    tensors = {name: load(name.replace("layers.0.", f"layers.{number.value}.")) for name in names}
    pieces = [tensors[name][part] for name, part in parts]
    (first, *others) = tensors.values()
    return first if not others and _make_up(first, pieces) else torch.cat(pieces)


def _make_up(tensor: Tensor, parts: list[Tensor]) -> bool:
    """Return whether contiguous parts of a tensor, one after the other, are all of it."""
    ends = [tensor.data_ptr()]
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != ends[-1]:
            return False
        ends.append(part.data_ptr() + part.nbytes)
    return ends[-1] == tensor.data_ptr() + tensor.nbytes and parts[0].shape[1:] == tensor.shape[1:]


def _hand_over_embedding(stage: Any, load: Load) -> None:
    """Give a tied head the embedding's weight, which by then has been dropped."""

    def give(_module: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
        return arguments, {**options, "weight": load("embedding.word_embeddings.weight")}

    stage.output_layer.register_forward_pre_hook(give, with_kwargs=True)


def _fill_while_running(module: nn.Module, loads: Mapping[str, Callable[[], Tensor]]) -> None:
    """Give a module its own parameters when it is about to run, and remove them afterwards."""
    shapes = {name: module._parameters[name].shape for name in loads}  # type: ignore[union-attr]

    def take_away(*_: Any) -> None:
        for name, shape in shapes.items():
            module._parameters[name] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)

    def fill(*_: Any) -> None:
        for name, load in loads.items():
            tensor = load()
            if tensor.shape != shapes[name]:
                raise CorruptError(
                    f"the model's {name} in {type(module).__name__} has shape {list(shapes[name])}, but what was "
                    f"written has shape {list(tensor.shape)}"
                )
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    take_away()
    module.register_forward_pre_hook(fill)
    module.register_forward_hook(take_away)
