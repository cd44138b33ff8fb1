"""Pipeline stages that take equally long: the loss head counts as layers, of which its stage has fewer."""

from collections.abc import Iterator

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.layout_rules import divisors
from megatron_fanformer.planning.flops import head_flops_per_token, layer_flops_per_token


def balanced_layouts(model: FANformerConfig, stages: int) -> Iterator[str]:
    """Yield a `pipeline_model_parallel_layout` for each number of chunks that divides the most layers of a stage.

    Layers and the loss head, which counts as layers by its FLOPs, are shared out evenly. Where that leaves chunks with
    one layer less, the first is one of them: it has the embedding. Even layouts are left out.
    """
    head = round(head_flops_per_token(model) / layer_flops_per_token(model))
    units = model.num_layers + head
    for chunks in divisors(-(-units // stages)):
        each, more = divmod(units, stages * chunks)
        layers = [each + (1 <= place <= more) for place in range(stages * chunks)]
        layers[-1] -= head
        if layers[-1] >= 0 and all(layers[1:-1]) and len(set(layers)) > 1:
            yield _text(layers)


def _text(layers: list[int]) -> str:
    """Return the shortest text with equal neighbors as a repeated group."""
    first, *middle, last = layers
    parts = [f"E{_layers(first)}"]
    while middle:
        alike = next((place for place, number in enumerate(middle) if number != middle[0]), len(middle))
        chunk = _layers(middle[0])
        parts.append(f"({chunk}|)*{alike}" if alike > 1 else f"{chunk}|")
        middle = middle[alike:]
    return f"{parts[0]}|{''.join(parts[1:])}{_layers(last)}L"


def _layers(number: int) -> str:
    return "t" * number if number < 4 else f"t*{number}"
