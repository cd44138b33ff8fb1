"""What the Transformer Engine spec needs beyond megatron-core's own wrappers; imports only where the Engine does."""

from typing import Any

from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide

from megatron_fanformer.model.local_layers import without_sequence_parallel


class WholeInputTEColumnParallelLinear(TELinear):
    """Transformer Engine's form of `WholeInputColumnParallelLinear`.

    The Engine's own column parallel layer sums its input gradient inside. So each rank's shard is built as a plain
    layer of that size (megatron-core's `duplicated` mode: no communication at all), and marked as a shard, for the
    gradient norm and for checkpoints.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        gather_output: bool,
        tp_group: Any,
        **kwargs: Any,
    ) -> None:
        if gather_output:
            raise ValueError("gather_output is true; Transformer Engine layers keep their output sharded")
        kwargs.setdefault("skip_weight_param_allocation", False)
        super().__init__(
            input_size,
            divide(output_size, tp_group.size()),
            parallel_mode="duplicated",
            config=without_sequence_parallel(config),
            **kwargs,
        )
        self.shard_group = tp_group
        for parameter in self.parameters():
            # set already by the Engine, to what a plain layer is
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = 0, 1

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Shards along the output rows."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.shard_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class ReplicatedTELinear(TELinear):
    """Transformer Engine's form of `ReplicatedLinear`: megatron-core's `duplicated` mode is exactly that."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        gather_output: bool,
        tp_group: Any,
        skip_weight_param_allocation: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            parallel_mode="duplicated",
            skip_weight_param_allocation=skip_weight_param_allocation,
            **kwargs,
        )
