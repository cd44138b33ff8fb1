"""A placement that the package does not have, as one file: FAN in front of the MLP's SwiGLU, h + mlp(X_F(norm(h))).

It is what a new placement costs: the object, the modules it builds, and the class of the exports' model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron_fanformer.hf import configuration_fanformer, modeling_fanformer
from megatron_fanformer.hf.modeling_fanformer import FANActivation, FANformerAttention, FANformerMLP
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.fan_layer import ActivatedColumnParallelLinear, FANOptions, FANProjection
from megatron_fanformer.model.local_layers import LocalBackend
from megatron_fanformer.model.placements import FAN_ROWS, PLACEMENTS, SWIGLU, FANMap, H, Placement, fan_tensors

NAME = "mlp_input"
FAN = "mlp.linear_fc1.fan.linear"


class MLPInput(Placement):
    """FAN in front of the MLP."""

    name = NAME
    title = "Transformer with FAN in front of its MLP"
    description = "FAN in front of its MLP"
    is_fanformer = True
    mlp_tensors = (*fan_tensors(FAN, (FAN_ROWS, H), None, "mlp.fan"), *SWIGLU)
    reference_fields = None
    has_engine_layers = False

    def outputs(self, fan: FANConfig, hidden_size: int, value_size: int) -> list[tuple[int, float]]:
        return [(hidden_size, fan.p_ratio)]

    def maps(self, model: FANformerConfig) -> list[FANMap]:
        return [FANMap(f"{FAN}.weight", "p_ratio", model.hidden_size, model.fan.p_ratio)]

    def mlp_backend(self, fan: FANConfig) -> Any:
        return _Backend(fan)


class _Backend(LocalBackend):
    def __init__(self, fan: FANConfig) -> None:
        self._fan = fan

    def column_parallel_linear(self) -> Any:
        return ModuleSpec(module=FANThenLinear, params={"fan": self._fan})


class FANThenLinear(ActivatedColumnParallelLinear):
    """The MLP's first map, which reads X_F."""

    def __init__(self, *args: Any, fan: FANConfig, config: Any, tp_group: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, tp_group=tp_group, **kwargs)
        self.fan = FANProjection(config, FANOptions(fan), linear=ColumnParallelLinear, tp_group=tp_group)
        self.activation = self.fan.activation

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, None]:
        product_sbo, _ = super().forward(self.fan.pre_activation(x_sbh))
        return product_sbo, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {key: value for key, value in state.items() if not key.startswith(f"{prefix}fan.")}
        return own | self.fan.sharded_state_dict(f"{prefix}fan.", sharded_offsets, metadata)


class HuggingFaceMLP(FANformerMLP):
    """The same for transformers."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.fan_activation = FANActivation(config, config.hidden_size, config.p_ratio)
        self.fan = nn.Linear(config.hidden_size, sum(self.fan_activation.sizes), bias=config.fan_bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.fan_activation(self.fan(x)))


@contextmanager
def registered() -> Iterator[None]:
    """Within it there is the placement: the entries that a new file needs, in the package's table and the exports'."""
    names = FANConfig.__annotations__["placement"]
    PLACEMENTS[NAME] = MLPInput()
    _set_names(Literal[tuple(PLACEMENTS)])  # as the import of model.placements makes them
    configuration_fanformer.FAN_PLACEMENTS[NAME] = configuration_fanformer.Placement()
    modeling_fanformer.LAYER_PARTS[NAME] = (FANformerAttention, HuggingFaceMLP)
    try:
        yield
    finally:
        for table in (PLACEMENTS, configuration_fanformer.FAN_PLACEMENTS, modeling_fanformer.LAYER_PARTS):
            del table[NAME]
        _set_names(names)


def _set_names(names: Any) -> None:
    FANConfig.__annotations__["placement"] = names
    for owner in (FANConfig, FANformerConfig):
        if "__msgspec_cache__" in vars(owner):  # of the fields' types, once values were converted to one
            del owner.__msgspec_cache__


def train(*arguments: Any) -> Any:
    """Train as `train_stream` does, where there is the placement."""
    from tests.train.layouts import train_stream

    with registered():
        return train_stream(*arguments)
