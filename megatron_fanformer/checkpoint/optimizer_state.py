"""The optimizer's state in a checkpoint: one form, whichever optimizer wrote it and whichever is to take it.

    optimizer.state.exp_avg.NAME, optimizer.state.exp_avg_sq.NAME    Adam's moments of the weight NAME
    optimizer.state.param.NAME                                       its float32 main weight, unless NAME itself is that
    optimizer/param_groups                                           hyperparameters and the step, a group of weights

megatron-core's optimizers (plain, with float32 main weights, distributed) agree on the tensors' names but for the main
weights', and nest them and the groups in different ways; here each one's own nesting is taken apart when it is saved,
and filled when it is loaded.
"""

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from megatron_fanformer.runtime.parallel import RankGrid

MAIN_WEIGHT = "optimizer.state.param."
MAIN_WEIGHT_OF_PLAIN = "optimizer.state.fp32_param."
"""What megatron-core's optimizer with main weights calls them, where it is not distributed."""


def own_state(optimizer: Any, weights: dict[str, Any], grid: RankGrid, *, is_loading: bool = False) -> dict[str, Any]:
    """An optimizer's sharded state dict, in its own nesting; every rank calls it.

    Args:
        weights: the sharded state dict of its weights, whose data are the parameters themselves.
        is_loading: the tensors are to be filled.
    """
    with _padding_counted(optimizer):
        return optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=grid.sharding_metadata)


@contextmanager
def _padding_counted(optimizer: Any) -> Iterator[None]:
    """Let a distributed optimizer gather its buffers with the padding between their buckets.

    megatron-core leaves the padding out, and then looks for a parameter where it stands with it: behind a padded
    bucket it would save other parameters' values under a name, and zeros at the end (Megatron-LM pull request 5077;
    seen in 0.16.1 and 0.19.2, with the tied embedding's bucket or buckets of overlapped communication).
    """
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    buffers = [buffer for each in optimizers for buffer in getattr(each, "buffers", ())]
    padded = [(buffer, buffer.numel) for buffer in buffers]
    padded += [(bucket, bucket.grad_data.numel()) for buffer in buffers for bucket in buffer.buckets]
    unpadded = [(part, part.numel_unpadded) for part, _ in padded]
    _count(padded)
    try:
        yield
    finally:
        _count(unpadded)


def _count(elements: list[tuple[Any, int]]) -> None:
    for part, number in elements:
        part.numel_unpadded = number


def stored_state(state: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """The form above, as a sharded state dict.

    Args:
        state: of `own_state`.
        weights: the sharded state dict of its weights.
    """
    whole = {leaf.key for leaf in _tensors(weights) if leaf.data.dtype == torch.float32}
    tensors = {leaf.key: leaf for leaf in map(_with_common_name, _tensors(state))}
    return {
        "optimizer": {"param_groups": _stored_groups(state)},
        "optimizer_tensors": {key: leaf for key, leaf in tensors.items() if _weight_of_main(key) not in whole},
    }


def requested_tensors(state: dict[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """The tensors that an optimizer's own state has, under the names that a checkpoint has them by.

    Args:
        state: of `own_state`, for loading.
        stored: the names of the tensors in the checkpoint.
    """
    return {leaf.key: _named(leaf, _stored_name(leaf.key, stored)) for leaf in _tensors(state)}


def requested_weights(weights: dict[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Weights by the names that a checkpoint has them by: in float32 the main weights, where there are any."""
    return {
        chunk: {
            name: _named(leaf, MAIN_WEIGHT + leaf.key)
            if leaf.data.dtype == torch.float32 and MAIN_WEIGHT + leaf.key in stored
            else leaf
            for name, leaf in leaves.items()
        }
        for chunk, leaves in weights.items()
    }


def fill(state: dict[str, Any], tensors: dict[str, torch.Tensor], stored: dict[str, Any]) -> None:
    """Put what was loaded into the state of `own_state`, for the optimizer to take over.

    Args:
        tensors: by their names in `state`.
        stored: the checkpoint's plain values of the optimizer, in the form of any.
    """

    def loaded(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        return tensors[value.key] if _is_tensor(value) else value

    dict_list_map_inplace(loaded, state)
    # Groups stand in one order on all ranks of all layouts; megatron-core pairs them by what they say, besides.
    for own, group in zip(_groups(state), _groups(stored), strict=True):
        own.update({name: value for name, value in group.items() if name != "params"})


def _stored_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Every group with the one step, which an optimizer does not count where this rank has no weights of a group."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in _groups(state)]
    step = max(group.get("step", 0) for group in groups)
    return [{**group, "step": step} for group in groups]


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    if "param_groups" in state:
        return state["param_groups"]
    return [group for value in state.values() if isinstance(value, dict) for group in _groups(value)]


def _tensors(state: dict[str, Any]) -> list[Any]:
    return [value for value in nested_values(state) if _is_tensor(value)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, ShardedTensor | ShardedTensorFactory)


def _named(leaf: Any, key: str) -> Any:
    return leaf if leaf.key == key else dataclasses.replace(leaf, key=key)


def _with_common_name(leaf: Any) -> Any:
    weight = _weight_of_main(leaf.key)
    return leaf if weight is None else _named(leaf, MAIN_WEIGHT + weight)


def _weight_of_main(key: str) -> str | None:
    """The name of the weight that a main weight is of; None for other tensors."""
    for prefix in (MAIN_WEIGHT, MAIN_WEIGHT_OF_PLAIN):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return None


def _stored_name(key: str, stored: Collection[str]) -> str:
    weight = _weight_of_main(key)
    if weight is None:
        return key
    return next((p + weight for p in (MAIN_WEIGHT, MAIN_WEIGHT_OF_PLAIN) if p + weight in stored), weight)
